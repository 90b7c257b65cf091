"""The compiles of one comparison: which rows are compiled, how far, and only once."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from remat._compare._candidates import applied
from remat._compare._comparison import Failure, Row
from remat._compare._measure import (
    Prepared,
    Setup,
    compiled_report,
    first_line,
    forward_flops,
    prepare,
)
from remat._compile._compile import CompileError
from remat._regions._with_policy import NoNamesFound, with_policy
from remat._report._report import MemoryReport
from remat._sizes import format_bytes

FLOOR_MARGIN = 0.35
"""A floor this close below the limit does not settle whether the program fits."""

N_CANDIDATES = 3
"""Programs compiled in full because their floors make them likely to be the best."""

N_WORKERS = 2
"""Compiles that run side by side."""

Progress = Callable[[str], None]


class Session:
    """One comparison under way: what its rows share.

    Compiles run in threads (XLA releases the interpreter lock); tracing and lowering
    hold it, so they stay on the calling thread.
    """

    def __init__(self, setup: Setup, limit_bytes: int, say: Progress) -> None:
        self.setup = setup
        self.limit_bytes = limit_bytes
        self.say = say
        self.n_compiles = 0
        self.pool = ThreadPoolExecutor(N_WORKERS)
        self.answers: dict[tuple[str, bool], Future[MemoryReport]] = {}
        self.prepared: dict[str, Prepared] = {}
        self.skipped: list[Failure] = []
        self.failed: list[Failure] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        # On an error or Ctrl-C nobody will read what is still queued.
        self.pool.shutdown(wait=False, cancel_futures=True)

    def start(
        self, loss: Callable[..., Any], policies: Mapping[str, Any], probe: bool
    ) -> None:
        """Traces and lowers every row, and sends it to be compiled."""
        unwrapped = with_policy(loss, "none")
        self.say("tracing the step without remat")
        self.base_flops = prepare(unwrapped, self.setup).flops
        self.forward_flops = forward_flops(unwrapped, self.setup)
        for label, policy in policies.items():
            self.say(f"lowering {label}")
            try:
                self.prepared[label] = prepare(applied(loss, policy), self.setup)
            except NoNamesFound as error:
                self.skipped.append(Failure(policy=label, reason=first_line(error)))
                continue
            except CompileError as error:
                self.failed.append(Failure(policy=label, reason=first_line(error)))
                continue
            self._submit(label, probe)

    def rows(self, probe: bool) -> list[Row]:
        """The rows in the order asked for, once they are compiled."""
        rows = {label: self._row(label, probe) for label in self.prepared}
        if probe:
            self._compile_what_matters(rows)
        return [row for row in rows.values() if row is not None]

    def _submit(self, label: str, probe: bool) -> Future[MemoryReport]:
        one = self.prepared[label]
        if (one.key, probe) not in self.answers:
            self.answers[one.key, probe] = self.pool.submit(
                compiled_report,
                one,
                self.setup,
                probe=probe,
                on_compile=lambda: self._compiling(label, probe),
            )
        return self.answers[one.key, probe]

    def _compiling(self, label: str, probe: bool) -> None:
        self.say(f"{'probing' if probe else 'compiling'} {label}")
        self.n_compiles += not probe

    def _row(self, label: str, probe: bool, floor: int | None = None) -> Row | None:
        one = self.prepared[label]
        try:
            report = self._submit(label, probe).result()
        except CompileError as error:
            self.failed.append(Failure(policy=label, reason=first_line(error)))
            return None
        self.say(f"{label}: {format_bytes(report.peak_bytes)}")
        too_big = report.peak_bytes > self.limit_bytes
        fits = False if too_big else None if probe else report.fits
        notes = list(one.warnings)
        if fits is False:
            needs, of = format_bytes(report.peak_bytes), format_bytes(self.limit_bytes)
            notes.insert(0, f"needs {needs} of {of}")
        return Row(
            policy=label,
            fits=fits,
            floor_bytes=report.peak_bytes if probe else floor,
            flops=one.flops,
            recompute_flops=one.flops - self.base_flops,
            forward_flops=self.forward_flops,
            estimated_step_s=_known(report.estimated_step_s),
            exact=not probe,
            note="; ".join(notes),
            missing_names=one.missing_names,
            report=report,
            **{name: getattr(report, name) for name in _SHARED},
        )

    def _compile_what_matters(self, rows: dict[str, Row | None]) -> None:
        """Full compiles where a floor settles nothing, and of what could be best."""
        floors = {label: row for label, row in rows.items() if row is not None}
        threshold = (1 - FLOOR_MARGIN) * self.limit_bytes
        wanted = [
            label
            for label, row in floors.items()
            # Savings are against `none`, so that one has to be right.
            if row.peak_bytes >= threshold or label == "none"
        ]
        hopeful = [row for row in floors.values() if row.fits is not False]
        hopeful.sort(key=lambda row: (row.estimated_step_s or 0.0, row.peak_bytes))
        wanted += self._first_programs(hopeful, wanted)
        for label in wanted:
            self._submit(label, probe=False)
        for label in wanted:
            rows[label] = self._row(label, False, floors[label].floor_bytes)
        _calibrate(rows, floors)

    def _first_programs(self, rows: Sequence[Row], known: Sequence[str]) -> list[str]:
        """The rows of the first `N_CANDIDATES` programs that are not known yet."""
        seen = {self.prepared[label].key for label in known}
        limit = len(seen) + N_CANDIDATES
        found = []
        for row in rows:
            key = self.prepared[row.policy].key
            if row.policy not in known and (key in seen or len(seen) < limit):
                seen.add(key)
                found.append(row.policy)
        return found


_SHARED = (
    "peak_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "generated_code_bytes",
    "live_peak_bytes",
    "bytes_accessed",
)


def _calibrate(rows: dict[str, Row | None], floors: Mapping[str, Row]) -> None:
    """Puts the time estimates of floors on the scale of full compiles.

    A program squeezed to its floor is not the one that would run. The rows that were
    compiled in full tell by how much the estimates differ.
    """
    ratios = []
    for label, row in rows.items():
        full = row.estimated_step_s if row is not None and row.exact else None
        floor = floors[label].estimated_step_s if label in floors else None
        if full and floor:
            ratios.append(full / floor)
    if not ratios:
        return
    scale = statistics.median(ratios)
    for label, row in rows.items():
        if row is not None and not row.exact:
            time = floors[label].estimated_step_s
            rows[label] = dataclasses.replace(
                row, estimated_step_s=time and scale * time
            )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
