"""`as_policy`: whatever was given for a policy, as a policy."""

from typing import Any

from remat.policies._errors import PolicyError
from remat.policies._jax_callables import from_jax
from remat.policies._policy import Policy
from remat.policies._registry import get


def as_policy(policy: Any) -> Policy:
    """The policy that was meant.

    Args:
        policy: A `Policy`, a registered name, or a callable that
            `jax.checkpoint(policy=)` takes.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is none of these.

    Example:
        >>> from remat import policies
        >>> policies.as_policy("save_dots") is policies.save_dots
        True
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return get(policy)
    if policy is None:
        raise PolicyError(
            "a policy is needed, got None; say 'nothing' to recompute everything "
            "(what JAX means by policy=None) or 'none' to remove the regions"
        )
    if isinstance(policy, list | tuple | set | frozenset):
        raise PolicyError(
            f"one policy is needed, got a {type(policy).__name__}; for names write "
            "remat.policies.save_names('a', 'b'), for one policy a layer "
            "remat.policies.layers([...]), to combine policies a | b"
        )
    if callable(policy):
        return from_jax(policy)
    raise PolicyError(
        "a policy is a Policy, a registered name or a callable for jax.checkpoint, "
        f"got {policy!r} of type {type(policy).__name__}"
    )
