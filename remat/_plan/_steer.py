"""Which point of the frontier to compile next, given what was compiled.

Compiled peaks grow with the bytes that regions keep, but neither by exactly those
bytes nor always: XLA may store a value in fewer bits, keep it on chip, reuse its
space, or schedule otherwise. So the search holds a bracket, verified to fit below and
verified not to fit above, and draws straight lines through what was measured.
"""

import dataclasses
from collections.abc import Sequence

MARGIN = 0.004
"""Aim this share of the budget below it: just above it, a compile is lost."""
INSIDE = 0.005
"""Stay this share of the bracket away from its ends."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One compiled point."""

    kept_bytes: int
    """What regions keep, by their graphs."""
    peak_bytes: int
    """Compiled peak of the step."""


def bracket(
    samples: Sequence[Sample], budget_bytes: int
) -> tuple[Sample | None, Sample | None]:
    """The largest point that fits, and the next larger one that does not."""
    fitting = [s for s in samples if s.peak_bytes <= budget_bytes]
    below = max(fitting, key=lambda s: s.kept_bytes, default=None)
    above = [
        s
        for s in samples
        if s.peak_bytes > budget_bytes
        and (below is None or s.kept_bytes > below.kept_bytes)
    ]
    return below, min(above, key=lambda s: s.kept_bytes, default=None)


def predict_peak(samples: Sequence[Sample], kept_bytes: int) -> float:
    """Peak by the straight line through the two samples around, or nearest."""
    ordered = sorted(samples, key=lambda s: s.kept_bytes)
    if len(ordered) == 1:
        return ordered[0].peak_bytes + kept_bytes - ordered[0].kept_bytes
    i = sum(s.kept_bytes < kept_bytes for s in ordered)
    i = min(max(i, 1), len(ordered) - 1)
    first, second = ordered[i - 1], ordered[i]
    run = second.kept_bytes - first.kept_bytes
    slope = (second.peak_bytes - first.peak_bytes) / run if run else 1.0
    return first.peak_bytes + slope * (kept_bytes - first.kept_bytes)


def next_kept_bytes(
    samples: Sequence[Sample], budget_bytes: int, margin: float = MARGIN
) -> int | None:
    """How many bytes the next point to compile should keep.

    Args:
        samples: What was compiled.
        budget_bytes: What the peak must not exceed.
        margin: Share of the budget to aim below it.

    Returns:
        The bytes; None where no measured point fits.
    """
    below, above = bracket(samples, budget_bytes)
    if below is None:
        return None
    aim = (1 - margin) * budget_bytes
    if above is None:
        slope = _last_slope(samples)
        return below.kept_bytes + int(max(aim - below.peak_bytes, 0) / slope)
    width = above.kept_bytes - below.kept_bytes
    share = (aim - below.peak_bytes) / (above.peak_bytes - below.peak_bytes)
    return below.kept_bytes + int(width * min(max(share, INSIDE), 1 - INSIDE))


def _last_slope(samples: Sequence[Sample]) -> float:
    """Peak bytes for each byte kept, by the two largest samples."""
    ordered = sorted(samples, key=lambda s: s.kept_bytes)[-2:]
    if len(ordered) < 2 or ordered[0].kept_bytes == ordered[1].kept_bytes:
        return 1.0
    rise = ordered[1].peak_bytes - ordered[0].peak_bytes
    # Where a sample says that bytes cost nothing, the next one shall not be wild.
    return max(rise / (ordered[1].kept_bytes - ordered[0].kept_bytes), 0.25)
