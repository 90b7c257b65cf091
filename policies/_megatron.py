"""Megatron-LM's recompute modules, and its uniform and block over layers.

Megatron names the modules whose activations are recomputed; the rest of the layer
is saved ("selective"). Here a module is known by its path, so these need binding.
The patterns cover what Linen, NNX and MaxText models call such modules. From
`recompute_modules` of `megatron/core/transformer/transformer_config.py`, at commit
d98e8a6; paper: Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models.
"""

from remat.policies._by_kind import discrete, elementwise
from remat.policies._by_name import named_like
from remat.policies._by_place import directly_in, in_module
from remat.policies._catalogue import nothing
from remat.policies._checks import checked_count, checked_strings
from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._factories import recompute, save
from remat.policies._layered import every_nth_layer, first_layers
from remat.policies._policy import Policy
from remat.policies._registry import entry, maker, same
from remat.policies._selector import Selector
from remat.policies._tensors import CHOICES

_SOURCE = "Megatron-LM"
_MOE = in_module("*moe*", "*experts*", "*mixture*")
_DELTA_NET = in_module("*gdn*", "*delta_net*", "*deltanet*")
_DELTA_PRODUCT = in_module("*gdp*", "*delta_product*", "*deltaproduct*")

MODULES: dict[str, Selector] = {
    # A pattern, since the output of attention need not have a name.
    "core_attn": directly_in("*attn*", "*attention*") - named_like("context"),
    "layernorm": in_module("*norm*", "ln*"),
    "mla_up_proj": in_module("*up_proj*", "wq_b", "wkv_b") & in_module("*att*", "mla*"),
    "mlp": in_module("*mlp*", "*feed_forward*", "ffn*") - _MOE,
    "moe": _MOE,
    "moe_act": _MOE & elementwise(),
    "shared_experts": in_module("*shared_expert*"),
    "gdn_norm_out": in_module("*norm*") & _DELTA_NET,
    "gdp_in_proj": in_module("in_proj*") & _DELTA_PRODUCT,
    "gdp_qkv": in_module("*conv*", "*qkv*") & _DELTA_PRODUCT,
    "mhc": in_module("*mhc*", "*hyper_connection*", "*hyperconnection*"),
}
"""The values of each module, in Megatron's terms."""


@maker
def megatron_selective(*modules: str) -> Policy:
    """Recompute the activations of some modules, save all others.

    Args:
        *modules: Of `core_attn`, `layernorm`, `mla_up_proj`, `mlp`, `moe`,
            `moe_act`, `shared_experts`, `gdn_norm_out`, `gdp_in_proj`, `gdp_qkv` and
            `mhc`; none means `core_attn`, as in Megatron.

    Returns:
        The policy; discrete choices are saved in every module. It needs binding.

    Raises:
        PolicyError: If it is no such module.

    Example:
        >>> from remat import policies
        >>> policies.megatron_selective("layernorm", "moe_act")
        megatron_selective('layernorm', 'moe_act')
    """
    modules = modules or ("core_attn",)
    for module in checked_strings("megatron_selective", "module", modules):
        if module not in MODULES:
            raise PolicyError(
                f"megatron_selective knows no module {module!r}; known: "
                f"{', '.join(MODULES)}"
            )
    policy = recompute(MODULES[modules[0]])
    for module in modules[1:]:
        policy = policy & recompute(MODULES[module])
    listed = ", ".join(modules)
    code = f"megatron_selective({', '.join(map(repr, modules))})"
    return (policy | save(discrete())).renamed(
        code,
        code,
        Description(
            saves=f"everything outside of {listed}; {CHOICES}",
            recomputes=f"values made in {listed}",
            when="these modules' values are large and cheap to compute",
            source=_SOURCE,
        ),
    )


@maker
def megatron_block(n_layers: int) -> Policy:
    """Recompute the first layers in full, save everything in the rest.

    Args:
        n_layers: How many layers are recomputed (`recompute_num_layers`).

    Returns:
        The policy. It needs binding.

    Raises:
        PolicyError: If it is no number of layers.

    Example:
        >>> from remat import policies
        >>> policies.megatron_block(4).for_layer(3)
        nothing
    """
    policy = first_layers(n_layers, "nothing", rest="everything")
    code = f"megatron_block({n_layers})"
    return policy.renamed(
        code,
        code,
        Description(
            saves=f"everything, from layer {n_layers} on",
            recomputes=f"the first {n_layers} layers",
            when="there is memory for some layers, but not for all",
            source=_SOURCE,
        ),
    )


@maker
def megatron_uniform(n_layers: int) -> Policy:
    """Keep the input of every n-th layer only, recompute the layers in between.

    It keeps values named as a layer's input, so one region must hold all layers;
    with one region a layer, segment the scan instead (`remat.scan(segments=)`).

    Args:
        n_layers: Layers in each unit (`recompute_num_layers`).

    Returns:
        The policy. It needs binding.

    Raises:
        PolicyError: If it is no number of layers.

    Example:
        >>> from remat import policies
        >>> policies.megatron_uniform(4)
        megatron_uniform(4)
    """
    checked_count("megatron_uniform", "n_layers", n_layers, 1)
    inputs = save(named_like("*layer_input", "*block_input"))
    policy = every_nth_layer(n_layers, inputs, rest="nothing")
    code = f"megatron_uniform({n_layers})"
    return policy.renamed(
        code,
        code,
        Description(
            saves=f"the input of one layer in {n_layers}",
            recomputes="everything inside a unit of layers",
            when="not even every layer's input fits",
            source=_SOURCE,
        ),
    )


def _row(module: str, saves: str, when: str) -> Policy:
    policy = megatron_selective(module)
    description = Description(
        saves=f"{saves}; {CHOICES}",
        recomputes=policy.description.recomputes,
        when=when,
        source=_SOURCE,
    )
    return entry(f"megatron_{module}", policy, description)


# fmt: off
megatron_core_attn = _row(
    "core_attn", "everything but scores, softmax and attention dropout",
    "attention is not a fused kernel; Megatron's default")
megatron_layernorm = _row(
    "layernorm", "everything but the norms",
    "the last few percent of memory; norms cost next to nothing")
megatron_mla_up_proj = _row(
    "mla_up_proj", "everything but MLA's up projections",
    "multi-head latent attention, whose compressed values are small")
megatron_mlp = _row(
    "mlp", "everything but the dense MLP",
    "attention is fused and the MLP's width is what fills the memory")
megatron_moe = _row(
    "moe", "everything but the mixture of experts",
    "the experts' values fill the memory")
megatron_moe_act = _row(
    "moe_act", "everything but the experts' activation functions",
    "grouped products are dear, activation functions cheap")
megatron_shared_experts = _row(
    "shared_experts", "everything but the shared experts",
    "a mixture of experts with shared ones")
megatron_gdn_norm_out = _row(
    "gdn_norm_out", "everything but the output norm of gated delta nets",
    "a hybrid model with linear attention, whose gated output is large")
megatron_gdp_in_proj = _row(
    "gdp_in_proj", "everything but the input projection of gated delta products",
    "a hybrid model with linear attention, whose projection is its widest value")
megatron_gdp_qkv = _row(
    "gdp_qkv", "everything but convolution, query, key and value of delta products",
    "a hybrid model with linear attention; convolutions are cheap")
megatron_mhc = _row(
    "mhc", "everything but the hyper-connections between layers",
    "several residual streams, mixed by cheap products")
# fmt: on
megatron_full = same("megatron_full", nothing, _SOURCE)
