"""Named policies that do not depend on what a model names its values."""

from remat.policies._by_kind import dots, dots_no_batch, primitive
from remat.policies._by_place import reads_input
from remat.policies._description import Description
from remat.policies._factories import offload, save
from remat.policies._policy import Policy
from remat.policies._registry import entry
from remat.policies._rules import Keep, NoRegion, Nothing
from remat.policies._selector import Anything
from remat.policies._value import Decision

_ALL = Description(
    saves="everything", recomputes="nothing", when="there is memory enough"
)

none = entry(
    "none",
    Policy(rule=NoRegion(), name="none", code="none", description=_ALL),
    Description(
        saves="everything the backward pass reads, as without any region",
        recomputes="nothing",
        when="memory is no concern; the baseline to compare with",
    ),
)
everything = entry(
    "everything",
    Policy(
        rule=Keep(Anything(), Decision.SAVE),
        name="everything",
        code="everything",
        description=_ALL,
    ),
    Description(
        saves="everything the backward pass reads",
        recomputes="nothing",
        when="one region of many should keep all",
        source="JAX, everything_saveable",
    ),
)
nothing = entry(
    "nothing",
    Policy(rule=Nothing(), name="nothing", code="nothing", description=_ALL),
    Description(
        saves="nothing but the inputs of the region",
        recomputes="everything",
        when="memory is what limits you; costs up to one more forward pass",
        source="JAX, nothing_saveable (also policy=None)",
    ),
)
save_dots = entry(
    "save_dots",
    save(dots()),
    Description(
        saves="results of matrix products and convolutions, attention scores too",
        recomputes="norms, activation functions, softmax",
        when="compute is what limits you and attention is a fused kernel",
        source="JAX, dots_saveable",
    ),
)
save_dots_no_batch = entry(
    "save_dots_no_batch",
    save(dots_no_batch()),
    Description(
        saves="results of matrix products with weights (no batch dimensions)",
        recomputes="attention scores and context, norms, activation functions",
        when="a dense transformer; products of experts are batched, so not seen",
        source="JAX, dots_with_no_batch_dims_saveable",
    ),
)
offload_dots = entry(
    "offload_dots",
    offload(dots()),
    Description(
        saves="nothing",
        offloads="results of matrix products and convolutions",
        recomputes="norms, activation functions, softmax",
        when="the host link keeps up with the layers",
    ),
)
offload_dots_no_batch = entry(
    "offload_dots_no_batch",
    offload(dots_no_batch()),
    Description(
        saves="nothing",
        offloads="results of matrix products with weights (no batch dimensions)",
        recomputes="attention scores and context, norms, activation functions",
        when="the host link keeps up with the layers of a dense transformer",
        source="JAX, offload_dot_with_no_batch_dims",
    ),
)
_PRODUCTS = (dots() | primitive("ragged_dot_general")) & reads_input()
save_dots_with_weights = entry(
    "save_dots_with_weights",
    save(_PRODUCTS),
    Description(
        saves="results of products with weights, those of experts and convolutions too",
        recomputes="attention scores and context, norms, activation functions",
        when="as `save_dots_no_batch`, and for a mixture of experts",
    ),
)
offload_dots_with_weights = entry(
    "offload_dots_with_weights",
    offload(_PRODUCTS),
    Description(
        saves="nothing",
        offloads="results of products with weights, those of experts too",
        recomputes="attention scores and context, norms, activation functions",
        when="the host link keeps up with the layers of a mixture of experts",
    ),
)
