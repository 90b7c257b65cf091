"""Functions that make policies and selectors; arguments are checked here."""

from remat.policies._errors import PolicyError
from remat.policies._policy import HOST_MEMORY, Description, Policy
from remat.policies._rules import Keep
from remat.policies._selectors import (
    Dots,
    DotsNoBatch,
    Named,
    Selector,
)
from remat.policies._value import Decision


def checked_names(function: str, names: tuple) -> frozenset[str]:
    """The names as a set, or an error that says how they should be given."""
    for name in names:
        if isinstance(name, list | tuple | set | frozenset):
            spread = ", ".join(map(repr, name))
            raise PolicyError(
                f"{function} takes names as separate arguments, got one "
                f"{type(name).__name__}; write {function}({spread})"
            )
        if not isinstance(name, str):
            raise PolicyError(
                f"{function} takes names as strings, got {name!r}; if it was given "
                f"as a policy, call it first: policy={function}('name')"
            )
    if not names:
        raise PolicyError(f"{function} needs at least one name, got none")
    return frozenset(names)


def checked_host_memory(kind: str) -> None:
    """Raise unless a memory kind is one that JAX moves residuals to."""
    if kind != HOST_MEMORY:
        hint = (
            " (jax.checkpoint takes unpinned_host for device memory and moves nothing)"
            if kind == "unpinned_host"
            else ""
        )
        raise PolicyError(
            f"offload destination {kind!r} is not one that JAX moves residuals to; "
            f"valid: {HOST_MEMORY!r}{hint}"
        )


def _quoted(names: tuple) -> str:
    return ", ".join(map(repr, names))


def dots() -> Selector:
    """Results of matrix products and convolutions."""
    return Dots()


def dots_no_batch() -> Selector:
    """Results of matrix products without batch dimensions."""
    return DotsNoBatch()


def save(selector: Selector) -> Policy:
    """Save the values a selector matches, recompute the others.

    Args:
        selector: Which values.

    Returns:
        The policy.

    Example:
        >>> from remat import policies
        >>> policies.save(policies.dots()) == policies.save_dots
        True
    """
    return Policy(
        rule=Keep(selector, Decision.SAVE),
        name=f"save({selector!r})",
        description=Description(
            saves=f"values of {selector!r}", when="you know which values to keep"
        ),
    )


def offload(selector: Selector, to: str = HOST_MEMORY) -> Policy:
    """Move the values a selector matches to host memory, recompute the others.

    Args:
        selector: Which values.
        to: Memory kind of the destination.

    Returns:
        The policy.

    Raises:
        PolicyError: If JAX moves nothing to that memory kind.
    """
    checked_host_memory(to)
    return Policy(
        rule=Keep(selector, Decision.OFFLOAD),
        name=f"offload({selector!r})",
        description=Description(
            saves="nothing",
            offloads=f"values of {selector!r}",
            when="the host link is fast enough to hide the copies",
        ),
    )


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
    wanted = checked_names("save_names", names)
    return Policy(
        rule=Keep(Named(wanted), Decision.SAVE),
        name=f"save_names({_quoted(names)})",
        description=Description(
            saves=f"values named {', '.join(names)}",
            when="the model names its values and you know which to keep",
            source="JAX, save_only_these_names",
        ),
    )


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
    wanted = checked_names("offload_names", names)
    checked_host_memory(to)
    return Policy(
        rule=Keep(Named(wanted), Decision.OFFLOAD),
        name=f"offload_names({_quoted(names)})",
        description=Description(
            saves="nothing",
            offloads=f"values named {', '.join(names)}",
            when="the host link is fast enough to hide the copies",
            source="JAX, save_and_offload_only_these_names",
        ),
    )
