"""Selectors: which values a rule speaks of.

A selector answers `matches(value)`, and combines with `|` (either), `&` (both),
`-` (the first without the second) and `~` (all others). Four facts about it are
computed, so that a policy knows what it can do before it runs:

- `needs(negated)`: the fields of `Value` it reads that JAX alone does not say;
- `primitives()`: the primitives whose values it can match, None for any;
- `names()`: the checkpoint names it spells out;
- `mentions(name)`: whether it speaks of a checkpoint name.
"""

import fnmatch
import re
from dataclasses import dataclass

from remat.policies._value import Value

NAME = frozenset({"name"})
MATMULS = frozenset({"dot_general", "scaled_matmul_wrapper"})
CONVOLUTIONS = frozenset({"conv_general_dilated"})
# What a recompute with other rounding can change: which of several was chosen.
DISCRETE = frozenset({"top_k", "approx_top_k", "argmax", "argmin"})
NOTHING: frozenset[str] = frozenset()
ALIASES = frozenset({"aliases"})


class Selector:
    """Which values a rule speaks of."""

    __slots__ = ()

    def matches(self, value: Value) -> bool:
        """Whether the selector speaks of a value."""
        raise NotImplementedError

    def needs(self, negated: bool = False) -> frozenset[str]:
        """Fields of `Value` it reads that JAX alone does not say."""
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


def _call(function: str, *args: object) -> str:
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


class _ByName(Selector):
    """Values by their checkpoint name."""

    __slots__ = ()

    def accepts(self, name: str) -> bool:
        raise NotImplementedError

    def matches(self, value: Value) -> bool:
        return any(map(self.accepts, value.checkpoint_names))

    def needs(self, negated: bool = False) -> frozenset[str]:
        # JAX asks about `tanh` before it asks about `name`: only who looked ahead
        # knows that the result of `tanh` is the value that must not be kept.
        return ALIASES if negated else NOTHING

    def primitives(self) -> frozenset[str] | None:
        return NAME

    def mentions(self, name: str) -> bool:
        return self.accepts(name)


@dataclass(frozen=True, slots=True)
class Named(_ByName):
    """Values with one of some checkpoint names."""

    wanted: frozenset[str]
    """The names."""

    def accepts(self, name: str) -> bool:
        return name in self.wanted

    def names(self) -> frozenset[str]:
        return self.wanted

    def __repr__(self) -> str:
        return _call("named", *sorted(self.wanted))


@dataclass(frozen=True, slots=True)
class NamedLike(_ByName):
    """Values whose checkpoint name matches a glob pattern."""

    patterns: tuple[str, ...]
    """Glob patterns, any of which may match."""

    def accepts(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, p) for p in self.patterns)

    def __repr__(self) -> str:
        return _call("named_like", *self.patterns)


@dataclass(frozen=True, slots=True)
class NamedMatching(_ByName):
    """Values whose whole checkpoint name matches a regular expression."""

    pattern: str
    """The regular expression."""

    def accepts(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def __repr__(self) -> str:
        return _call("named_matching", self.pattern)


@dataclass(frozen=True, slots=True)
class NamedOtherThan(Selector):
    """Values that `checkpoint_name` makes, but for some names."""

    unwanted: frozenset[str]
    """The names left out."""

    def matches(self, value: Value) -> bool:
        return value.name is not None and value.name not in self.unwanted

    def primitives(self) -> frozenset[str] | None:
        return NAME

    def names(self) -> frozenset[str]:
        return self.unwanted

    def mentions(self, name: str) -> bool:
        del name
        return True

    def __repr__(self) -> str:
        return _call("named_other_than", *sorted(self.unwanted))


@dataclass(frozen=True, slots=True)
class MadeBy(Selector):
    """Values that one of some primitives makes."""

    wanted: frozenset[str]
    """Names of the primitives."""

    def matches(self, value: Value) -> bool:
        return value.primitive in self.wanted

    def primitives(self) -> frozenset[str] | None:
        return self.wanted

    def __repr__(self) -> str:
        return _call("primitive", *sorted(self.wanted))


@dataclass(frozen=True, slots=True)
class Dots(Selector):
    """Results of matrix products and convolutions, as `jax.checkpoint_policies`."""

    def matches(self, value: Value) -> bool:
        return value.primitive in MATMULS | CONVOLUTIONS

    def primitives(self) -> frozenset[str] | None:
        return MATMULS | CONVOLUTIONS

    def __repr__(self) -> str:
        return "dots()"


@dataclass(frozen=True, slots=True)
class DotsNoBatch(Selector):
    """Results of matrix products without batch dimensions."""

    def matches(self, value: Value) -> bool:
        if value.primitive == "dot_general":
            (_, _), (lhs_batch, rhs_batch) = value.params["dimension_numbers"]
            return not lhs_batch and not rhs_batch
        # The scaled product always carries one batch dimension, often of size 1.
        return (
            value.primitive == "scaled_matmul_wrapper"
            and value.in_avals[0].shape[0] == 1
        )

    def primitives(self) -> frozenset[str] | None:
        return MATMULS

    def __repr__(self) -> str:
        return "dots_no_batch()"


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
        left, right = self.left.primitives(), self.right.primitives()
        return None if left is None or right is None else left | right

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
        # `named("q") & dots()`: no equation is both, but the value can be.
        if self.primitives() == NOTHING:
            return needs | ALIASES
        # `named_like("mlp*") - named("mlpwo")`: the `name` equation knows its name.
        if not negated and self.primitives() == NAME:
            return needs - ALIASES
        return needs

    def primitives(self) -> frozenset[str] | None:
        left, right = self.left.primitives(), self.right.primitives()
        if left is None or right is None:
            return right if left is None else left
        return left & right

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
