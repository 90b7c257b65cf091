"""Functions that make policies; what they are given is checked here."""

from collections.abc import Iterable
from typing import Any

from remat.policies._by_name import Named, NamedOtherThan
from remat.policies._checks import (
    HOST_MEMORY,
    checked_disjoint,
    checked_host_memory,
    checked_names_argument,
    checked_strings,
)
from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._policy import Policy, keep
from remat.policies._registry import maker
from remat.policies._rules import Complement, Keep, Nothing, Union
from remat.policies._selector import Selector
from remat.policies._value import Decision


@maker
def save(selector: Selector) -> Policy:
    """Save the values a selector matches, recompute the others.

    Args:
        selector: Which values.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is no selector.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.dots()) == policies.save_dots
        True
    """
    _check_selector("save", selector)
    what = f"values of {selector!r}"
    description = Description(saves=what, when="you know which values to keep")
    return keep(selector, Decision.SAVE, description)


@maker
def offload(selector: Selector, to: str = HOST_MEMORY) -> Policy:
    """Move the values a selector matches to host memory, recompute the others.

    Args:
        selector: Which values.
        to: Memory kind of the destination.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is no selector, or JAX moves nothing to that memory.

    Example:
        >>> from remat import policies
        >>> policies.offload(policies.dots()) == policies.offload_dots
        True
    """
    _check_selector("offload", selector)
    checked_host_memory(to)
    description = Description(
        saves="nothing",
        offloads=f"values of {selector!r}",
        when="the host link is fast enough to hide the copies",
    )
    return keep(selector, Decision.OFFLOAD, description)


@maker
def recompute(selector: Selector) -> Policy:
    """Recompute the values a selector matches, save all others.

    Args:
        selector: Which values.

    Returns:
        The policy.

    Raises:
        PolicyError: If it is no selector.

    Example:
        >>> from remat import policies
        >>> policies.recompute(policies.in_module("mlp"))
        recompute(in_module('mlp'))
    """
    _check_selector("recompute", selector)
    code = f"recompute({selector!r})"
    return Policy(
        rule=Complement(Keep(selector, Decision.SAVE)),
        name=code,
        code=code,
        description=Description(
            saves="everything else",
            recomputes=f"values of {selector!r}",
            when="a few values are large and cheap to compute",
        ),
    )


def _check_selector(function: str, selector: Any) -> None:
    if isinstance(selector, Selector):
        return
    hint = f"{function}(named({selector!r}))" if isinstance(selector, str) else ""
    raise PolicyError(
        f"{function} takes a selector such as dots() or in_module('attention'), got "
        f"{selector!r}" + (f"; by checkpoint name: {hint}" if hint else "")
    )


@maker
def save_names(*names: str) -> Policy:
    """Save the values with these checkpoint names, recompute the others.

    Args:
        *names: Names given with `jax.ad_checkpoint.checkpoint_name`.

    Returns:
        The policy.

    Raises:
        PolicyError: If no name, or something else than names, is given.

    Example:
        >>> from remat import policies
        >>> policies.save_names("context", "mlpwo")
        save_names('context', 'mlpwo')
    """
    checked_strings("save_names", "name", names)
    description = Description(
        saves=f"values named {', '.join(names)}",
        when="the model names its values and you know which to keep",
        source="JAX, save_only_these_names",
    )
    return _by_names("save_names", names, Decision.SAVE, description)


@maker
def offload_names(*names: str, to: str = HOST_MEMORY) -> Policy:
    """Move the values with these checkpoint names to host memory.

    Args:
        *names: Names given with `jax.ad_checkpoint.checkpoint_name`.
        to: Memory kind of the destination.

    Returns:
        The policy.

    Raises:
        PolicyError: If no name, or something else than names, is given, or if JAX
            moves nothing to that memory kind.

    Example:
        >>> from remat import policies
        >>> policies.save_dots | policies.offload_names("decoder_layer_input")
        save_dots | offload_names('decoder_layer_input')
    """
    checked_strings("offload_names", "name", names)
    checked_host_memory(to)
    description = Description(
        saves="nothing",
        offloads=f"values named {', '.join(names)}",
        when="the host link is fast enough to hide the copies",
        source="JAX, save_and_offload_only_these_names",
    )
    return _by_names("offload_names", names, Decision.OFFLOAD, description)


def _by_names(
    function: str, names: tuple[str, ...], decision: Decision, description: Description
) -> Policy:
    code = f"{function}({', '.join(map(repr, names))})"
    rule = Keep(Named(frozenset(names)), decision)
    return Policy(rule=rule, name=code, code=code, description=description)


@maker
def save_and_offload_names(
    save: Iterable[str] = (), offload: Iterable[str] = (), to: str = HOST_MEMORY
) -> Policy:
    """Save some values by checkpoint name, move some to the host, recompute others.

    Args:
        save: Names of the values to save.
        offload: Names of the values to move to the host.
        to: Memory kind of the destination.

    Returns:
        The policy.

    Raises:
        PolicyError: If a name stands in both, a string is given for a collection,
            or JAX moves nothing to that memory kind.

    Example:
        >>> from remat import policies
        >>> policies.save_and_offload_names(save=["context"], offload=["mlpwo"])
        save_and_offload_names(save=['context'], offload=['mlpwo'])
    """
    saved = checked_names_argument("save", save)
    offloaded = checked_names_argument("offload", offload)
    checked_disjoint("save", saved, "offload", offloaded)
    checked_host_memory(to)
    code = f"save_and_offload_names(save={[*saved]}, offload={[*offloaded]})"
    return Policy(
        rule=_saved_and_offloaded(saved, offloaded),
        name=code,
        code=code,
        description=Description(
            saves=f"values named {', '.join(saved)}" if saved else "nothing",
            offloads=f"values named {', '.join(offloaded)}" if offloaded else "nothing",
            when="the host link can move some of the values, not all",
            source="JAX, save_and_offload_only_these_names",
        ),
    )


def _saved_and_offloaded(saved: tuple, offloaded: tuple) -> Union | Keep | Nothing:
    kept = [
        Keep(Named(frozenset(names)), decision)
        for names, decision in (
            (saved, Decision.SAVE),
            (offloaded, Decision.OFFLOAD),
        )
        if names
    ]
    if not kept:
        return Nothing()
    return kept[0] if len(kept) == 1 else Union(*kept)


@maker
def save_any_names_but(*names: str) -> Policy:
    """Save every value that has a checkpoint name, but for these names.

    Args:
        *names: Names of the values to recompute; none means every named value.

    Returns:
        The policy.

    Raises:
        PolicyError: If something else than names is given.

    Example:
        >>> from remat import policies
        >>> policies.save_any_names_but("mlpwi")
        save_any_names_but('mlpwi')
    """
    if names:
        checked_strings("save_any_names_but", "name", names)
    code = f"save_any_names_but({', '.join(map(repr, names))})"
    return Policy(
        rule=Keep(NamedOtherThan(frozenset(names)), Decision.SAVE),
        name=code,
        code=code,
        description=Description(
            saves=f"every named value but {', '.join(names) or 'none'}",
            when="the model names what is worth keeping",
            source="JAX, save_any_names_but_these",
        ),
    )


@maker
def save_anything_except_names(*names: str) -> Policy:
    """Save everything but the values with these checkpoint names.

    JAX's `save_anything_except_these_names` ignores the names; this policy leaves
    them out. It must know that a later equation names a value, so it needs binding.

    Args:
        *names: Names of the values to recompute.

    Returns:
        The policy.

    Raises:
        PolicyError: If no name, or something else than names, is given.

    Example:
        >>> from remat import policies
        >>> policies.save_anything_except_names("mlpwi").needs_binding
        True
    """
    checked_strings("save_anything_except_names", "name", names)
    code = f"save_anything_except_names({', '.join(map(repr, names))})"
    return Policy(
        rule=Complement(Keep(Named(frozenset(names)), Decision.SAVE)),
        name=code,
        code=code,
        description=Description(
            saves=f"everything but values named {', '.join(names)}",
            recomputes=f"values named {', '.join(names)}",
            when="a few named values are too large to keep",
            source="JAX, save_anything_except_these_names (there without effect)",
        ),
    )
