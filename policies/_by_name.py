"""Selectors of values by their checkpoint name."""

import fnmatch
import re
from dataclasses import dataclass

from remat.policies._checks import checked_regex, checked_strings
from remat.policies._selector import ALIASES, NAME, NOTHING, Selector, call_code
from remat.policies._value import Value


class _ByName(Selector):
    """Values that go by a name that is accepted."""

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
        return call_code("named", *sorted(self.wanted))


@dataclass(frozen=True, slots=True)
class NamedLike(_ByName):
    """Values whose checkpoint name matches a glob pattern."""

    patterns: tuple[str, ...]
    """Glob patterns, any of which may match."""

    def accepts(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def __repr__(self) -> str:
        return call_code("named_like", *self.patterns)


@dataclass(frozen=True, slots=True)
class NamedMatching(_ByName):
    """Values whose whole checkpoint name matches a regular expression."""

    pattern: str
    """The regular expression."""

    def accepts(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def __repr__(self) -> str:
        return call_code("named_matching", self.pattern)


@dataclass(frozen=True, slots=True)
class NamedOtherThan(Selector):
    """Values that have a checkpoint name, but for some names."""

    unwanted: frozenset[str]
    """The names left out."""

    def matches(self, value: Value) -> bool:
        return any(name not in self.unwanted for name in value.checkpoint_names)

    def primitives(self) -> frozenset[str] | None:
        return NAME

    def names(self) -> frozenset[str]:
        return self.unwanted

    def mentions(self, name: str) -> bool:
        del name
        return True

    def __repr__(self) -> str:
        return call_code("named_other_than", *sorted(self.unwanted))


def named(*names: str) -> Selector:
    """Values with one of these checkpoint names.

    Args:
        *names: Names given with `jax.ad_checkpoint.checkpoint_name`.

    Returns:
        The selector.

    Raises:
        PolicyError: If no name, or something else than names, is given.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.named("context")) == policies.save_names("context")
        True
    """
    return Named(frozenset(checked_strings("named", "name", names)))


def named_like(*patterns: str) -> Selector:
    """Values whose checkpoint name matches a glob pattern, case and all.

    Args:
        *patterns: Patterns with `*`, `?` and `[…]`; any may match.

    Returns:
        The selector.

    Raises:
        PolicyError: If no pattern, or something else than strings, is given.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.named_like("mlp*") - policies.named("mlpwo"))
        save(named_like('mlp*') - named('mlpwo'))
    """
    return NamedLike(checked_strings("named_like", "pattern", patterns))


def named_matching(pattern: str) -> Selector:
    """Values whose whole checkpoint name matches a regular expression.

    Args:
        pattern: For `re.fullmatch`.

    Returns:
        The selector.

    Raises:
        PolicyError: If it is no regular expression.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.named_matching(r".*[kqv]_proj"))
        save(named_matching('.*[kqv]_proj'))
    """
    return NamedMatching(checked_regex("named_matching", pattern))


def named_other_than(*names: str) -> Selector:
    """Values that have a checkpoint name, but for these names.

    Args:
        *names: The names left out; none means every named value.

    Returns:
        The selector.

    Raises:
        PolicyError: If something else than names is given.
    """
    if names:
        checked_strings("named_other_than", "name", names)
    return NamedOtherThan(frozenset(names))
