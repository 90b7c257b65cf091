"""What JAX's operation names say: pass, module path, label.

Every HLO instruction that JAX made carries the name stack of the equation it came
from, such as `jit(step)/transpose(jvp(Net))/while/body/layer/mlp/dot_general`. XLA
keeps it through its passes, though it drops it from some copies of its own.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

LABEL_SCOPE = "keep="
"""`with_policy` puts a scope `keep=NAME` around what a policy keeps under a name."""

# Components that are of JAX's making, not of the user's modules.
_STRUCTURE = re.compile(
    r"while|body|cond|body_fun|cond_fun|branch_\d+_fun|checkpoint|remat2?|core_call|"
    r"rematted_computation|closed_call|core_closed_call|eval_jaxpr|custom_jvp_call|"
    r"custom_vjp_call(_jaxpr)?|shard_map|scan|pallas_call|cond_true|cond_false|"
    r"named_call|xla_call|\w*_call_jaxpr|"
)
_WRAPPER = re.compile(r"(\w+)\((.*)\)$")
_METHOD = re.compile(r"(\w+)\.[a-z_]\w*")
_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "remat", "checkpoint"})
_CALLS = frozenset({"jit", "pjit", "xmap", "pmap"})
_PLUMBING = frozenset(
    {
        "dynamic_slice",
        "dynamic_update_slice",
        "squeeze",
        "broadcast_in_dim",
        "while",
        "add",
        "sub",
        "lt",
        "select_n",
    }
)


@dataclass(frozen=True, slots=True)
class OpName:
    """An operation name, taken apart."""

    primitive: str
    """The last component, such as `dot_general`."""
    module_path: str | None
    """Path of modules and scopes, such as `layer/attention/query`."""
    label: str | None
    """Name of the kept value it computes."""
    phase: str | None
    """forward, backward or recompute; None outside a differentiated function."""
    is_plumbing: bool
    """Whether it only moves a loop's inputs and outputs in and out of stacks."""


@lru_cache(maxsize=65536)
def parse_op_name(text: str) -> OpName:
    """Takes an operation name apart.

    Args:
        text: `op_name` of an instruction's metadata. Of names joined by `;` (merged
            instructions) the first counts.

    Returns:
        Its parts.

    Example:
        >>> name = parse_op_name("jit(f)/transpose(jvp(Net))/while/body/mlp/wi/dot")
        >>> name.phase, name.module_path, name.primitive
        ('backward', 'Net/mlp/wi', 'dot')
    """
    text = text.split(";", 1)[0]
    components = _split(text)
    *scopes, primitive = components or [""]
    path = _path(scopes)
    labels = [part for part in path if part.startswith(LABEL_SCOPE)]
    return OpName(
        primitive=primitive,
        module_path="/".join(modules(path)) or None,
        label=labels[-1][len(LABEL_SCOPE) :] if labels else None,
        phase=_phase(text),
        is_plumbing=_is_plumbing(scopes, primitive),
    )


def _path(components: list[str]) -> list[str]:
    """The user's scopes, in order.

    A region's backward pass is named by what is around it twice, as in
    `transpose(jvp(Net))/mlp/jvp(Net)/mlp/checkpoint`; once is enough.
    """
    own = [_user_scopes(component) for component in components]
    path: list[str] = []
    transposed = None
    for i, component in enumerate(components):
        if component.startswith("transpose("):
            transposed = len(path)
        elif component.startswith("jvp(") and transposed is not None:
            around = path[transposed:]
            following = [scope for scopes in own[i:] for scope in scopes]
            if following[: len(around)] == around:
                del path[transposed:]
        path.extend(own[i])
    return path


def _split(text: str) -> list[str]:
    """Splits at slashes outside parentheses."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth = max(0, depth - 1)
        elif character == "/" and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _user_scopes(component: str) -> list[str]:
    """The scopes of the user inside a component, out of its transformations."""
    while wrapped := _WRAPPER.fullmatch(component):
        if wrapped[1] in _CALLS:
            return []
        if wrapped[1] not in _TRANSFORMS:
            break
        component = wrapped[2]
    parts = _split(component) if "/" in component else [component]
    if len(parts) > 1:
        return [scope for part in parts for scope in _user_scopes(part)]
    return [] if _STRUCTURE.fullmatch(component) else [component]


def modules(scopes: list[str]) -> list[str]:
    """Modules by name, each once in a row.

    Flax opens a scope for each method called (`layers.step` inside `layers`), and
    einsum one with its equation.
    """
    modules: list[str] = []
    for scope in scopes:
        if scope.startswith(LABEL_SCOPE) or "->" in scope:
            continue
        if method := _METHOD.fullmatch(scope):
            scope = method[1]
        if modules[-1:] != [scope]:
            modules.append(scope)
    return modules


def _phase(text: str) -> str | None:
    if "rematted_computation" in text:
        return "recompute"
    if "transpose(" in text:
        return "backward"
    if "jvp(" in text:
        return "forward"
    return None


def _is_plumbing(scopes: list[str], primitive: str) -> bool:
    """Scan's own reads and writes stand right under `while/body`."""
    inner = [s for s in scopes if not s.startswith(("jit(dynamic_", "jit(_where"))]
    at_body = inner[-2:] == ["while", "body"] or inner[-2:] == ["while", "cond"]
    if primitive.startswith("jit(dynamic_"):
        return at_body
    moved = len(inner) < len(scopes)
    return (at_body and (moved or primitive in _PLUMBING)) or primitive == "while"
