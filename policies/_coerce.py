"""`as_policy`: whatever was given for a policy, as a policy."""

from collections.abc import Mapping
from typing import Any

from remat.policies._errors import PolicyError
from remat.policies._jax_callables import from_jax
from remat.policies._parse import parse
from remat.policies._policy import Policy
from remat.policies._policy_map import policy_map
from remat.policies._selector import Selector


def as_policy(policy: Any) -> Policy:
    """The policy that was meant.

    Args:
        policy: A `Policy`, a registered name or the code of a policy, a callable
            that `jax.checkpoint(policy=)` takes, or a mapping from patterns of
            region paths to any of these.

    Returns:
        The policy; of a mapping a `PolicyMap`.

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
        return parse(policy)
    if isinstance(policy, Mapping):
        return policy_map(policy)
    if not callable(policy) or isinstance(policy, Selector):
        raise PolicyError(_what_to_write(policy))
    return from_jax(policy)


def _what_to_write(given: Any) -> str:
    if given is None:
        return (
            "a policy is wanted, got None; say 'nothing' to recompute everything "
            "(what JAX means by policy=None) or 'none' to remove the regions"
        )
    if isinstance(given, Selector):
        return (
            f"a policy is wanted, got a selector; write save({given!r}), "
            f"offload({given!r}) or recompute({given!r})"
        )
    if isinstance(given, list | tuple | set | frozenset):
        return (
            f"one policy is wanted, got a {type(given).__name__}; for names write "
            "remat.policies.save_names('a', 'b'), for one policy a layer "
            "remat.policies.layers([...]), and combine policies with a | b"
        )
    return (
        "a policy is a Policy, a registered name, a callable for jax.checkpoint or a "
        f"mapping of region patterns, got {given!r} of type {type(given).__name__}"
    )
