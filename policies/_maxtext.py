"""MaxText's policies, with exactly its tensors.

From `Decoder.get_remat_policy` and `get_save_and_offload_names` of MaxText.
"""

from remat.policies._factories import offload_names, save_names
from remat.policies._policy import Description
from remat.policies._registry import register

_SOURCE = "MaxText"
_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")

minimal = register(
    "minimal",
    save_names(*_QKV, "out_proj", *_MLP),
    Description(
        saves="every projection of attention and MLP",
        recomputes="attention itself, norms, activation functions",
        when="you want the least recompute and attention is cheap or a fused kernel",
        source=_SOURCE,
    ),
)
minimal_with_context = register(
    "minimal_with_context",
    save_names(*_QKV, "out_proj", *_MLP, "context"),
    Description(
        saves="every projection of attention and MLP, and attention's output",
        recomputes="norms, activation functions",
        when="you want the least recompute and long sequences make attention dear",
        source=_SOURCE,
    ),
)
save_dot_except_mlpwi = register(
    "save_dot_except_mlpwi",
    save_names(*_QKV, "out_proj", "mlpwo"),
    Description(
        saves="projections of attention, and the MLP's output",
        recomputes="the MLP's wide inner values, attention itself, norms",
        when="`minimal` does not fit; the wide values are the largest",
        source=_SOURCE,
    ),
)
save_dot_except_mlp = register(
    "save_dot_except_mlp",
    save_names(*_QKV, "out_proj"),
    Description(
        saves="projections of attention",
        recomputes="the MLP, attention itself, norms",
        when="`save_dot_except_mlpwi` does not fit",
        source=_SOURCE,
    ),
)
save_qkv_proj = register(
    "save_qkv_proj",
    save_names(*_QKV),
    Description(
        saves="query, key and value projections",
        recomputes="attention, its output projection, the MLP, norms",
        when="`save_dot_except_mlp` does not fit",
        source=_SOURCE,
    ),
)
save_out_proj = register(
    "save_out_proj",
    save_names("out_proj"),
    Description(
        saves="attention's output projection",
        recomputes="query, key and value, attention, the MLP, norms",
        when="there is memory for one value a layer",
        source="MaxText; Praxis",
    ),
)
qkv_proj_offloaded = register(
    "qkv_proj_offloaded",
    offload_names("query_proj", "key_proj", "value_proj", "kv_proj"),
    Description(
        saves="nothing",
        offloads="query, key and value projections",
        recomputes="attention, its output projection, the MLP, norms",
        when="nothing more fits on the device and the host link is free",
        source=_SOURCE,
    ),
)
minimal_offloaded = register(
    "minimal_offloaded",
    offload_names(*_QKV, "out_proj", *_MLP),
    Description(
        saves="nothing",
        offloads="every projection of attention and MLP",
        recomputes="attention itself, norms, activation functions",
        when="layers compute longer than the host link needs to move them",
        source=_SOURCE,
    ),
)
