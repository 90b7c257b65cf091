"""Policies from text: a registered name, or the code that makes one."""

import ast
import difflib
import re
from typing import Any

from remat.policies import _by_kind as by_kind
from remat.policies import _by_name as by_name
from remat.policies import _by_place as by_place
from remat.policies._errors import PolicyError
from remat.policies._policy import Policy
from remat.policies._policy_map import policy_map
from remat.policies._registry import get, makers, names
from remat.policies._selector import Selector, anything

_SELECTORS = {
    function.__name__: function
    for function in (
        anything,
        by_kind.discrete,
        by_kind.dots,
        by_kind.dots_no_batch,
        by_kind.elementwise,
        by_kind.every_nth,
        by_kind.primitive,
        by_name.named,
        by_name.named_like,
        by_name.named_matching,
        by_name.named_other_than,
        by_place.directly_in,
        by_place.dtype,
        by_place.in_module,
        by_place.larger_than,
        by_place.reads_input,
    )
}


def parse(text: str) -> Policy:
    """The policy that a text stands for, as a command line or a file has it.

    Args:
        text: A registered name, or code that makes a policy of what stands in
            `remat.policies`. Names inside a call need no quotes.

    Returns:
        The policy.

    Raises:
        UnknownPolicyError: If it is a name that no policy has.
        PolicyError: If it is no such code.

    Example:
        >>> from remat import policies
        >>> policies.parse("save_names(context, mlpwo) | offload(dots())")
        save_names('context', 'mlpwo') | offload(dots())
    """
    text = text.strip()
    if text in names() or re.fullmatch(r"[\w./:-]*", text):
        return get(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise PolicyError(
            f"{text!r} is no policy: {error.msg}; write a registered name or code "
            "such as save_names(context) | offload_names(mlpwo)"
        ) from error
    policy = _Reader(text).operand(tree)
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"{text!r} stands for a selector; say what becomes of its values: "
            f"save({policy!r}), offload({policy!r}) or recompute({policy!r})"
        )
    return policy


class _Reader:
    """Evaluates the few kinds of expression that policies are written with."""

    def __init__(self, text: str) -> None:
        self.text = text

    def operand(self, node: ast.expr) -> Policy | Selector:
        """What stands between operators: a policy or a selector."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return get(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._call(name, node)
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return ~self.operand(inner)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return self._either(self.operand(left), self.operand(right))
            case ast.BinOp(op=ast.BitAnd(), left=left, right=right):
                return self._limited(self.operand(left), self.operand(right), "&")
            case ast.BinOp(op=ast.Sub(), left=left, right=right):
                return self._limited(self.operand(left), self.operand(right), "-")
        raise self._error(node)

    def _either(self, left: Any, right: Any) -> Policy | Selector:
        self._check_operands(left, right)
        return left | right

    def _limited(self, left: Any, right: Any, operator: str) -> Policy | Selector:
        self._check_operands(left, right)
        return left & right if operator == "&" else left - right

    def _check_operands(self, left: Any, right: Any) -> None:
        if isinstance(left, Selector) and isinstance(right, Policy):
            raise PolicyError(
                f"{self.text!r} combines the selector {left!r} with a policy; say what "
                f"becomes of its values: save({left!r}) or offload({left!r})"
            )

    def _call(self, name: str, node: ast.Call) -> Policy | Selector:
        if name == "as_policy":
            return self._as_policy(node)
        if name == "get":
            return get(*map(self._argument, node.args))
        function = makers().get(name) or _SELECTORS.get(name)
        if function is None:
            known = [*makers(), *_SELECTORS]
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
            raise PolicyError(
                f"{self.text!r} calls {name}, which makes neither a policy nor a "
                f"selector; did you mean {', '.join(near)}?"
            )
        keywords = {word.arg or "": word.value for word in node.keywords}
        arguments = {word: self._argument(value) for word, value in keywords.items()}
        try:
            return function(*map(self._argument, node.args), **arguments)
        except TypeError as error:
            raise PolicyError(f"{self.text!r} is no policy: {error}") from error

    def _as_policy(self, node: ast.Call) -> Policy:
        match node.args:
            case [ast.Dict(keys=keys, values=values)] if None not in keys:
                pairs = zip(keys, values, strict=True)
                return policy_map(
                    {self._argument(key): self._argument(value) for key, value in pairs}
                )
        raise self._error(node)

    def _argument(self, node: ast.expr | None) -> Any:
        """What stands inside a call: a constant, a list, a name, or an operand."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return name
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._argument(item) for item in items]
            case ast.expr():
                return self.operand(node)
        raise PolicyError(f"{self.text!r} is no policy: `**` has no place in it")

    def _error(self, node: ast.expr) -> PolicyError:
        return PolicyError(
            f"{self.text!r} is no policy: {ast.unparse(node)!r} is neither a name, nor "
            "a call of what makes policies or selectors, nor joined by | & - ~"
        )
