"""What to compile next, on the way to the budget."""

from collections.abc import Sequence

from remat._plan._choose import Allotment
from remat._plan._kinds import same, solve_all
from remat._plan._meter import Candidate, Measured, solved
from remat._plan._search import CLOSE, Search
from remat._plan._steer import Sample, bracket, next_kept_bytes, predict_peak

SMALL = (0.01, 0.003)
"""Shares of everything to keep where not even nothing is known to fit."""
N_PROBES = 5
"""Most probes between two full compiles (TPU)."""


class Seeker:
    """Steers a search by what was measured.

    Args:
        search: Its state.
    """

    def __init__(self, search: Search) -> None:
        self.search = search

    def next(self) -> tuple[Candidate, float] | None:
        """What to compile next, and its predicted peak; None to stop."""
        samples = self.samples()
        below, above = bracket(samples, self.search.budget_bytes)
        if below is None:
            return self._smallest_step(samples)
        if below.peak_bytes >= (1 - CLOSE) * self.search.budget_bytes:
            return None
        if self.search.is_tpu:
            return self._next_by_floors(samples)
        found = self._between(samples, below, above)
        if found is None:
            return None
        return solved(found), predict_peak(samples, found.bytes)

    def _smallest_step(self, samples: list[Sample]) -> tuple[Candidate, float] | None:
        """To keep a little can take less than nothing: statistics instead of scores."""
        everything = same(self.search.kinds, lambda kind: kind.everything)
        for share in SMALL:
            found = solve_all(self.search.kinds, int(share * everything.bytes))
            if not found.bytes and not found.host_bytes:
                return None
            if found.key not in self.search.tried():
                return solved(found), predict_peak(samples, found.bytes)
        return None

    def _between(
        self, samples: Sequence[Sample], below: Sample, above: Sample | None
    ) -> Allotment | None:
        """A point that keeps more than `below` and less than `above`."""
        wanted = next_kept_bytes(
            samples, self.search.budget_bytes, self.search.margin()
        )
        assert wanted is not None
        everything = same(self.search.kinds, lambda kind: kind.everything).bytes
        most = above.kept_bytes - 1 if above else everything
        tried = self.search.tried()
        for _ in range(8):
            found = solve_all(self.search.kinds, min(wanted, most))
            if below.kept_bytes < found.bytes and found.key not in tried:
                return found
            if wanted >= most:
                return None
            wanted = (wanted + most + 1) // 2
        return None

    def _next_by_floors(self, samples: list[Sample]) -> tuple[Candidate, float] | None:
        """As `next`, on a TPU: probe the way to the budget before a full compile."""
        probed = list(samples)
        best: tuple[Allotment, int] | None = None
        for _ in range(N_PROBES):
            low, high = bracket(probed, self.search.budget_bytes)
            if low is None:
                break
            found = self._between(probed, low, high)
            if found is None:
                break
            peak = self.search.meter.floor(solved(found)) + self.gap(found.bytes)
            probed.append(Sample(kept_bytes=found.bytes, peak_bytes=peak))
            if peak <= self.search.budget_bytes or best is None:
                best = found, peak
            unused = (self.search.budget_bytes - peak) / self.search.budget_bytes
            if 0 <= unused <= CLOSE / 2 + self.search.margin():
                break
        return None if best is None else (solved(best[0]), best[1])

    def gap(self, kept_bytes: int) -> int:
        """How far a peak is above its floor: as far as the largest of those near.

        One that did not fit is heeded as well, so that the next is not as far over.
        """
        if self.search.squeezed:
            return 0
        gaps = sorted(
            (
                abs(m.candidate.allotment.bytes - kept_bytes),
                m.peak_bytes - self.search.meter.floor(m.candidate),
            )
            for m in self._known()
            if not m.candidate.removes
        )
        return max([0, *(gap for _, gap in gaps[:2])])

    def _known(self) -> list[Measured]:
        """What steers: without what offloads, once that turned out to be no use."""
        return [
            measured
            for measured in self.search.meter.measured
            if (self.search.offloads or not measured.candidate.allotment.host_bytes)
            and not self._ends_search(measured)
        ]

    def _ends_search(self, measured: Measured) -> bool:
        """Whether it is a named policy that takes just the budget.

        That is no reason to stop: a solved choice of that size can recompute less.
        """
        unused = 1 - measured.peak_bytes / self.search.budget_bytes
        return measured.candidate.is_named and 0 <= unused <= CLOSE

    def samples(self) -> list[Sample]:
        """What was measured, as far as it says what to compile next."""
        if self.search.squeezed:
            return [
                Sample(
                    kept_bytes=m.candidate.allotment.bytes,
                    peak_bytes=max(
                        self.search.meter.floor(m.candidate),
                        0 if self.search.fits(m) else self.search.budget_bytes + 1,
                    ),
                )
                for m in self._known()
            ]
        return [m.sample for m in self._known()]
