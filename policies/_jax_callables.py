"""JAX's own policies, and other callables for `jax.checkpoint`, as policies."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable
from jax.extend.core import primitives as jax_primitives

from remat.policies import _factories as factories
from remat.policies import _jax_names as jax_names
from remat.policies._checks import HOST_MEMORY
from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._policy import Policy
from remat.policies._registry import get
from remat.policies._rules import Rule
from remat.policies._value import Decision, Value

_JAX = jax.checkpoint_policies

_CONSTANTS = (
    (_JAX.everything_saveable, "everything"),
    (_JAX.nothing_saveable, "nothing"),
    (_JAX.dots_saveable, "save_dots"),
    (_JAX.dots_with_no_batch_dims_saveable, "save_dots_no_batch"),
)
# JAX's functions that make policies, and what a policy of theirs remembers. Another
# version may remember otherwise; its policies are then callables like any other.
_REMEMBERED: dict[str, set[str]] = {
    "save_only_these_names": {"names_which_can_be_saved"},
    "save_any_names_but_these": {"names_not_to_save"},
    "save_anything_except_these_names": set(),
    "save_and_offload_only_these_names": {
        "names_which_can_be_saved",
        "names_which_can_be_offloaded",
        "offload_src",
        "offload_dst",
    },
    "save_from_both_policies": {"policy_1", "policy_2"},
    "offload_dot_with_no_batch_dims": {"offload_src", "offload_dst"},
}
# What jax 0.10 makes: dataclasses where 0.12 makes closures.
_CLASSES = {
    "SaveOnlyTheseNames": ("save_only_these_names", "saveable_names"),
    "SaveAnyNamesButThese": ("save_any_names_but_these", "names"),
}


@dataclass(frozen=True, slots=True)
class JaxCallable(Rule):
    """What a callable for `jax.checkpoint` answers."""

    function: Callable[..., Any]

    def decide(self, value: Value) -> Decision:
        primitive = value.jax_primitive or _primitive(value.primitive)
        answer = self.function(primitive, *value.in_avals, **value.params)
        return _decision(answer, self.function)

    def primitives(self) -> frozenset[str] | None:
        return None


@dataclass(frozen=True, slots=True)
class _NamedPrimitive:
    """Stands for a primitive of which only the name is known."""

    name: str


def _primitive(name: str) -> Any:
    return vars(jax_primitives).get(f"{name}_p", _NamedPrimitive(name))


def _decision(answer: Any, function: Callable) -> Decision:
    if isinstance(answer, Offloadable):
        if answer.dst != HOST_MEMORY:
            raise PolicyError(
                f"the policy {_name(function)} offloads to {answer.dst!r}, to which "
                f"jax.checkpoint moves nothing; valid: {HOST_MEMORY!r}"
            )
        return Decision.OFFLOAD
    if answer is Saveable or answer is True:
        return Decision.SAVE
    if answer is Recompute or answer is False:
        return Decision.RECOMPUTE
    raise PolicyError(
        f"the policy {_name(function)} answered {answer!r}; a policy answers True, "
        "False, Saveable, Recompute or Offloadable(src=…, dst=…)"
    )


def _name(function: Callable) -> str:
    named = inspect.isroutine(function) or inspect.isclass(function)
    return function.__qualname__ if named else repr(function)


def from_jax(function: Callable[..., Any]) -> Policy:
    """A policy that decides as a callable for `jax.checkpoint` does.

    JAX's own become their counterparts here, so that they compare and pickle.

    Args:
        function: What `jax.checkpoint(policy=)` takes.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is a function that makes policies, the built-in that
            ignores the names it is given, or offloads to where JAX moves nothing.

    Example:
        >>> import jax
        >>> from remat import policies
        >>> policies.from_jax(jax.checkpoint_policies.dots_saveable)
        save_dots
    """
    _check_called(function)
    for constant, name in _CONSTANTS:
        if function is constant:
            return get(name)
    made = _made_by(function)
    if made is not None:
        return _counterpart(*made)
    return Policy(
        rule=JaxCallable(function),
        name=_name(function),
        code=f"from_jax({_name(function)})",
        description=Description(
            saves=f"what {_name(function)} says",
            recomputes="what it says",
            when="you have a policy for jax.checkpoint already",
            source="the caller",
        ),
    )


def _check_called(function: Callable) -> None:
    if not inspect.isroutine(function):
        return
    jax_own = function in [vars(_JAX)[name] for name in _REMEMBERED]
    if not jax_own and not function.__module__.startswith("remat.policies."):
        return
    where = "jax.checkpoint_policies" if jax_own else "remat.policies"
    raise PolicyError(
        f"{where}.{_name(function)} makes a policy and is none; call it first, with "
        "what the policy is for"
    )


def _made_by(function: Callable) -> tuple[str, Mapping[str, Any]] | None:
    """Which function of JAX's made a policy, and with what; None for others."""
    if not function.__module__.startswith("jax."):
        return None
    if type(function).__name__ in _CLASSES:
        maker, field = _CLASSES[type(function).__name__]
        (argument,) = _REMEMBERED[maker]
        return maker, {argument: vars(function)[field]}
    maker = _name(function).split(".<locals>")[0]
    if not inspect.isfunction(function) or maker not in _REMEMBERED:
        return None
    remembered = inspect.getclosurevars(function).nonlocals
    return (maker, remembered) if remembered.keys() == _REMEMBERED[maker] else None


def _counterpart(maker: str, arguments: Mapping[str, Any]) -> Policy:
    """Our policy for what one of JAX's functions made."""
    match maker:
        case "save_only_these_names":
            names = sorted(arguments["names_which_can_be_saved"])
            return factories.save_names(*names) if names else get("nothing")
        case "save_any_names_but_these":
            return factories.save_any_names_but(*sorted(arguments["names_not_to_save"]))
        case "save_and_offload_only_these_names":
            return _saved_and_offloaded(**arguments)
        case "save_from_both_policies":
            return from_jax(arguments["policy_1"]) | from_jax(arguments["policy_2"])
        case "offload_dot_with_no_batch_dims":
            return jax_names.offload_dot_with_no_batch_dims(**arguments)
    raise PolicyError(
        f"jax.checkpoint_policies.{maker} ignores the names it is given and saves "
        "everything; use remat.policies.save_anything_except_names('name')"
    )


def _saved_and_offloaded(
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    # JAX keeps sets; sorted, the code of the policy is the same in every run.
    return jax_names.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(names_which_can_be_saved),
        names_which_can_be_offloaded=sorted(names_which_can_be_offloaded),
        offload_src=offload_src,
        offload_dst=offload_dst,
    )
