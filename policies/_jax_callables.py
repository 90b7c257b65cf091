"""JAX's own policies and other callables, taken as policies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable
from jax.extend.core import primitives as jax_primitives

from remat.policies._errors import PolicyError
from remat.policies._checks import HOST_MEMORY
from remat.policies._policy import Description, Policy
from remat.policies._rules import NoRegion
from remat.policies._value import Decision, Value

_JAX = jax.checkpoint_policies


@dataclass(frozen=True, slots=True)
class _NamedPrimitive:
    """Stands for a primitive of which only the name is known."""

    name: str


@dataclass(frozen=True, slots=True)
class JaxCallable(NoRegion):
    """What a JAX policy callable answers."""

    function: Callable[..., Any]

    def decide(self, value: Value) -> Decision:
        primitive = value.jax_primitive or _primitive(value.primitive)
        answer = self.function(primitive, *value.in_avals, **value.params)
        return _decision(answer, self.function)

    def offloads(self) -> bool:
        # Only asking it about each value would tell.
        return False


def _primitive(name: str) -> Any:
    return vars(jax_primitives).get(f"{name}_p", _NamedPrimitive(name))


def _decision(answer: Any, function: Callable) -> Decision:
    if isinstance(answer, Offloadable):
        if answer.dst != HOST_MEMORY:
            raise PolicyError(
                f"the policy {_function_name(function)} offloads to {answer.dst!r}, "
                f"to which JAX moves nothing; valid: {HOST_MEMORY!r}"
            )
        return Decision.OFFLOAD
    if answer is Saveable or answer is True:
        return Decision.SAVE
    if answer is Recompute or answer is False:
        return Decision.RECOMPUTE
    raise PolicyError(
        f"the policy {_function_name(function)} answered {answer!r}; a policy "
        "answers True, False, Saveable, Recompute or Offloadable(src, dst)"
    )


def _function_name(function: Callable) -> str:
    return getattr(function, "__qualname__", repr(function))


def from_jax(function: Callable) -> Policy:
    """A policy that decides as a JAX policy callable does.

    Args:
        function: What `jax.checkpoint(policy=)` takes.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is a factory that was not called, or the built-in that
            ignores the names it is given.
    """
    _check_is_policy(function)
    name = _function_name(function)
    return Policy(
        rule=JaxCallable(function),
        name=f"from_jax({name})",
        description=Description(
            saves=f"what {name} says",
            recomputes="what it says",
            when="you have a policy for jax.checkpoint already",
            source="given by the caller",
        ),
    )


def _check_is_policy(function: Callable) -> None:
    factories = {
        _JAX.save_only_these_names,
        _JAX.save_any_names_but_these,
        _JAX.save_anything_except_these_names,
        _JAX.save_and_offload_only_these_names,
        _JAX.save_from_both_policies,
        _JAX.offload_dot_with_no_batch_dims,
    }
    name = _function_name(function)
    if function in factories:
        raise PolicyError(
            f"jax.checkpoint_policies.{name} makes a policy, but is none; call it "
            "first, with the names it is for"
        )
    if name.startswith("save_anything_except_these_names.<locals>"):
        raise PolicyError(
            "jax.checkpoint_policies.save_anything_except_these_names ignores the "
            "names it is given and saves everything; use "
            "remat.policies.save_anything_except_names('name')"
        )
