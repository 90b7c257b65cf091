"""The one registry: name to policy, and the functions that make more of them."""

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ParamSpec

from jax.extend.core import Primitive

from remat.policies._description import Description
from remat.policies._errors import (
    DuplicatePolicyError,
    PolicyError,
    UnknownPolicyError,
)
from remat.policies._policy import Policy

_REGISTERED: dict[str, Policy] = {}
_MAKERS: dict[str, Callable[..., Policy]] = {}

P = ParamSpec("P")


def register(
    name: str, policy: Policy, description: Description | None = None
) -> Policy:
    """Register a policy under a name.

    Args:
        name: The name, as given wherever a policy is taken.
        policy: The policy.
        description: What it does; by default the policy's own.

    Returns:
        The policy under its new name.

    Raises:
        DuplicatePolicyError: If the name is taken.
        PolicyError: If the name is empty, or it is no policy.
    """
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"register({name!r}, …) takes a Policy, got {policy!r}; make one of it "
            "with remat.policies.as_policy"
        )
    return _add(name, policy, policy.code, description or policy.description)


def entry(name: str, policy: Policy, description: Description) -> Policy:
    """Register a policy of the catalogue, which is an attribute of that name too."""
    return _add(name, policy, name, description)


def same(name: str, policy: Policy, source: str) -> Policy:
    """Register a policy of the catalogue under another project's name for it."""
    source = f"{source}; the same as {policy.name}"
    return entry(name, policy, replace(policy.description, source=source))


def _add(name: str, policy: Policy, code: str, description: Description) -> Policy:
    if not isinstance(name, str) or not name.strip():
        raise PolicyError(f"a policy's name is a non-empty string, got {name!r}")
    if name in _REGISTERED:
        raise DuplicatePolicyError(
            f"the name {name!r} is taken by a policy that saves "
            f"{_REGISTERED[name].description.saves}; choose another name"
        )
    _REGISTERED[name] = policy.renamed(name, code, description)
    return _REGISTERED[name]


def names() -> tuple[str, ...]:
    """Names of the registered policies, in the order they were registered.

    Example:
        >>> from remat import policies
        >>> "save_dots" in policies.names()
        True
    """
    return tuple(_REGISTERED)


def get(name: str) -> Policy:
    """The policy registered under a name.

    Args:
        name: The name.

    Returns:
        The policy.

    Raises:
        UnknownPolicyError: If there is none; near matches are named.

    Example:
        >>> from remat import policies
        >>> policies.get("save_dots") is policies.save_dots
        True
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    raise UnknownPolicyError(f"no policy is called {name!r}; {_hint(name)}")


def _hint(name: str) -> str:
    if name in _MAKERS:
        return f"it is a function that makes policies: remat.policies.{name}(…)"
    near = difflib.get_close_matches(name, [*_REGISTERED, *_MAKERS], n=3, cutoff=0.5)
    if not near:
        return "remat.policies.names() lists them"
    shown = (f"{found}(…)" if found in _MAKERS else repr(found) for found in near)
    return f"did you mean {' or '.join(shown)}?"


def maker(function: Callable[P, Policy]) -> Callable[P, Policy]:
    """Mark a function that makes policies, and refuse its use as a policy."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Policy:
        # This is how JAX calls a policy; without the check it would fail obscurely.
        if args and isinstance(args[0], Primitive):
            raise PolicyError(
                f"{function.__name__} makes a policy and is none; call it first, with "
                f"what the policy is for: policy={function.__name__}(…)"
            )
        return function(*args, **kwargs)

    _MAKERS[function.__name__] = checked
    return checked


def alias(name: str, made: Callable[P, Policy]) -> Callable[P, Policy]:
    """Give a function that makes policies a second name."""
    _MAKERS[name] = made
    return made


def makers() -> Mapping[str, Callable[..., Policy]]:
    """The functions that make policies, by name.

    Example:
        >>> from remat import policies
        >>> policies.makers()["save_names"]("context")
        save_names('context')
    """
    return MappingProxyType(_MAKERS)
