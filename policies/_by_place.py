"""Selectors by what JAX does not tell a policy: size, dtype, module, operands."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from remat.policies._checks import checked_count, checked_strings
from remat.policies._errors import PolicyError
from remat.policies._rules import Rule
from remat.policies._selector import Selector, call_code
from remat.policies._value import Value

RESULTS = frozenset({"out_avals"})
MODULE = frozenset({"module_path"})


@dataclass(frozen=True, slots=True)
class LargerThan(Selector):
    """Values of more than so many bytes."""

    n_bytes: int
    """The size that is not yet larger."""

    def matches(self, value: Value) -> bool:
        assert value.bytes is not None, "the size must be known"
        return value.bytes > self.n_bytes

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return RESULTS

    def __repr__(self) -> str:
        return call_code("larger_than", self.n_bytes)


@dataclass(frozen=True, slots=True)
class OfDtype(Selector):
    """Values of one of some dtypes."""

    dtypes: frozenset[str]
    """Names of the dtypes."""

    def matches(self, value: Value) -> bool:
        assert value.out_avals is not None, "the results must be known"
        arrays = [aval for aval in value.out_avals if isinstance(aval, ShapedArray)]
        return any(aval.dtype.name in self.dtypes for aval in arrays)

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return RESULTS

    def __repr__(self) -> str:
        return call_code("dtype", *sorted(self.dtypes))


@dataclass(frozen=True, slots=True)
class InModule(Selector):
    """Values made in a module, or in one inside it."""

    patterns: tuple[str, ...]
    """Glob patterns of module paths, any of which may match."""

    def matches(self, value: Value) -> bool:
        path = value.module_path or ""
        return any(_within(path, pattern) for pattern in self.patterns)

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return MODULE

    def __repr__(self) -> str:
        return call_code("in_module", *self.patterns)


@dataclass(frozen=True, slots=True)
class DirectlyIn(Selector):
    """Values made by a module itself, not by one inside it."""

    patterns: tuple[str, ...]
    """Glob patterns of module paths, any of which may match."""

    def matches(self, value: Value) -> bool:
        path = value.module_path or ""
        return any(ends_with(path, pattern) for pattern in self.patterns)

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return MODULE

    def __repr__(self) -> str:
        return call_code("directly_in", *self.patterns)


@dataclass(frozen=True, slots=True)
class ReadsInput(Selector):
    """Values made of an input of the region, such as a weight."""

    def matches(self, value: Value) -> bool:
        assert value.reads_input is not None, "the operands must be known"
        return value.reads_input

    def needs(self, negated: bool = False) -> frozenset[str]:
        del negated
        return frozenset({"reads_input"})

    def __repr__(self) -> str:
        return "reads_input()"


def _within(path: str, pattern: str) -> bool:
    """Whether a module that encloses the path's end, or is it, fits the pattern."""
    parts = path.split("/")
    enclosing = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(ends_with(module, pattern) for module in enclosing)


def ends_with(path: str, pattern: str) -> bool:
    """Whether the last modules of a path fit the pattern, one by one."""
    patterns = pattern.removeprefix("*/").split("/")
    modules = path.split("/")[-len(patterns) :]
    return (
        path != ""
        and len(modules) == len(patterns)
        and all(map(fnmatch.fnmatchcase, modules, patterns))
    )


def place_selectors(policy: Any) -> Iterator[Selector]:
    """The selectors by module, size and dtype that a policy is made of."""
    made_of = getattr(policy, "rule", policy)
    if isinstance(made_of, LargerThan | OfDtype | InModule | DirectlyIn):
        yield made_of
    elif isinstance(made_of, tuple | frozenset):
        for part in made_of:
            yield from place_selectors(part)
    elif isinstance(made_of, Rule | Selector):
        for field in fields(made_of):  # pyright: ignore[reportArgumentType]
            yield from place_selectors(getattr(made_of, field.name))


def larger_than(n_bytes: int) -> Selector:
    """Values of more than so many bytes, on all devices together.

    Args:
        n_bytes: The size in bytes.

    Returns:
        The selector. It needs binding: JAX does not tell the size of a result.

    Raises:
        PolicyError: If it is not a whole number of bytes.

    Example:
        >>> from remat import policies
        >>> policies.save_dots - policies.larger_than(64 * 2**20)
        save_dots - save(larger_than(67108864))
    """
    return LargerThan(checked_count("larger_than", "a size in bytes", n_bytes, 0))


def dtype(*dtypes: Any) -> Selector:
    """Values of one of these dtypes.

    Args:
        *dtypes: Dtypes or their names.

    Returns:
        The selector. It needs binding: JAX does not tell the dtype of a result.

    Raises:
        PolicyError: If one is no dtype, or none is given.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.dtype("bfloat16"))
        save(dtype('bfloat16'))
    """
    if not dtypes:
        raise PolicyError("dtype needs at least one dtype, got none")
    return OfDtype(frozenset(map(_dtype_name, dtypes)))


def _dtype_name(given: Any) -> str:
    try:
        return jnp.dtype(given).name
    except TypeError as error:
        raise PolicyError(
            f"dtype takes dtypes such as 'bfloat16', got {given!r}"
        ) from error


def in_module(*patterns: str) -> Selector:
    """Values made in a module, or in one inside it, with no names in the model.

    A pattern is a glob over the modules of a path, each part for one module. It may
    start at any of them, so `"attention"`, `"*/attention"` and `"h_*/attention"` all
    match values made in `h_0/attention/query`. The path goes on from that of the region
    (`Region.path`), so it does not matter which of these modules is the region.

    Args:
        *patterns: Patterns with `*`, `?` and `[…]`; any may match.

    Returns:
        The selector. It needs binding: JAX does not tell where a value is made.

    Raises:
        PolicyError: If no pattern, or something else than strings, is given.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.in_module("*/mlp/wi"))
        save(in_module('*/mlp/wi'))
    """
    return InModule(checked_strings("in_module", "pattern", patterns))


def directly_in(*patterns: str) -> Selector:
    """Values made by a module itself, not by one inside it.

    Of an attention module with its projections as submodules, that is attention
    proper: scores, softmax and context.

    Args:
        *patterns: As in `in_module`; any may match.

    Returns:
        The selector. It needs binding: JAX does not tell where a value is made.

    Raises:
        PolicyError: If no pattern, or something else than strings, is given.
    """
    return DirectlyIn(checked_strings("directly_in", "pattern", patterns))


def reads_input() -> Selector:
    """Values made of an input of the region, as it is or in another dtype or layout.

    Of products, those with weights: a projection's, an MLP's, an expert's. The
    products of attention, whose operands are made in the region, are not.

    Returns:
        The selector. It needs binding: JAX does not tell where operands come from.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.dots() & policies.reads_input())
        save(dots() & reads_input())
    """
    return ReadsInput()
