"""Rules: what becomes of each value, and how two of them combine.

A rule maps a `Value` to a `Decision`. Rules combine by the order
recompute < offload < save:

- `a | b`: the higher of the two decisions;
- `a & b`: the lower of the two;
- `a - b`: recompute what `b` keeps, else what `a` says;
- `~a`: save what `a` recomputes, recompute what `a` keeps.
"""

from dataclasses import dataclass

from remat.policies._by_kind import CHOICES, SORT
from remat.policies._selector import (
    ALIASES,
    NAME,
    NOTHING,
    Selector,
    common,
    united,
)
from remat.policies._value import Decision, Value


class Rule:
    """What becomes of each value; and, before any is seen, what a rule is about."""

    __slots__ = ()

    def decide(self, value: Value) -> Decision:
        """What becomes of a value."""
        raise NotImplementedError

    def needs(self, negated: bool = False) -> frozenset[str]:
        """Fields of `Value` it reads that JAX alone does not tell.

        Args:
            negated: Whether it is values it does *not* keep that are wanted.
        """
        del negated
        return NOTHING

    def primitives(self) -> frozenset[str] | None:
        """Primitives whose values it can keep; None for any."""
        return NOTHING

    def names(self) -> frozenset[str]:
        """Checkpoint names it spells out."""
        return NOTHING

    def mentions(self, name: str) -> bool:
        """Whether it speaks of a checkpoint name."""
        return name in self.names()

    def offloads(self) -> bool:
        """Whether it can move a value to the host."""
        return False

    def at_layer(self, layer: int, n_layers: int | None) -> "Rule":
        """The rule for one layer of a stack."""
        del layer, n_layers
        return self


@dataclass(frozen=True, slots=True)
class Keep(Rule):
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
class Nothing(Rule):
    """Recompute every value."""

    def decide(self, value: Value) -> Decision:
        del value
        return Decision.RECOMPUTE


@dataclass(frozen=True, slots=True)
class NoRegion(Rule):
    """Keep every value, as where there is no region at all."""

    def decide(self, value: Value) -> Decision:
        del value
        return Decision.SAVE

    def primitives(self) -> frozenset[str] | None:
        return None


@dataclass(frozen=True, slots=True)
class Pair(Rule):
    """Two rules, combined."""

    left: Rule
    right: Rule

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.left.needs(negated) | self.right.needs(negated)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def mentions(self, name: str) -> bool:
        return self.left.mentions(name) or self.right.mentions(name)

    def offloads(self) -> bool:
        return self.left.offloads() or self.right.offloads()

    def at_layer(self, layer: int, n_layers: int | None) -> Rule:
        left = self.left.at_layer(layer, n_layers)
        return type(self)(left, self.right.at_layer(layer, n_layers))


@dataclass(frozen=True, slots=True)
class Union(Pair):
    """`left | right`: the higher of two decisions."""

    def decide(self, value: Value) -> Decision:
        return max(self.left.decide(value), self.right.decide(value))

    def primitives(self) -> frozenset[str] | None:
        return united(self.left.primitives(), self.right.primitives())


@dataclass(frozen=True, slots=True)
class Intersection(Pair):
    """`left & right`: the lower of two decisions."""

    def decide(self, value: Value) -> Decision:
        return min(self.left.decide(value), self.right.decide(value))

    def needs(self, negated: bool = False) -> frozenset[str]:
        needs = self.left.needs(negated) | self.right.needs(negated)
        # `save_dots & named("q")`: no equation is both, but a value can be.
        return needs | ALIASES if self.primitives() == NOTHING else needs

    def primitives(self) -> frozenset[str] | None:
        return common(self.left.primitives(), self.right.primitives())


@dataclass(frozen=True, slots=True)
class Difference(Pair):
    """`left - right`: what `left` keeps and `right` does not."""

    def decide(self, value: Value) -> Decision:
        if self.right.decide(value) is not Decision.RECOMPUTE:
            return Decision.RECOMPUTE
        return self.left.decide(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        left, right = self.left.needs(negated), self.right.needs(not negated)
        # `minimal - named("mlpwo")`: where only named values are kept, the `name`
        # equation itself knows whether it is one to leave out.
        kept = self.left.primitives()
        if not negated and kept is not None and kept <= NAME | CHOICES | SORT:
            right -= ALIASES
        return left | right

    def primitives(self) -> frozenset[str] | None:
        return self.left.primitives()

    def offloads(self) -> bool:
        return self.left.offloads()


@dataclass(frozen=True, slots=True)
class Complement(Rule):
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

    def at_layer(self, layer: int, n_layers: int | None) -> Rule:
        return Complement(self.rule.at_layer(layer, n_layers))
