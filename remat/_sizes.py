"""Sizes in bytes: read what a person types, write what a person reads."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{s}": 1024**i for i, p in enumerate("KMGTP", 1) for s in ("", "iB")},
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


class SizeError(ValueError):
    """A text or number that is not a size in bytes."""


def parse_bytes(size: int | float | str) -> int:
    """Reads a size: `"12GiB"`, `"1.5 GB"`, `"800M"` or a number of bytes.

    Args:
        size: A count of bytes, or a text with a unit. `KiB MiB GiB TiB` are powers of
            1024 and `KB MB GB TB` powers of 1000; a bare `K M G T` is a power of
            1024, as XLA writes it.

    Returns:
        The size in whole bytes.

    Raises:
        SizeError: If it is negative, zero, or no size.

    Example:
        >>> parse_bytes("1.5GiB")
        1610612736
    """
    match = _SIZE.fullmatch(str(size))
    known = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if isinstance(size, bool) or match is None or match[2].lower() not in known:
        raise SizeError(
            f"{size!r} is not a size; write bytes as in 12GiB, 800MiB, 16GB or 1024"
        )
    n_bytes = int(Decimal(match[1]) * known[match[2].lower()])
    if n_bytes <= 0:
        raise SizeError(f"{size!r} is not a positive size; write it as in 12GiB")
    return n_bytes


def unit_of(n_bytes: float) -> tuple[str, int]:
    """A unit for an axis that reaches a size, and its bytes.

    Example:
        >>> unit_of(2**30), unit_of(2**20)
        (('GiB', 1073741824), ('MiB', 1048576))
    """
    return ("GiB", 2**30) if n_bytes >= 2**29 else ("MiB", 2**20)


def format_bytes(n_bytes: float) -> str:
    """Writes a size for people, in binary units.

    Example:
        >>> format_bytes(-1536), format_bytes(23 * 2**30)
        ('-1.5 KiB', '23.00 GiB')
    """
    sign, size = ("-" if n_bytes < 0 else ""), abs(n_bytes)
    if size >= 2**29:
        return f"{sign}{size / 2**30:.2f} GiB"
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{sign}{size / factor:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_count(n: float) -> str:
    """Writes a large count (FLOPs, parameters) with a metric prefix.

    Example:
        >>> format_count(154.6e9)
        '154.6 G'
    """
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(n) >= factor:
            return f"{n / factor:.1f} {prefix}"
    return f"{n:.0f}"


def format_flop(n: float) -> str:
    """Writes an amount of arithmetic.

    Example:
        >>> format_flop(154.6e9), format_flop(556)
        ('154.6 GFLOP', '556 FLOP')
    """
    count = format_count(n)
    return f"{count}FLOP" if count[-1].isalpha() else f"{count} FLOP"


def format_seconds(seconds: float) -> str:
    """Writes a time for people.

    Example:
        >>> format_seconds(0.0734)
        '73.4 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
