"""AXLearn's patterns of names, `RematRegexSavePatterns`, each as a policy.

AXLearn prefixes a name with the class that gives it (`QKVLinear.q_proj`), so these
go by regular expression, as there; unprefixed names match too.
"""

from remat.policies._by_kind import discrete, primitive
from remat.policies._by_name import named_matching
from remat.policies._description import Description
from remat.policies._factories import save
from remat.policies._policy import Policy
from remat.policies._registry import entry
from remat.policies._selector import Selector
from remat.policies._tensors import CHOICES

_QKV = r".*[kqv]_proj"
_OUTPUT = r".*o_proj"
_LINEAR1 = r".*linear1_[01]"
_LINEAR2 = r".*linear2(_[01])?"
_WEIGHTS = r".*gate_weights"
_ASSIGNMENT = r".*gate_assignment"
# The kernels name their residuals; cuDNN's is known by its primitive alone.
_FLASH = named_matching(r".*flash_residuals") | primitive(
    "dot_product_attention_fwd_wrapper"
)


def _row(
    name: str, selector: Selector | str, saves: str, recomputes: str, when: str
) -> Policy:
    if isinstance(selector, str):
        selector = named_matching(selector)
    description = Description(
        saves=f"{saves}; {CHOICES}", recomputes=recomputes, when=when, source="AXLearn"
    )
    return entry(f"axlearn_{name}", save(selector | discrete()), description)


# fmt: off
axlearn_qkv_proj = _row(
    "qkv_proj", _QKV,
    "query, key and value projections", "attention, the MLP, norms",
    "attention's inputs are what is worth keeping")
axlearn_o_proj = _row(
    "o_proj", _OUTPUT,
    "attention's output projection", "attention, the MLP, norms",
    "there is memory for one value a layer")
axlearn_context = _row(
    "context", r".*context",
    "attention's output before its projection", "projections, the MLP, norms",
    "there is memory for one value a layer, and attention is dear")
axlearn_linear1 = _row(
    "linear1", _LINEAR1,
    "the MLP's wide inner products", "attention, the MLP's output, norms",
    "the MLP is most of the compute, and there is memory for its width")
axlearn_linear2 = _row(
    "linear2", _LINEAR2,
    "the MLP's output", "attention, the MLP's wide inner products, norms",
    "there is memory for one value a layer")
axlearn_feed_forward = _row(
    "feed_forward", f"{_LINEAR1}|{_LINEAR2}",
    "every product of the MLP", "attention, norms, activation functions",
    "the MLP is most of the compute")
axlearn_gate_weights = _row(
    "gate_weights", _WEIGHTS,
    "weights of the experts", "attention, experts, norms",
    "routing is dear to compute again")
axlearn_gate_assignment = _row(
    "gate_assignment", _ASSIGNMENT,
    "which token goes to which expert", "attention, experts, norms",
    "routing must be the forward pass's")
axlearn_moe_gating = _row(
    "moe_gating", f"{_WEIGHTS}|{_ASSIGNMENT}",
    "the routing of tokens to experts", "attention, experts, norms",
    "a mixture of experts, whose routing is not to be computed again")
axlearn_native_attention = _row(
    "native_attention", r".*([qkvo]_proj|context)",
    "projections of attention; attention's output", "scores, the MLP, norms",
    "AXLearn's default; attention is not a fused kernel")
axlearn_flash_context = _row(
    "flash_context", _FLASH,
    "residuals of a flash attention kernel", "projections, the MLP, norms",
    "sequences of 4096 and more; the kernel is not run a second time")
axlearn_flash_attention = _row(
    "flash_attention", _FLASH | named_matching(f"{_QKV}|{_OUTPUT}"),
    "residuals of a flash attention kernel; projections of attention",
    "the MLP, norms",
    "a flash kernel, and memory for all of attention")
axlearn_input = _row(
    "input", r".*input",
    "the input of each layer", "everything inside a layer",
    "one region holds several layers")
# fmt: on
