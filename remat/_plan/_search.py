"""What the search for a plan knows: what was compiled, and the budget."""

from collections.abc import Callable, Sequence
from typing import Any

from remat._plan._choose import Allotment
from remat._plan._judge import best_of
from remat._plan._kinds import Kind
from remat._plan._meter import Candidate, Measured, Meter
from remat._plan._modelled import Modelled
from remat._plan._named import Named
from remat._plan._steer import MARGIN

CLOSE = 0.03
"""A peak this share below the budget is close enough."""


class Search:
    """The state of a search.

    Args:
        meter: What compiles.
        kinds: The regions.
        budget_bytes: What the compiled peak must not exceed.
        whole_device: Whether that is all the device has: code and constants count
            too, and a TPU's compiler squeezes the step into it.
        named: The named policies on these regions.
    """

    def __init__(
        self,
        meter: Meter,
        kinds: Sequence[Kind],
        budget_bytes: int,
        *,
        whole_device: bool,
        named: Callable[[], Sequence[Named]],
    ) -> None:
        self.meter = meter
        self.kinds = kinds
        self.budget_bytes = budget_bytes
        self.whole_device = whole_device
        self.named = named
        self.is_tpu = meter.setup.target.kind == "tpu"
        self.squeezed = self.is_tpu and whole_device
        """Whether the compiler may use the budget only (TPU)."""
        self.offloads = True
        """Whether values may still be moved to the host."""
        self.failed: list[Candidate] = []
        """What does not compile."""
        self.notes: list[str] = []

    def fits(self, measured: Measured) -> bool:
        """Whether a compiled candidate is within the budget."""
        if measured.peak_bytes > self.budget_bytes:
            return False
        return measured.report.fits or not (self.is_tpu or self.whole_device)

    def best(self) -> Measured | None:
        """The best of those that fit; see `_judge`."""
        return best_of(self.fitting(), self.budget_bytes)

    def fitting(self) -> list[Measured]:
        """What is compiled and within the budget."""
        return list(filter(self.fits, self.meter.measured))

    def tried(self) -> set[Any]:
        """What was compiled, or does not compile."""
        candidates = [m.candidate for m in self.meter.measured] + self.failed
        return {candidate.allotment.key for candidate in candidates}

    def modelled(self, allotment: Allotment) -> Modelled:
        """What the model says of a choice."""
        return Modelled.of(self.kinds, allotment)

    def margin(self) -> float:
        """Share of the budget to aim below it: more, once that was not enough."""
        over = sum(
            0 < m.peak_bytes / self.budget_bytes - 1 < CLOSE
            for m in self.meter.measured
            if not m.candidate.is_named
        )
        return MARGIN * (1 + over)
