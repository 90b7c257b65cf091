"""The policy object: a rule with a name and a description, callable as JAX wants."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from jax.ad_checkpoint import Offloadable

from remat.policies._by_kind import CHOICES, SORT
from remat.policies._checks import HOST_MEMORY
from remat.policies._description import (
    Description,
    describe_either,
    describe_limited,
    describe_opposite,
)
from remat.policies._errors import PolicyError, UnboundPolicyError
from remat.policies._rules import (
    Complement,
    Difference,
    Intersection,
    Keep,
    Pair,
    Rule,
    Union,
)
from remat.policies._selector import NAME, Selector
from remat.policies._value import READ_SLICE, Decision, Value

ASKED_BY_REMAT3 = frozenset({"dot_general", "conv_general_dilated", "name"})

_UNTOLD = {
    "out_avals": "the size and dtype of a result",
    "module_path": "the module a value is made in",
    "layer": "the layer a region belongs to",
    "ordinal": "the position of a value among those of its kind",
    "aliases": "the names that later equations give a value",
    "reads_input": "whether an operand is an input of the region",
    "region_path": "the region a value is made in",
}


# JAX keeps weak references to a policy, so it needs the slot for them.
@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, repr=False)
class Policy:
    """What to save, offload and recompute of the values in a region.

    Give it to `jax.checkpoint`, `nn.remat` or `nnx.remat` as `policy=`, or to
    `remat.with_policy`, `remat.remat` and `remat.compare`. Two policies are equal
    when their rules are. `|`, `&`, `-` and `~` combine policies, by the order
    recompute < offload < save:

    - `a | b`: the higher of the two decisions;
    - `a & b`: the lower one (`b` may also be a selector);
    - `a - b`: what `a` keeps and `b` does not (`b` may also be a selector);
    - `~a`: save what `a` recomputes, recompute what it keeps.

    Python binds `~` before `-` before `&` before `|`.

    Example:
        >>> from remat import policies
        >>> policies.save_dots | policies.offload_names("mlpwo")
        save_dots | offload_names('mlpwo')
        >>> policies.save_names("q", "k") == policies.save_names("k", "q")
        True
    """

    rule: Rule
    """Maps each value to a decision."""
    name: str = field(compare=False)
    """Registered name, or the code that makes the policy."""
    code: str = field(compare=False)
    """The code that makes the policy, in terms of `remat.policies`."""
    description: Description = field(compare=False)
    """What it does, a line each."""

    def decide(self, value: Value) -> Decision:
        """What becomes of a value.

        Args:
            value: The value, with the fields known that the policy `needs`.

        Returns:
            Save, offload or recompute.

        Example:
            >>> from remat import policies
            >>> policies.save_dots.decide(policies.Value(primitive="tanh"))
            <Decision.RECOMPUTE: 0>
        """
        if value.primitive == READ_SLICE:
            return Decision.RECOMPUTE
        return self.rule.decide(value)

    @property
    def checkpoint_names(self) -> frozenset[str]:
        """Checkpoint names the policy spells out."""
        return self.rule.names()

    def mentions(self, name: str) -> bool:
        """Whether the policy speaks of a checkpoint name, by spelling or pattern."""
        return self.rule.mentions(name)

    @property
    def keeps_by_name_only(self) -> bool:
        """Whether, on a model without checkpoint names, it would keep no tensor."""
        kept = self.rule.primitives()
        return kept is not None and "name" in kept and kept <= NAME | CHOICES | SORT

    @property
    def offloads(self) -> bool:
        """Whether the policy can move a value to the host."""
        return self.rule.offloads()

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Value` the policy reads that JAX alone does not tell."""
        return self.rule.needs()

    @property
    def needs_binding(self) -> bool:
        """Whether only `with_policy` and `remat.remat` can apply the policy."""
        return bool(self.needs)

    @property
    def primitives(self) -> frozenset[str] | None:
        """Primitives whose values the policy can keep; None for any."""
        return self.rule.primitives()

    @property
    def remat3_ignores(self) -> frozenset[str] | None:
        """Primitives among those that `jax_remat3` asks no policy about.

        None where the policy can keep values of any primitive. Seen on jax 0.12:
        with that flag on, `jax.checkpoint` asks about matrix products, convolutions
        and checkpoint names, and recomputes all else.
        """
        kept = self.primitives
        return None if kept is None else kept - ASKED_BY_REMAT3

    def for_layer(self, layer: int, n_layers: int | None = None) -> "Policy":
        """The policy for one layer of a stack: itself, unless it goes by layer.

        Args:
            layer: Index of the layer, from 0.
            n_layers: How many there are, where that is known.

        Returns:
            The policy of that layer.

        Raises:
            PolicyError: If the policy is for another number of layers.
        """
        rule = self.rule.at_layer(layer, n_layers)
        if rule == self.rule:
            return self
        code = f"({self.code}).for_layer({layer}, {n_layers})"
        return Policy(rule=rule, name=code, code=code, description=self.description)

    def __call__(self, primitive: Any, *in_avals: Any, **params: Any) -> Any:
        """Answer JAX's question about one equation.

        Returns:
            What `jax.checkpoint(policy=)` takes: True to save, False to
            recompute, an `Offloadable` to move to the host.

        Raises:
            UnboundPolicyError: If the policy needs what JAX does not tell.
        """
        if self.needs_binding:
            raise UnboundPolicyError(self._unbound_message())
        decision = self.decide(Value.asked_by_jax(primitive, in_avals, params))
        if decision is Decision.OFFLOAD:
            return Offloadable(src="device", dst=HOST_MEMORY)
        # A bool, and not `Saveable`, so that JAX's own combinators take it too.
        return decision is Decision.SAVE

    def _unbound_message(self) -> str:
        untold = " and ".join(_UNTOLD[field] for field in sorted(self.needs))
        return (
            f"the policy {self.name} needs to know {untold}, which JAX does not tell "
            "a policy; apply it with remat.with_policy(fn, policy) or "
            "remat.remat(target, policy=policy), not with jax.checkpoint, nn.remat "
            "or nnx.remat"
        )

    def renamed(self, name: str, code: str, description: Description) -> Self:
        """The same policy under another name."""
        return replace(self, name=name, code=code, description=description)

    def __repr__(self) -> str:
        return self.code

    def __or__(self, other: Any) -> "Policy":
        if isinstance(other, Selector):
            raise PolicyError(
                f"{self.code} | {other!r} does not say what becomes of the values "
                f"selected; write save({other!r}) or offload({other!r})"
            )
        other = coerced(other)
        description = describe_either(self.description, other.description)
        return _combined(Union(self.rule, other.rule), self, "|", other, description)

    def __and__(self, other: Any) -> "Policy":
        other = coerced(other)
        description = describe_limited(
            self.description, "only where it is among", other.description
        )
        rule = Intersection(self.rule, other.rule)
        return _combined(rule, self, "&", other, description)

    def __sub__(self, other: Any) -> "Policy":
        other = coerced(other)
        description = describe_limited(self.description, "but for", other.description)
        rule = Difference(self.rule, other.rule)
        return _combined(rule, self, "-", other, description)

    def __invert__(self) -> "Policy":
        code = f"~{_operand(self)}"
        return Policy(
            rule=Complement(self.rule),
            name=code,
            code=code,
            description=describe_opposite(self.description),
        )


def keep(selector: Selector, decision: Decision, description: Description) -> Policy:
    """The policy that saves or offloads what a selector matches."""
    verb = "save" if decision is Decision.SAVE else "offload"
    code = f"{verb}({selector!r})"
    rule = Keep(selector, decision)
    return Policy(rule=rule, name=code, code=code, description=description)


def coerced(operand: Any) -> Any:
    """An operand of `|`, `&` or `-` as a policy; a selector means saving."""
    if isinstance(operand, Policy):
        return operand
    if isinstance(operand, Selector):
        what = f"values of {operand!r}"
        description = Description(saves=what, when="you know which values to keep")
        return keep(operand, Decision.SAVE, description)
    # Late: it knows of JAX's own policies, which are made of these classes.
    from remat.policies._coerce import as_policy

    return as_policy(operand)


def _operand(policy: Policy) -> str:
    composed = isinstance(policy.rule, Pair) and " " in policy.code
    return f"({policy.code})" if composed else policy.code


def _combined(
    rule: Rule, left: Policy, operator: str, right: Policy, description: Description
) -> Policy:
    code = f"{_operand(left)} {operator} {_operand(right)}"
    return Policy(rule=rule, name=code, code=code, description=description)
