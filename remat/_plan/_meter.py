"""The compiled peak of a candidate, as the closed loop asks for it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from remat._compare._measure import Prepared, Setup, compiled_report, prepare
from remat._plan._apply import Treatment, apply_treatments, table_of
from remat._plan._choose import Allotment
from remat._plan._kinds import Kind, by_layer
from remat._plan._steer import Sample
from remat._regions._with_policy import with_policy
from remat._report._report import MemoryReport
from remat._sizes import format_bytes

N_WORKERS = 2
"""Compiles that run side by side."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Something that a plan can do with all regions."""

    label: str
    """What to call it: "solved", or a policy's name."""
    allotment: Allotment
    """What is kept."""
    removes: bool = False
    """Whether it removes the regions, which keeps everything."""
    is_named: bool = False
    """Whether it is what a named policy does."""


def solved(allotment: Allotment) -> Candidate:
    """A candidate that the planner found."""
    return Candidate(label="solved", allotment=allotment)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A candidate, compiled in full."""

    candidate: Candidate
    report: MemoryReport = dataclasses.field(repr=False)
    """What was compiled."""
    flops: int
    """FLOPs of the step, from its jaxpr."""
    predicted_peak_bytes: int | None
    """What the loop took it for before it was compiled; None for the two ends."""

    @property
    def peak_bytes(self) -> int:
        """Its compiled peak."""
        return self.report.peak_bytes

    @property
    def sample(self) -> Sample:
        """For steering."""
        return Sample(
            kept_bytes=self.candidate.allotment.bytes, peak_bytes=self.peak_bytes
        )


class Meter:
    """Compiles candidates of one loss."""

    def __init__(
        self,
        loss: Callable[..., Any],
        kinds: Sequence[Kind],
        setup: Setup,
        say: Callable[[str], None],
    ) -> None:
        self.loss = loss
        self.kinds = kinds
        self.setup = setup
        self.say = say
        self.limit_bytes: int | None = None
        """Memory that the compiler may use, where that is not the device's."""
        self.n_full = 0
        """Different programs compiled in full."""
        self.measured: list[Measured] = []
        self._compiled: set[str] = set()
        self._prepared: dict[Candidate, Prepared] = {}
        self._floors: dict[Candidate, int] = {}

    def full(self, *candidates: tuple[Candidate, float | None]) -> list[Measured]:
        """Compiles candidates side by side, each with the peak predicted for it.

        Raises:
            CompileError: XLA failed for another reason than memory.
        """
        prepared = [self.prepare(candidate) for candidate, _ in candidates]
        keys = {one.key for one in prepared} - self._compiled
        self._compiled |= keys
        self.n_full += len(keys)
        names = ", ".join(candidate.label for candidate, _ in candidates)
        self.say(f"compiling {names} ({self.n_full})")
        with ThreadPoolExecutor(N_WORKERS) as pool:
            reports = list(pool.map(self._compile, prepared))
        found = [
            Measured(
                candidate=candidate,
                report=report,
                flops=one.flops,
                predicted_peak_bytes=None if guess is None else round(guess),
            )
            for (candidate, guess), one, report in zip(
                candidates, prepared, reports, strict=True
            )
        ]
        for one in found:
            self.say(f"{one.candidate.label}: {format_bytes(one.peak_bytes)}")
        self.measured += found
        return found

    def _compile(self, prepared: Prepared) -> MemoryReport:
        return compiled_report(prepared, self.setup, limit_bytes=self.limit_bytes)

    def floor(self, candidate: Candidate) -> int:
        """The least that the compiler can do with, in a fraction of a second (TPU)."""
        if candidate not in self._floors:
            prepared = self.prepare(candidate)
            report = compiled_report(prepared, self.setup, probe=True)
            self._floors[candidate] = report.peak_bytes
        return self._floors[candidate]

    def within(self, candidate: Candidate, limit_bytes: int) -> MemoryReport:
        """A full compile under another limit (TPU)."""
        self.n_full += 1
        self.say(f"compiling {candidate.label} within {format_bytes(limit_bytes)}")
        prepared = self.prepare(candidate)
        return compiled_report(prepared, self.setup, limit_bytes=limit_bytes)

    def prepare(self, candidate: Candidate) -> Prepared:
        """Traces and lowers a candidate's step."""
        if candidate not in self._prepared:
            self._prepared[candidate] = prepare(self.applied(candidate), self.setup)
        return self._prepared[candidate]

    def applied(self, candidate: Candidate) -> Callable[..., Any]:
        """The loss with a candidate's choices."""
        if candidate.removes:
            return with_policy(self.loss, "none")
        choices = by_layer(self.kinds, candidate.allotment)
        treatments: dict[int, Sequence[Treatment]] = {
            index: tuple(map(table_of, taken)) for index, taken in choices.items()
        }
        return apply_treatments(self.loss, lambda regions, layers: treatments)


def seconds_or_none(seconds: float) -> float | None:
    """An estimate, or None where the target's figures are unknown."""
    return None if math.isnan(seconds) else seconds
