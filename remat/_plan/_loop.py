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
import functools

from remat._compile._compile import CompileError
from remat._plan._better import Better
from remat._plan._choose import Allotment
from remat._plan._judge import faster_note, too_small
from remat._plan._kinds import same
from remat._plan._meter import Candidate, Measured, solved
from remat._plan._named import Named, near_budget
from remat._plan._pool import Pool
from remat._plan._search import Search
from remat._plan._seek import Seeker
from remat._plan._solve import evaluate
from remat._plan._steer import next_kept_bytes, predict_peak
from remat._sizes import format_bytes

MAX_COMPILES = 8
"""Most full compiles for one plan."""
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


class ClosedLoop(Search):
    """The search for one plan."""

    @functools.cached_property
    def _seeker(self) -> Seeker:
        return Seeker(self)

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
            self._try_named()  # one that offloads may fit as it is
            if self.best() is None:
                self._squeeze(nothing)
        self._seek(N_FIRST)
        self._try_named()
        self._improve()
        self._seek(MAX_COMPILES)
        self._improve()
        best = self.best()
        if best is None:
            raise too_small(self.budget_bytes, self.meter.measured)
        self.notes += faster_note(best, self.fitting())
        return best

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
            step = self._seeker.next()
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
        tried = self.tried()
        return near_budget(
            self.kinds,
            [named for named in self.named() if named.allotment.key not in tried],
            budget_bytes=self.budget_bytes,
            predict=lambda kept_bytes: predict_peak(samples, kept_bytes),
            beside=[self.modelled(m.candidate.allotment) for m in self.fitting()],
            is_used=any(
                m.candidate.is_named and m.peak_bytes >= (1 - NEAR) * self.budget_bytes
                for m in self.fitting()
            ),
        )

    def _compile_named(self, named: Named, peak: float) -> Measured | None:
        candidate = Candidate(
            label=named.names[0], allotment=named.allotment, is_named=True
        )
        try:
            return self.meter.full((candidate, peak))[0]
        except CompileError as error:
            self.failed.append(candidate)
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
            self._compile_mix(solved(found))
            misses += self.best() is best

    def _compile_mix(self, candidate: Candidate) -> Measured | None:
        """Compile a mix; None where it does not compile, or will not fit (TPU)."""
        kept = candidate.allotment.bytes
        peak = predict_peak([m.sample for m in self.meter.measured], kept)
        try:
            if self.is_tpu:
                # A floor is low where much is offloaded, and then says little.
                peak = min(peak, self.meter.floor(candidate) + self._seeker.gap(kept))
                if peak > (1 + NEAR) * self.budget_bytes:
                    self.failed.append(candidate)
                    return None
            return self.meter.full((candidate, peak))[0]
        except CompileError:
            self.failed.append(candidate)
            return None

    @functools.cached_property
    def _pool(self) -> Pool:
        return Pool(self.kinds, [one.allotment for one in self.named()])

    def _better(self, best: Measured) -> Allotment | None:
        samples = self._seeker.samples()
        within = next_kept_bytes(samples, self.budget_bytes, self.margin())
        return Better(search=self, pool=self._pool).than(best, within=within)


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
