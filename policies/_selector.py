"""Selectors: which values a policy speaks of, and how they combine.

A selector answers `matches(value)`. `a | b` matches what either does, `a & b` what
both do, `a - b` what `a` does and `b` does not, `~a` all others.
"""

from dataclasses import dataclass

from remat.policies._value import Value

NOTHING: frozenset[str] = frozenset()
NAME = frozenset({"name"})
ALIASES = frozenset({"aliases"})


class Selector:
    """Which values a policy speaks of.

    Beside `matches`, four facts are known before any value is seen: what a selector
    must know of a value, the primitives and the checkpoint names it is about, and
    whether it mentions a name.
    """

    __slots__ = ()

    def matches(self, value: Value) -> bool:
        """Whether the selector speaks of a value."""
        raise NotImplementedError

    def needs(self, negated: bool = False) -> frozenset[str]:
        """Fields of `Value` it reads that JAX alone does not tell.

        Args:
            negated: Whether it is values it does *not* match that are wanted.
        """
        del negated
        return NOTHING

    def primitives(self) -> frozenset[str] | None:
        """Primitives whose values it can match; None for any."""
        return None

    def names(self) -> frozenset[str]:
        """Checkpoint names it spells out."""
        return NOTHING

    def mentions(self, name: str) -> bool:
        """Whether it speaks of a checkpoint name, spelled out or by pattern."""
        return name in self.names()

    def __or__(self, other: "Selector") -> "Selector":
        return Either(self, other) if isinstance(other, Selector) else NotImplemented

    def __and__(self, other: "Selector") -> "Selector":
        return Both(self, other) if isinstance(other, Selector) else NotImplemented

    def __sub__(self, other: "Selector") -> "Selector":
        if not isinstance(other, Selector):
            return NotImplemented
        return Both(self, Other(other))

    def __invert__(self) -> "Selector":
        return Other(self)


def call_code(function: str, *args: object) -> str:
    """The code of a call, for `repr`."""
    return f"{function}({', '.join(map(repr, args))})"


def _operand(selector: Selector) -> str:
    code = repr(selector)
    return f"({code})" if isinstance(selector, Either | Both) else code


@dataclass(frozen=True, slots=True)
class Anything(Selector):
    """Every value."""

    def matches(self, value: Value) -> bool:
        del value
        return True

    def __repr__(self) -> str:
        return "anything()"


@dataclass(frozen=True, slots=True)
class Either(Selector):
    """Values that one selector or another matches."""

    left: Selector
    right: Selector

    def matches(self, value: Value) -> bool:
        return self.left.matches(value) or self.right.matches(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.left.needs(negated) | self.right.needs(negated)

    def primitives(self) -> frozenset[str] | None:
        return united(self.left.primitives(), self.right.primitives())

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def mentions(self, name: str) -> bool:
        return self.left.mentions(name) or self.right.mentions(name)

    def __repr__(self) -> str:
        return f"{_operand(self.left)} | {_operand(self.right)}"


@dataclass(frozen=True, slots=True)
class Both(Selector):
    """Values that two selectors match."""

    left: Selector
    right: Selector

    def matches(self, value: Value) -> bool:
        return self.left.matches(value) and self.right.matches(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        needs = self.left.needs(negated) | self.right.needs(negated)
        # `named("q") & dots()`: no equation is both, but a value can be.
        if self.primitives() == NOTHING:
            return needs | ALIASES
        # `named_like("mlp*") - named("mlpwo")`: a `name` equation knows its name.
        if not negated and self.primitives() == NAME:
            return needs - ALIASES
        return needs

    def primitives(self) -> frozenset[str] | None:
        return common(self.left.primitives(), self.right.primitives())

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def mentions(self, name: str) -> bool:
        return self.left.mentions(name) or self.right.mentions(name)

    def __repr__(self) -> str:
        if isinstance(self.right, Other):
            return f"{_operand(self.left)} - {_operand(self.right.selector)}"
        return f"{_operand(self.left)} & {_operand(self.right)}"


@dataclass(frozen=True, slots=True)
class Other(Selector):
    """Values that a selector does not match."""

    selector: Selector

    def matches(self, value: Value) -> bool:
        return not self.selector.matches(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        return self.selector.needs(not negated)

    def names(self) -> frozenset[str]:
        return self.selector.names()

    def mentions(self, name: str) -> bool:
        return self.selector.mentions(name)

    def __repr__(self) -> str:
        return f"~{_operand(self.selector)}"


def united(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    """Union of two sets of which None means everything."""
    return None if a is None or b is None else a | b


def common(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    """Intersection of two sets of which None means everything."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def anything() -> Selector:
    """Every value.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.anything()) == policies.everything
        True
    """
    return Anything()
