"""The result of comparing policies: rows of figures, the best one, and why."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat._compare._why import why
from remat._files import write_text
from remat._finding import Finding
from remat._report._report import MemoryReport
from remat._sizes import format_bytes
from remat._targets._target import Target

SCHEMA = "remat.comparison/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one policy costs on the target. Figures are per device."""

    policy: str
    """The policy's name, or the code that makes it."""
    fits: bool | None
    """Whether the step fits; None where only the floor is known (see `exact`)."""
    peak_bytes: int
    """Device memory the allocator must find; the floor where `exact` is False."""
    argument_bytes: int
    """Arguments in device memory."""
    output_bytes: int
    """Outputs in device memory."""
    alias_bytes: int
    """Outputs that reuse an argument's buffer."""
    temp_bytes: int
    """Temporaries in device memory."""
    host_bytes: int
    """Buffers in host memory."""
    generated_code_bytes: int
    """The program's own code in device memory."""
    live_peak_bytes: int
    """The most bytes live at once."""
    floor_bytes: int | None
    """What the compiler can squeeze the step to (TPU probe); None where not asked."""
    flops: int
    """FLOPs of the step, trip counts included."""
    recompute_flops: int
    """FLOPs of the step beyond those it has without remat."""
    forward_flops: int
    """FLOPs of the forward pass."""
    bytes_accessed: int
    """Device memory traffic of the step, trip counts included."""
    estimated_step_s: float | None
    """Estimate of the step's time (its report says by what); None where the target's
    figures are unknown (CPU)."""
    exact: bool
    """True: from a full compile under the device's real limit. False: a floor."""
    note: str = ""
    """What else to know, such as how much memory is missing."""
    missing_names: tuple[str, ...] = ()
    """Checkpoint names the policy spells out and the program does not emit."""
    report: MemoryReport | None = field(default=None, repr=False, compare=False)
    """The full report the row was taken from."""

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data, without the full report."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if f.name != "report"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A policy that has no row, and why."""

    policy: str
    """The policy's name."""
    reason: str
    """Why it has no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Policies compared on one loss for one target."""

    model: str
    """What was compiled."""
    target: Target
    """The device it was compiled for."""
    budget_bytes: int
    """Device memory that one step may use: the target's, or the budget given."""
    rows: tuple[Row, ...]
    """One row a policy, in the order asked for."""
    best: str | None
    """The recommended policy; None if none fits."""
    advice: str
    """One sentence: what to use and why."""
    skipped: tuple[Failure, ...] = ()
    """Policies none of whose names exist in the program."""
    failed: tuple[Failure, ...] = ()
    """Policies whose program could not be compiled."""
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    """What `remat.lint` found, by policy; policies without a finding are left out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: batch, sequence length, optimizer, compiler options."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of what took part."""
    n_compiles: int = 0
    """Full compiles made (equal programs and cached answers not counted)."""

    def __getitem__(self, policy: str) -> Row:
        """The row of a policy, by name."""
        for row in self.rows:
            if row.policy == policy:
                return row
        raise KeyError(
            f"no row for {policy!r}; rows: {', '.join(r.policy for r in self.rows)}"
        )

    def explain(self) -> tuple[str, ...]:
        """Three lines: what the best policy changed at the peak, and what it costs.

        Against no remat; where that is the best, against the policy that needs least.
        Empty where no policy fits or nothing comparable was compiled.
        """
        return why(self)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data: the content of `remat compare --json`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "target": self.target.name,
            "available_bytes": self.target.available_bytes,
            "budget_bytes": self.budget_bytes,
            "best": self.best,
            "advice": self.advice,
            "why": list(self.explain()),
            "rows": [row.to_dict() for row in self.rows],
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            "failed": [dataclasses.asdict(f) for f in self.failed],
            "findings": {
                policy: [dataclasses.asdict(finding) for finding in findings]
                for policy, findings in self.findings.items()
            },
            "options": dict(self.options),
            "versions": dict(self.versions),
            "n_compiles": self.n_compiles,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The comparison as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """The comparison as one HTML table, also written to `path` if given."""
        from remat._show.comparison import comparison_html

        text = comparison_html(self)
        if path is not None:
            write_text(path, text)
        return text

    def plot(self) -> Any:
        """Peak memory against estimated step time, as a plotly figure."""
        from remat._show.comparison import comparison_figure

        return comparison_figure(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        """The table as a terminal shows it."""
        from remat._show.comparison import comparison_text

        return comparison_text(self)


def best_row(rows: Iterable[Row]) -> Row | None:
    """The row to recommend: of those that fit, the fastest by the estimate.

    A roofline does not tell rows apart that are within 3 %: of those, the one that
    recomputes least, then the one that takes least memory.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    times = [row.estimated_step_s for row in fitting if row.estimated_step_s]
    if len(times) == len(fitting):
        limit = 1.03 * min(times)
        fitting = [row for row in fitting if (row.estimated_step_s or 0) <= limit]
    return min(fitting, key=lambda row: (row.recompute_flops, row.peak_bytes))


def advise(rows: Iterable[Row], target: Target, budget_bytes: int) -> str:
    """One sentence: which policy to use, and why."""
    rows = list(rows)
    if not rows:
        return "No policy could be compiled."
    of = f"the {format_bytes(budget_bytes)} of {target.name}"
    best = best_row(rows)
    if best is None:
        least = min(rows, key=lambda row: row.peak_bytes)
        return (
            f"No policy fits: the least is {least.policy}, which needs "
            f"{format_bytes(least.peak_bytes)} where {of} can be used; use a smaller "
            "batch or sequence, shard the step, or offload more."
        )
    uses = f"it takes {format_bytes(best.peak_bytes)} of {of}"
    if best.policy == "none":
        return f"Use no remat: {uses}, and no policy that fits is faster."
    share = 100 * recompute_share(best)
    cost = "recomputes next to nothing"
    if share >= 0.5:
        cost = f"recomputes {share:.0f} % of the forward pass"
    none = next((row for row in rows if row.policy == "none"), None)
    why = "and is the fastest that fits, by the estimate"
    if none is not None and none.fits is False:
        why = f"while no remat needs {format_bytes(none.peak_bytes)}"
    return f"Use {best.policy}: {uses}, {cost}, {why}."


def recompute_share(row: Row) -> float:
    """Recomputed FLOPs as a share of the forward pass."""
    return row.recompute_flops / row.forward_flops if row.forward_flops else 0.0


def versions() -> dict[str, str]:
    """The versions that a figure depends on."""
    found = {"python": platform.python_version()}
    for package in ("remat", "jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
