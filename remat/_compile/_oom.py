"""Read the compilers' messages about programs that do not fit.

The TPU compiler has two. Short, when the shortfall shows early (0.12 puts
"E1000: CompileTimeHbmOom:" before it)::

    Ran out of memory on HBM, the total memory required for HLO temporaries (51.50G)
    exceeds available HBM (15.75G).

Long, when it shows late::

    Ran out of memory in memory space hbm. Used 1.79G of 1.78G hbm. Exceeded hbm
    capacity by 9.18M. Total hbm usage >= 2.04G: reserved 258.00M ...

Their figures are rounded to a hundredth of the unit.
"""

import dataclasses
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_SHORT = re.compile(rf"required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_LONG = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A program needs more device memory than its compiler may use."""

    needed_bytes: int
    """What the compiler could not get below, as rounded in its message."""
    limit_bytes: int
    """What it may use, likewise."""
    message: str
    """What it said."""


def parse_out_of_memory(message: str) -> OutOfMemory | None:
    """What a compiler's error says of memory, or None where it is of other things."""
    match = _SHORT.search(message) or _LONG.search(message)
    if not match:
        return None
    return OutOfMemory(
        needed_bytes=_bytes(match[1], match[2]),
        limit_bytes=_bytes(match[3], match[4]),
        message=message,
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
