"""Rules: what becomes of each value.

A rule maps a `Value` to a `Decision`. Two rules combine by the order
recompute < offload < save:

- `a | b`: the higher of the two decisions (kept if either keeps it; on the device
  if either saves it there);
- `a & b`: the lower of the two;
- `a - b`: recompute what `b` keeps, else what `a` says;
- `~a`: save what `a` recomputes, recompute what `a` keeps.
"""

from dataclasses import dataclass
from typing import Protocol

from remat.policies._selector import ALIASES, NAME, NOTHING, Selector, common, united
from remat.policies._value import Decision, Value


class Rule(Protocol):
    """What becomes of each value, and what the rule must know for it."""

    def decide(self, value: Value) -> Decision:
        """What becomes of a value."""
        ...

    def needs(self, negated: bool = False) -> frozenset[str]:
        """Fields of `Value` it reads that JAX alone does not say."""
        ...

    def primitives(self) -> frozenset[str] | None:
        """Primitives whose values it can keep; None for any."""
        ...

    def names(self) -> frozenset[str]:
        """Checkpoint names it spells out."""
        ...

    def mentions(self, name: str) -> bool:
        """Whether it speaks of a checkpoint name."""
        ...

    def offloads(self) -> bool:
        """Whether it can move a value to the host."""
        ...


@dataclass(frozen=True, slots=True)
class Keep:
    """Save or offload the values a selector matches, recompute the others."""

    selector: Selector
    decision: Decision

    def decide(self, value: Value) -> Decision:
        return self.decision if self.selector.matches(value) else Decision.RECOMPUTE

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.selector.needs(negated)

    def primitives(self) -> frozenset[str] | None:
        return self.selector.primitives()

    def names(self) -> frozenset[str]:
        return self.selector.names()

    def mentions(self, name: str) -> bool:
        return self.selector.mentions(name)

    def offloads(self) -> bool:
        return self.decision is Decision.OFFLOAD


@dataclass(frozen=True, slots=True)
class Nothing:
    """Recompute every value."""

    def decide(self, value: Value) -> Decision:
        del value
        return Decision.RECOMPUTE

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return NOTHING

    def primitives(self) -> frozenset[str] | None:
        return NOTHING

    def names(self) -> frozenset[str]:
        return NOTHING

    def mentions(self, name: str) -> bool:
        del name
        return False

    def offloads(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class NoRegion(Nothing):
    """Keep every value, as where there is no region at all."""

    def decide(self, value: Value) -> Decision:
        del value
        return Decision.SAVE

    def primitives(self) -> frozenset[str] | None:
        return None


@dataclass(frozen=True, slots=True)
class _Pair:
    left: Rule
    right: Rule

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def mentions(self, name: str) -> bool:
        return self.left.mentions(name) or self.right.mentions(name)

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.left.needs(negated) | self.right.needs(negated)


@dataclass(frozen=True, slots=True)
class Union(_Pair):
    """`left | right`: the higher of two decisions."""

    def decide(self, value: Value) -> Decision:
        return max(self.left.decide(value), self.right.decide(value))

    def primitives(self) -> frozenset[str] | None:
        left, right = self.left.primitives(), self.right.primitives()
        return None if left is None or right is None else left | right

    def offloads(self) -> bool:
        return self.left.offloads() or self.right.offloads()


@dataclass(frozen=True, slots=True)
class Intersection(_Pair):
    """`left & right`: the lower of two decisions."""

    def decide(self, value: Value) -> Decision:
        return min(self.left.decide(value), self.right.decide(value))

    def primitives(self) -> frozenset[str] | None:
        left, right = self.left.primitives(), self.right.primitives()
        if left is None or right is None:
            return right if left is None else left
        return left & right

    def offloads(self) -> bool:
        return self.left.offloads() or self.right.offloads()


@dataclass(frozen=True, slots=True)
class Difference(_Pair):
    """`left - right`: what `left` keeps and `right` does not."""

    def decide(self, value: Value) -> Decision:
        if self.right.decide(value) is not Decision.RECOMPUTE:
            return Decision.RECOMPUTE
        return self.left.decide(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.left.needs(negated) | self.right.needs(not negated)

    def primitives(self) -> frozenset[str] | None:
        return self.left.primitives()

    def offloads(self) -> bool:
        return self.left.offloads()


@dataclass(frozen=True, slots=True)
class Complement:
    """`~rule`: save what the rule recomputes, recompute what it keeps."""

    rule: Rule

    def decide(self, value: Value) -> Decision:
        kept = self.rule.decide(value) is not Decision.RECOMPUTE
        return Decision.RECOMPUTE if kept else Decision.SAVE

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.rule.needs(not negated)

    def primitives(self) -> frozenset[str] | None:
        return None

    def names(self) -> frozenset[str]:
        return self.rule.names()

    def mentions(self, name: str) -> bool:
        return self.rule.mentions(name)

    def offloads(self) -> bool:
        return False
