"""torchtitan's activation checkpointing: full, and selective by operation.

From `_get_default_save_ops` and `SelectiveAC` of
`torchtitan/distributed/activation_checkpoint.py`, in JAX's primitives. Its third
mode, a memory budget, is `remat.plan`.
"""

from remat.policies._by_kind import (
    discrete,
    dots,
    dots_no_batch,
    every_nth,
    primitive,
)
from remat.policies._catalogue import nothing
from remat.policies._description import Description
from remat.policies._factories import save
from remat.policies._registry import entry, same
from remat.policies._tensors import CHOICES

_ATTENTION = primitive("dot_product_attention_fwd_wrapper", "pallas_call")
_COLLECTIVES = primitive("reduce_scatter", "all_to_all", "ragged_all_to_all")
_COMPUTE = (
    _ATTENTION
    | (dots() - dots_no_batch())
    | primitive("ragged_dot_general")
    | _COLLECTIVES
    | discrete()
)

torchtitan_full = same("torchtitan_full", nothing, "torchtitan")
torchtitan_compute_ops = entry(
    "torchtitan_compute_ops",
    save(dots_no_batch() | _COMPUTE),
    Description(
        saves="matrix products, convolutions, attention kernels, "
        f"reduce-scatter and all-to-all; {CHOICES}",
        recomputes="norms, activation functions, softmax",
        when="you want no dear operation run twice, communication included",
        source="torchtitan, the operations it saves",
    ),
)
torchtitan_selective = entry(
    "torchtitan_selective",
    save(every_nth(dots_no_batch(), 2) | _COMPUTE),
    Description(
        saves="every second product with weights; batched products, convolutions, "
        f"attention kernels, reduce-scatter and all-to-all; {CHOICES}",
        recomputes="the other products with weights, norms, activation functions",
        when="`torchtitan_compute_ops` does not fit",
        source="torchtitan, selective",
    ),
)
