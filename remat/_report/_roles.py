"""What each argument and output of a step is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Category and pytree path of each flat argument and output of a step.

    Example:
        >>> Roles(
        ...     arguments=(("parameters", "params/wi"), ("batch", "tokens")),
        ...     outputs=(("outputs", "loss"), ("gradients", "params/wi")),
        ... ).arguments[0]
        ('parameters', 'params/wi')
    """

    arguments: tuple[tuple[str, str], ...]
    """(category, path), in the order of the flattened arguments."""
    outputs: tuple[tuple[str, str], ...]
    """(category, path), in the order of the flattened outputs."""
