"""Functions that make policies and selectors; arguments are checked here."""

from remat.policies._by_name import Named
from remat.policies._checks import HOST_MEMORY, checked_host_memory, checked_strings
from remat.policies._policy import Description, Policy
from remat.policies._rules import Keep
from remat.policies._selector import Selector
from remat.policies._value import Decision


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
    wanted = frozenset(checked_strings("save_names", "name", names))
    return Policy(
        rule=Keep(Named(wanted), Decision.SAVE),
        name=f"save_names({', '.join(map(repr, names))})",
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
    wanted = frozenset(checked_strings("offload_names", "name", names))
    checked_host_memory(to)
    return Policy(
        rule=Keep(Named(wanted), Decision.OFFLOAD),
        name=f"offload_names({', '.join(map(repr, names))})",
        description=Description(
            saves="nothing",
            offloads=f"values named {', '.join(names)}",
            when="the host link is fast enough to hide the copies",
            source="JAX, save_and_offload_only_these_names",
        ),
    )
