"""MaxText's policies, with exactly its tensors.

From `Decoder.get_remat_policy` and `get_save_and_offload_names` of MaxText, at
commit e591f30.
"""

from remat.policies._by_kind import discrete
from remat.policies._catalogue import nothing
from remat.policies._errors import PolicyError
from remat.policies._factories import save, save_and_offload_names
from remat.policies._policy import Policy
from remat.policies._registry import maker, same
from remat.policies._tensors import transformer

_SOURCE = "MaxText"
_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")

full = same("full", nothing, _SOURCE)

minimal = transformer(
    "minimal",
    (*_QKV, "out_proj", *_MLP),
    saves="every projection of attention and MLP",
    recomputes="attention itself, norms, activation functions",
    when="you want the least recompute, and attention is cheap",
    source=_SOURCE,
)
minimal_with_context = transformer(
    "minimal_with_context",
    (*_QKV, "out_proj", *_MLP, "context"),
    saves="every projection of attention and MLP; attention's output",
    recomputes="scores and softmax where attention is not a fused kernel, norms",
    when="you want the least recompute, and long sequences make attention dear",
    source=_SOURCE,
)
minimal_flash = same("minimal_flash", minimal_with_context, _SOURCE)
minimal_with_quantization = transformer(
    "minimal_with_quantization",
    (*_QKV, "out_proj", *_MLP, "quantization"),
    saves="every projection of attention and MLP; quantized operands",
    recomputes="attention itself, norms, activation functions",
    when="as `minimal`, with quantized matrix products and layers not scanned",
    source=_SOURCE,
)
minimal_with_context_and_quantization = transformer(
    "minimal_with_context_and_quantization",
    (*_QKV, "out_proj", *_MLP, "context", "quantization"),
    saves="every projection of attention and MLP; attention's output; "
    "quantized operands",
    recomputes="scores and softmax where attention is not a fused kernel, norms",
    when="as `minimal_with_context`, with quantized products and layers not scanned",
    source=_SOURCE,
)
save_dot_with_context_except_mlp = transformer(
    "save_dot_with_context_except_mlp",
    (*_QKV, "context", "out_proj"),
    saves="projections of attention; attention's output",
    recomputes="the MLP, norms",
    when="`minimal_with_context` does not fit",
    source=_SOURCE,
)
save_dot_except_mlpwi = transformer(
    "save_dot_except_mlpwi",
    (*_QKV, "out_proj", "mlpwo"),
    saves="projections of attention; the MLP's output",
    recomputes="the MLP's wide inner values, attention itself, norms",
    when="`minimal` does not fit; the wide values are the largest",
    source=_SOURCE,
)
save_dot_except_mlp = transformer(
    "save_dot_except_mlp",
    (*_QKV, "out_proj"),
    saves="projections of attention",
    recomputes="the MLP, attention itself, norms",
    when="`save_dot_except_mlpwi` does not fit",
    source=_SOURCE,
)
save_qkv_proj = transformer(
    "save_qkv_proj",
    _QKV,
    saves="query, key and value projections",
    recomputes="attention, its output projection, the MLP, norms",
    when="`save_dot_except_mlp` does not fit",
    source=_SOURCE,
)
save_out_proj = transformer(
    "save_out_proj",
    ("out_proj",),
    saves="attention's output projection",
    recomputes="query, key and value, attention, the MLP, norms",
    when="there is memory for one value a layer",
    source="MaxText; Praxis",
)
qkv_proj_offloaded = transformer(
    "qkv_proj_offloaded",
    offloaded=("query_proj", "key_proj", "value_proj", "kv_proj"),
    offloads="query, key and value projections, where they are separate",
    recomputes="attention, its output projection, the MLP, norms",
    when="nothing more fits on the device, and the host link is free",
    source=_SOURCE,
)
minimal_offloaded = transformer(
    "minimal_offloaded",
    offloaded=(*_QKV, "out_proj", *_MLP),
    offloads="every projection of attention and MLP",
    recomputes="attention itself, norms, activation functions",
    when="a layer computes for longer than the host link needs to move them",
    source=_SOURCE,
)

_LOCATIONS = ("remat", "device", "offload")


@maker
def custom(*, decoder_layer_input: str = "device", **tensors: str) -> Policy:
    """MaxText's `custom`: where each tensor goes, one by one.

    Args:
        decoder_layer_input: Where the layer's input goes. The backward pass reads
            it in any case, so `"remat"` keeps it on the device unnamed.
        **tensors: For each checkpoint name `"device"`, `"offload"` or `"remat"`.

    Returns:
        The policy; discrete choices are saved too.

    Raises:
        PolicyError: If a location is none of the three.

    Example:
        >>> from remat import policies
        >>> chosen = policies.custom(query_proj="device", mlpwi="offload")
        >>> sorted(chosen.checkpoint_names)
        ['decoder_layer_input', 'mlpwi', 'query_proj']
    """
    tensors = {"decoder_layer_input": decoder_layer_input, **tensors}
    for name, location in tensors.items():
        if location not in _LOCATIONS:
            raise PolicyError(
                f"custom puts {name!r} in {location!r}, which is no location; valid: "
                f"{', '.join(map(repr, _LOCATIONS))}"
            )
    saved = [name for name, where in tensors.items() if where == "device"]
    offloaded = [name for name, where in tensors.items() if where == "offload"]
    policy = save_and_offload_names(save=saved, offload=offloaded) | save(discrete())
    code = f"custom({', '.join(f'{name}={to!r}' for name, to in tensors.items())})"
    return policy.renamed(code, code, policy.description)
