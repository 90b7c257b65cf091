"""The closed loop: choose by the model, compile, correct the model, choose again.

Two compiles give the ends: nothing kept and everything kept. What lies between is
steered by what was measured (`_steer`), until the best point that fits is within a few
percent of the budget or no step of the frontier is left between it and one that was
seen not to fit. Named policies that the model takes for better than what was found are
compiled as well, so that none of them beats the plan unseen.

On a TPU the compiler uses the memory that it is given. Where the budget is all that the
device has, every point whose floor is within it fits, so floors steer. Where it is
less, floors tell how peaks grow, and full compiles how far above them a run is.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from remat._compile._compile import CompileError
from remat._plan._better import Better
from remat._plan._choose import Allotment
from remat._plan._judge import best_of, faster_note, too_small
from remat._plan._kinds import Kind, same, solve_all
from remat._plan._meter import Candidate, Measured, Meter
from remat._plan._modelled import Modelled
from remat._plan._named import Named, near_budget
from remat._plan._pool import Pool
from remat._plan._solve import evaluate
from remat._plan._steer import MARGIN, Sample, bracket, next_kept_bytes, predict_peak
from remat._sizes import format_bytes

MAX_COMPILES = 8
"""Most full compiles for one plan."""
CLOSE = 0.03
"""A peak this share below the budget is close enough."""
NEAR = 0.01
"""Peaks nearer to the budget than this share of it, predictions cannot tell apart."""
N_FIRST = 4
"""Full compiles after which named policies have their turn."""
N_NAMED = 3
"""Most named policies that are compiled."""
N_MISSES = 3
"""Mixes that turn out no better than the best, after which there are no more."""
RAISED = 0.1
"""A peak this share of the budget above what was foreseen says that offload does not
free what it should."""
SMALL = (0.01, 0.003)
"""Shares of everything to keep where not even nothing is known to fit."""
N_PROBES = 5
"""Most probes between two full compiles (TPU)."""


class ClosedLoop:
    """The search for one plan.

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
        self.offloads = True
        self._failed: list[Candidate] = []
        self._pool: Pool | None = None
        self.notes: list[str] = []

    def run(self) -> Measured:
        """The best candidate whose compiled peak fits.

        Raises:
            PlanError: None fits.
        """
        nothing, everything = self._ends()
        if everything is not None and self.fits(everything):
            return everything
        if self.whole_device:
            report = nothing.report
            self.budget_bytes -= report.generated_code_bytes + report.constant_bytes
        if self.is_tpu and not self.squeezed and not self.fits(nothing):
            self._squeeze(nothing)
        self._seek(N_FIRST)
        self._try_named()
        self._improve()
        best = self.best()
        if best is None or not best.candidate.is_named:
            self._seek(MAX_COMPILES)
            best = self.best()
        if best is None:
            raise too_small(self.budget_bytes, self.meter.measured)
        self.notes += faster_note(best, self._fitting())
        return best

    def fits(self, measured: Measured) -> bool:
        """Whether a compiled candidate is within the budget."""
        if measured.peak_bytes > self.budget_bytes:
            return False
        return measured.report.fits or not (self.is_tpu or self.whole_device)

    def best(self) -> Measured | None:
        """The best of those that fit; see `_judge`."""
        return best_of(self._fitting(), self.budget_bytes)

    def _fitting(self) -> list[Measured]:
        return list(filter(self.fits, self.meter.measured))

    # --- the ends

    def _ends(self) -> tuple[Measured, Measured | None]:
        none_kept = same(self.kinds, lambda k: evaluate(k.graph, k.prices, frozenset()))
        all_kept = same(self.kinds, lambda kind: kind.everything)
        nothing = Candidate(label="nothing", allotment=none_kept, is_named=True)
        everything = Candidate(
            label="none", allotment=all_kept, removes=True, is_named=True
        )
        try:
            first, second = self.meter.full((nothing, None), (everything, None))
        except CompileError as error:
            self.notes.append(f"no remat at all does not compile: {_first(error)}")
            return self.meter.full((nothing, None))[0], None
        return first, second

    def _squeeze(self, nothing: Measured) -> None:
        """Let the compiler have the budget only, if the step then fits (TPU)."""
        if self.meter.floor(nothing.candidate) > self.budget_bytes:
            return
        self.squeezed = True
        self.meter.limit_bytes = self.budget_bytes
        self.meter.measured.clear()  # figures of another limit say nothing here
        self.meter.full((nothing.candidate, None))
        self.notes.append(
            "fits only with the compiler's own limit set to the budget: compile with "
            f"xla_tpu_max_hbm_size_mib={self.budget_bytes >> 20}"
        )

    # --- between them

    def _seek(self, most: int) -> None:
        while self.meter.n_full < most:
            step = self._next()
            if step is None:
                return
            candidate, guess = step
            foreseen = self._foreseen(candidate, guess)
            try:
                (found,) = self.meter.full((candidate, guess))
            except CompileError as error:
                if not candidate.allotment.host_bytes:
                    raise
                self._no_offload(f"it does not compile here: {_first(error)}")
                continue
            over = found.peak_bytes - foreseen
            if candidate.allotment.host_bytes and over > RAISED * self.budget_bytes:
                more = format_bytes(over)
                self._no_offload(f"with it, the step took {more} more than foreseen")

    def _foreseen(self, candidate: Candidate, guess: float) -> float:
        """The most that a peak should be: with what floors do not tell (TPU)."""
        samples = [m.sample for m in self.meter.measured]
        return max(guess, predict_peak(samples, candidate.allotment.bytes))

    def _no_offload(self, why: str) -> None:
        self.notes.append(f"no offload: {why}")
        self.kinds = [dataclasses.replace(kind, host_bytes=0) for kind in self.kinds]
        self.offloads = False
        self._pool = None

    def _known(self) -> list[Measured]:
        """What steers: without what offloads, once that turned out to be no use."""
        return [
            measured
            for measured in self.meter.measured
            if (self.offloads or not measured.candidate.allotment.host_bytes)
            and not self._ends_search(measured)
        ]

    def _ends_search(self, measured: Measured) -> bool:
        """Whether it is a named policy that takes just the budget.

        That is no reason to stop: a solved choice of that size can recompute less.
        """
        unused = 1 - measured.peak_bytes / self.budget_bytes
        return measured.candidate.is_named and 0 <= unused <= CLOSE

    def _samples(self) -> list[Sample]:
        if self.squeezed:
            return [
                Sample(
                    kept_bytes=m.candidate.allotment.bytes,
                    peak_bytes=max(
                        self.meter.floor(m.candidate),
                        0 if self.fits(m) else self.budget_bytes + 1,
                    ),
                )
                for m in self._known()
            ]
        return [m.sample for m in self._known()]

    def _next(self) -> tuple[Candidate, float] | None:
        """What to compile next, and its predicted peak; None to stop."""
        samples = self._samples()
        below, above = bracket(samples, self.budget_bytes)
        if below is None:
            return self._smallest_step(samples)
        if below.peak_bytes >= (1 - CLOSE) * self.budget_bytes:
            return None
        if self.is_tpu:
            return self._next_by_floors(samples)
        found = self._between(samples, below, above)
        if found is None:
            return None
        return _solved(found), predict_peak(samples, found.bytes)

    def _smallest_step(self, samples: list[Sample]) -> tuple[Candidate, float] | None:
        """To keep a little can take less than nothing: statistics instead of scores."""
        everything = same(self.kinds, lambda kind: kind.everything)
        for share in SMALL:
            found = solve_all(self.kinds, int(share * everything.bytes))
            if not found.bytes and not found.host_bytes:
                return None
            if found.key not in self._tried():
                return _solved(found), predict_peak(samples, found.bytes)
        return None

    def _between(
        self, samples: Sequence[Sample], below: Sample, above: Sample | None
    ) -> Allotment | None:
        """A point that keeps more than `below` and less than `above`."""
        wanted = next_kept_bytes(samples, self.budget_bytes, self._margin())
        assert wanted is not None
        everything = same(self.kinds, lambda kind: kind.everything).bytes
        most = above.kept_bytes - 1 if above else everything
        tried = self._tried()
        for _ in range(8):
            found = solve_all(self.kinds, min(wanted, most))
            if below.kept_bytes < found.bytes and found.key not in tried:
                return found
            if wanted >= most:
                return None
            wanted = (wanted + most + 1) // 2
        return None

    def _next_by_floors(self, samples: list[Sample]) -> tuple[Candidate, float] | None:
        """As `_next`, on a TPU: probe the way to the budget before a full compile."""
        probed = list(samples)
        best: tuple[Allotment, int] | None = None
        for _ in range(N_PROBES):
            low, high = bracket(probed, self.budget_bytes)
            if low is None:
                break
            found = self._between(probed, low, high)
            if found is None:
                break
            peak = self.meter.floor(_solved(found)) + self._gap(found.bytes)
            probed.append(Sample(kept_bytes=found.bytes, peak_bytes=peak))
            if peak <= self.budget_bytes or best is None:
                best = found, peak
            unused = (self.budget_bytes - peak) / self.budget_bytes
            if 0 <= unused <= CLOSE / 2 + self._margin():
                break
        return None if best is None else (_solved(best[0]), best[1])

    def _gap(self, kept_bytes: int) -> int:
        """How far a peak is above its floor: as far as the largest of those near.

        One that did not fit is heeded as well, so that the next is not as far over.
        """
        if self.squeezed:
            return 0
        gaps = sorted(
            (
                abs(m.candidate.allotment.bytes - kept_bytes),
                m.peak_bytes - self.meter.floor(m.candidate),
            )
            for m in self._known()
            if not m.candidate.removes
        )
        return max([0, *(gap for _, gap in gaps[:2])])

    def _margin(self) -> float:
        """Share of the budget to aim below it: more, once that was not enough."""
        over = sum(
            0 < m.peak_bytes / self.budget_bytes - 1 < CLOSE
            for m in self.meter.measured
            if not m.candidate.is_named
        )
        return MARGIN * (1 + over)

    # --- named policies

    def _try_named(self) -> None:
        """Compile the named policies that use the budget, so that none beats the plan.

        Those that take just the budget, and others that the model does not take for
        worse than what is compiled.
        """
        for _ in range(N_NAMED):
            hopeful = self._hopeful()
            if not hopeful or self.meter.n_full >= MAX_COMPILES:
                return
            self._compile_named(*hopeful[0])

    def _hopeful(self) -> list[tuple[Named, float]]:
        samples = [m.sample for m in self.meter.measured]
        tried = self._tried()
        return near_budget(
            self.kinds,
            [named for named in self.named() if named.allotment.key not in tried],
            budget_bytes=self.budget_bytes,
            predict=lambda kept_bytes: predict_peak(samples, kept_bytes),
            beside=[self._modelled(m.candidate.allotment) for m in self._fitting()],
            is_used=any(
                m.candidate.is_named and m.peak_bytes >= (1 - NEAR) * self.budget_bytes
                for m in self._fitting()
            ),
        )

    def _tried(self) -> set[Any]:
        """What was compiled, or does not compile."""
        candidates = [m.candidate for m in self.meter.measured] + self._failed
        return {candidate.allotment.key for candidate in candidates}

    def _modelled(self, allotment: Allotment) -> Modelled:
        return Modelled.of(self.kinds, allotment)

    def _compile_named(self, named: Named, peak: float) -> Measured | None:
        candidate = Candidate(
            label=named.names[0], allotment=named.allotment, is_named=True
        )
        try:
            return self.meter.full((candidate, peak))[0]
        except CompileError as error:
            self._failed.append(candidate)
            self.notes.append(f"{candidate.label} does not compile: {_first(error)}")
            return None

    # --- better than the best

    def _improve(self) -> None:
        """Compile mixes that the model takes for better than the best so far."""
        misses = 0
        while self.meter.n_full < MAX_COMPILES and misses < N_MISSES:
            best = self.best()
            found = None if best is None else self._better(best)
            if best is None or found is None:
                return
            self._compile_mix(_solved(found))
            misses += self.best() is best

    def _compile_mix(self, candidate: Candidate) -> Measured | None:
        """Compile a mix; None where it does not compile, or will not fit (TPU)."""
        kept = candidate.allotment.bytes
        peak = predict_peak([m.sample for m in self.meter.measured], kept)
        try:
            if self.is_tpu:
                # A floor is low where much is offloaded, and then says little.
                peak = min(peak, self.meter.floor(candidate) + self._gap(kept))
                if peak > (1 + NEAR) * self.budget_bytes:
                    self._failed.append(candidate)
                    return None
            return self.meter.full((candidate, peak))[0]
        except CompileError:
            self._failed.append(candidate)
            return None

    def _better(self, best: Measured) -> Allotment | None:
        if self._pool is None:
            named = [one.allotment for one in self.named()]
            self._pool = Pool(self.kinds, named)
        search = Better(
            pool=self._pool,
            budget_bytes=self.budget_bytes,
            measured=self.meter.measured,
            fits=self.fits,
            tried=self._tried(),
        )
        margin = self._margin()
        within = next_kept_bytes(self._samples(), self.budget_bytes, margin)
        return search.than(best, within=within)


def _solved(allotment: Allotment) -> Candidate:
    return Candidate(label="solved", allotment=allotment)


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
