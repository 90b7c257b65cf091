"""Checks of a model's sizes, made where its configuration is."""

from typing import Any, get_args

from remat.models._attention import AttentionKind
from remat.models._errors import PresetError


def positive(what: str, size: Any) -> int:
    """Returns a size that is a whole number from 1.

    Raises:
        PresetError: it is not.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PresetError(f"{what} must be a whole number from 1, given {size!r}")
    return size


def check_config(config: Any, sizes: tuple[str, ...]) -> None:
    """Checks what every model's configuration has, and that `sizes` are sizes.

    Raises:
        PresetError: naming the field, its value and what it may be.
    """
    for field in ("n_layers", "n_heads", "d_model", *sizes):
        positive(field, getattr(config, field))
    check_multiple(config, "d_model", "n_heads")
    if not 0 <= config.dropout < 1:
        raise PresetError(f"dropout must be from 0 to below 1, given {config.dropout}")
    kinds = get_args(AttentionKind)
    if config.attention not in kinds:
        raise PresetError(
            f"attention must be one of {', '.join(map(repr, kinds))}, "
            f"given {config.attention!r}"
        )


def check_multiple(config: Any, field: str, of: str) -> None:
    """Checks that one field divides by another.

    Raises:
        PresetError: it does not.
    """
    size, divisor = getattr(config, field), getattr(config, of)
    if size % divisor:
        raise PresetError(
            f"{field} must be a multiple of {of}, given {size} and {divisor}"
        )
