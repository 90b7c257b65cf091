"""The one registry: name to policy."""

import dataclasses
import difflib

from remat.policies._errors import (
    DuplicatePolicyError,
    PolicyError,
    UnknownPolicyError,
)
from remat.policies._policy import Description, Policy

_REGISTERED: dict[str, Policy] = {}


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
        PolicyError: If the name is empty, or the policy is none.
    """
    if not isinstance(name, str) or not name.strip():
        raise PolicyError(f"a policy's name must be a non-empty string, got {name!r}")
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"register({name!r}, …) takes a Policy, got {type(policy).__name__}; "
            "make one with remat.policies.as_policy"
        )
    if name in _REGISTERED:
        raise DuplicatePolicyError(
            f"the name {name!r} is taken by a policy that saves "
            f"{_REGISTERED[name].description.saves}; choose another name"
        )
    named = dataclasses.replace(
        policy, name=name, description=description or policy.description
    )
    _REGISTERED[name] = named
    return named


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
        >>> policies.get("save_dot")
        Traceback (most recent call last):
        ...
        remat.policies._errors.UnknownPolicyError: no policy is called 'save_dot'; \
did you mean 'save_dots', ...
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    near = difflib.get_close_matches(name, _REGISTERED, n=3, cutoff=0.5)
    hint = (
        f"did you mean {', '.join(map(repr, near))}?"
        if near
        else f"known: {', '.join(_REGISTERED)}"
    )
    raise UnknownPolicyError(f"no policy is called {name!r}; {hint}")
