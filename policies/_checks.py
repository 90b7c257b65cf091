"""Checks of what a caller gave."""

import re
from typing import Any

from remat.policies._errors import PolicyError

# JAX (0.10 to 0.12) takes every other kind, `unpinned_host` included, for device
# memory, and then moves nothing.
HOST_MEMORY = "pinned_host"


def checked_strings(function: str, what: str, given: tuple) -> tuple[str, ...]:
    """The strings given as separate arguments, or an error that says how to.

    Args:
        function: Function they were given to.
        what: What they stand for, such as `"name"`.
        given: Its positional arguments.

    Raises:
        PolicyError: If there are none, or one is not a non-empty string.
    """
    for item in given:
        if isinstance(item, list | tuple | set | frozenset):
            spread = ", ".join(map(repr, item))
            raise PolicyError(
                f"{function} takes each {what} as an argument of its own, got a "
                f"{type(item).__name__}; write {function}({spread})"
            )
        if not isinstance(item, str) or not item:
            raise PolicyError(
                f"{function} takes each {what} as a non-empty string, got {item!r}; "
                f"to use it as a policy, call it first: policy={function}('…')"
            )
    if not given:
        raise PolicyError(f"{function} needs at least one {what}, got none")
    return given


def checked_names_argument(argument: str, names: Any) -> tuple[str, ...]:
    """Names given as one collection argument.

    Raises:
        PolicyError: If it is a string (which would be read letter by letter), or
            holds something else than names.
    """
    if isinstance(names, str):
        raise PolicyError(
            f"{argument} is a collection of names, got the string {names!r}; write "
            f"{argument}=[{names!r}]"
        )
    names = tuple(names)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PolicyError(f"{argument} holds names, got {name!r} among {names}")
    return names


def checked_disjoint(first: str, a: tuple, second: str, b: tuple) -> None:
    """Raise when a name stands in two collections."""
    if twice := sorted(set(a) & set(b)):
        raise PolicyError(
            f"{', '.join(map(repr, twice))} stands in both {first} and {second}; a "
            "value is either saved or offloaded, so leave it in one"
        )


def checked_host_memory(kind: str) -> None:
    """Raise unless a memory kind is one that JAX moves residuals to."""
    if kind == HOST_MEMORY:
        return
    hint = (
        "; jax.checkpoint takes 'unpinned_host' for device memory and moves nothing"
        if kind == "unpinned_host"
        else ""
    )
    raise PolicyError(
        f"offload destination {kind!r} is no memory kind that jax.checkpoint moves "
        f"values to; valid: {HOST_MEMORY!r}{hint}"
    )


def checked_source_memory(kind: str) -> None:
    """Raise unless a memory kind is the one that residuals are moved from."""
    if kind != "device":
        raise PolicyError(
            f"offload source {kind!r} is no memory kind that values are moved from; "
            "valid: 'device'"
        )


def checked_count(function: str, what: str, count: Any, least: int) -> int:
    """A whole number of at least `least`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise PolicyError(
            f"{function} takes {what} as a whole number of at least {least}, "
            f"got {count!r}"
        )
    return count


def checked_regex(function: str, pattern: Any) -> str:
    """A pattern that `re` can compile."""
    if isinstance(pattern, re.Pattern):
        pattern = pattern.pattern
    checked_strings(function, "pattern", (pattern,))
    try:
        re.compile(pattern)
    except re.error as error:
        raise PolicyError(
            f"{function} takes a regular expression, got {pattern!r}: {error}"
        ) from error
    return pattern
