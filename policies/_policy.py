"""The policy object: a rule with a name and a description, callable as JAX wants."""

from dataclasses import dataclass, field
from typing import Any

from jax.ad_checkpoint import Offloadable

from remat.policies._checks import HOST_MEMORY
from remat.policies._errors import UnboundPolicyError
from remat.policies._rules import (
    Complement,
    Difference,
    Intersection,
    Rule,
    Union,
)
from remat.policies._selector import Selector
from remat.policies._value import Decision, Value

_READABLE = {
    "out_avals": "the size and dtype of a result",
    "module_path": "the module a value is made in",
    "layer": "the layer a region belongs to",
    "ordinal": "the position of a value among those of its kind",
    "aliases": "the names that later equations give a value",
    "region_path": "the region a value is made in",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a policy does, a line each."""

    saves: str
    """What stays in device memory."""
    offloads: str = "nothing"
    """What moves to host memory."""
    recomputes: str = "everything else"
    """What the backward pass computes again."""
    when: str
    """When to use it."""
    source: str = "this library"
    """Project or paper it comes from."""


# JAX keeps weak references to a policy, so it needs the slot for them.
@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, repr=False)
class Policy:
    """What to save, offload and recompute of the values in a region.

    Give it to `jax.checkpoint`, `nn.remat` or `nnx.remat` as `policy=`, or to
    `remat.with_policy`, `remat.remat` and `remat.compare`. Two policies are equal
    when their rules are. `|`, `&`, `-` and `~` combine policies, by the order
    recompute < offload < save:

    - `a | b`: the higher decision of the two;
    - `a & b`: the lower one (`b` may also be a selector);
    - `a - b`: what `a` keeps and `b` does not (`b` may also be a selector);
    - `~a`: save what `a` recomputes, recompute what it keeps.

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
    description: Description = field(compare=False)
    """What it does, a line each."""

    def decide(self, value: Value) -> Decision:
        """What becomes of a value.

        Args:
            value: The value. Fields that the rule reads must be known.

        Returns:
            Save, offload or recompute.

        Example:
            >>> from remat import policies
            >>> policies.save_dots.decide(policies.Value(primitive="tanh"))
            <Decision.RECOMPUTE: 0>
        """
        return self.rule.decide(value)

    @property
    def checkpoint_names(self) -> frozenset[str]:
        """Checkpoint names the policy spells out."""
        return self.rule.names()

    def mentions(self, name: str) -> bool:
        """Whether the policy speaks of a checkpoint name, by spelling or pattern."""
        return self.rule.mentions(name)

    @property
    def offloads(self) -> bool:
        """Whether the policy can move a value to the host."""
        return self.rule.offloads()

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Value` the policy reads that JAX alone does not say."""
        return self.rule.needs()

    @property
    def needs_binding(self) -> bool:
        """Whether only `with_policy` and `remat.remat` can apply the policy."""
        return bool(self.rule.needs())

    @property
    def primitives(self) -> frozenset[str] | None:
        """Primitives whose values the policy can keep; None for any."""
        return self.rule.primitives()

    def __call__(self, primitive: Any, *in_avals: Any, **params: Any) -> Any:
        """Answer JAX's question about one equation.

        Returns:
            What `jax.checkpoint(policy=)` takes: True to save, False to
            recompute, an `Offloadable` to move to the host.

        Raises:
            UnboundPolicyError: If the rule reads what JAX does not tell.
        """
        if self.needs_binding:
            raise UnboundPolicyError(self._unbound_message())
        decision = self.decide(Value.asked_by_jax(primitive, in_avals, params))
        if decision is Decision.OFFLOAD:
            return Offloadable(src="device", dst=HOST_MEMORY)
        # A bool, and not `Saveable`, so that JAX's own combinators take it too.
        return decision is Decision.SAVE

    def _unbound_message(self) -> str:
        unknown = " and ".join(_READABLE[field] for field in sorted(self.needs))
        return (
            f"the policy {self.name} needs to know {unknown}, which JAX does not "
            "tell a policy; apply it with remat.with_policy(fn, policy) or "
            "remat.remat(target, policy=policy) instead of jax.checkpoint, "
            "nn.remat or nnx.remat"
        )

    def __repr__(self) -> str:
        return self.name

    def __or__(self, other: "Policy") -> "Policy":
        if not isinstance(other, Policy):
            return NotImplemented
        return _combined(Union(self.rule, other.rule), self, "|", other)

    def __and__(self, other: "Policy | Selector") -> "Policy":
        other = _kept(other)
        if not isinstance(other, Policy):
            return NotImplemented
        return _combined(Intersection(self.rule, other.rule), self, "&", other)

    def __sub__(self, other: "Policy | Selector") -> "Policy":
        other = _kept(other)
        if not isinstance(other, Policy):
            return NotImplemented
        return _combined(Difference(self.rule, other.rule), self, "-", other)

    def __invert__(self) -> "Policy":
        return Policy(
            rule=Complement(self.rule),
            name=f"~{_operand(self)}",
            description=Description(
                saves=f"what {self.name} recomputes",
                recomputes=f"what {self.name} saves or offloads",
                when="a policy is easier said by what it should not keep",
            ),
        )


def _kept(operand: Any) -> Any:
    from remat.policies._factories import save

    return save(operand) if isinstance(operand, Selector) else operand


def _operand(policy: Policy) -> str:
    composed = isinstance(policy.rule, Union | Intersection | Difference)
    return f"({policy.name})" if composed and " " in policy.name else policy.name


def _combined(rule: Rule, left: Policy, operator: str, right: Policy) -> Policy:
    name = f"{_operand(left)} {operator} {_operand(right)}"
    return Policy(rule=rule, name=name, description=_describe(left, operator, right))


def _describe(left: Policy, operator: str, right: Policy) -> Description:
    a, b = left.description, right.description
    if operator == "|":
        saves, offloads = _listed(a.saves, b.saves), _listed(a.offloads, b.offloads)
    else:
        word = "only where it is in" if operator == "&" else "but for"
        saves = a.saves if a.saves == "nothing" else f"{a.saves}, {word}: {b.saves}"
        offloads = (
            a.offloads
            if a.offloads == "nothing"
            else f"{a.offloads}, {word}: {_listed(b.saves, b.offloads)}"
        )
    return Description(
        saves=saves, offloads=offloads, when="one named policy is not enough"
    )


def _listed(*parts: str) -> str:
    kept = [part for part in dict.fromkeys(parts) if part != "nothing"]
    return "; ".join(kept) or "nothing"
