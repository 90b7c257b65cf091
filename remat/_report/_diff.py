"""What changed in memory from one compiled program to another.

The buffers live at the two peaks are added up by category, module and label. Peak
memory is what those in device memory take, constants apart, and the gaps that the
allocator leaves between temporaries; so the changes add up to the difference of the
peaks, to the byte. What left the device for the host is matched by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat._files import write_text
from remat._hlo._spaces import DEVICE, HOST
from remat._report._buffer import Buffer

if TYPE_CHECKING:
    from remat._report._report import MemoryReport

SCHEMA = "remat.report_diff/1"
GAPS = "gaps"
"""Category of what the allocator could not use: no buffer's, but part of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What became of the buffers of one name and category at the peak."""

    name: str
    """Module path and label, else the primitive and its line."""
    category: str
    """One of `Buffer`'s categories, or "gaps"."""
    module_path: str | None
    """Modules and scopes, or the pytree path of an argument."""
    label: str | None
    """Checkpoint name or automatic label."""
    source: str | None
    """The user's line, `model.py:12`, of the largest of them."""
    before_bytes: int
    """Device memory in the first program."""
    after_bytes: int
    """Device memory in the second program."""
    to_host_bytes: int = 0
    """Of what went from the device, bytes that the second program has on the host."""

    @property
    def change_bytes(self) -> int:
        """Positive where the second program needs more."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportDiff:
    """What changed from one report to another; `change_bytes` is after - before."""

    before: MemoryReport
    """The first program."""
    after: MemoryReport
    """The second program."""
    changes: tuple[Change, ...]
    """Every name that changed, the largest change first; they add up to
    `peak_change_bytes`."""

    @property
    def peak_change_bytes(self) -> int:
        """Difference of the peaks; negative where the second needs less."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def host_change_bytes(self) -> int:
        """Difference of host memory."""
        return self.after.host_bytes - self.before.host_bytes

    @property
    def recompute_change_flops(self) -> int:
        """Difference of the FLOPs computed a second time."""
        return self.after.recompute_flops - self.before.recompute_flops

    @property
    def flops_change(self) -> int:
        """Difference of the FLOPs of a run."""
        return self.after.flops - self.before.flops

    @property
    def estimated_change_s(self) -> float:
        """Difference of the estimated times; nan where one is not known, or the two
        are not from the same source."""
        if self.after.estimate_source != self.before.estimate_source:
            return math.nan
        return self.after.estimated_step_s - self.before.estimated_step_s

    @property
    def came(self) -> tuple[Change, ...]:
        """What takes more, largest first."""
        return tuple(c for c in self.changes if c.change_bytes > 0)

    @property
    def went(self) -> tuple[Change, ...]:
        """What takes less, largest first."""
        return tuple(c for c in self.changes if c.change_bytes < 0)

    def by_category(self) -> dict[str, int]:
        """Change in bytes by category; adds up to the difference of the peaks."""
        return self._totals(lambda change: change.category)

    def by_module(self) -> dict[str, int]:
        """Change in bytes by module path (the name, where there is none)."""
        return self._totals(lambda change: change.module_path or change.name)

    def by_label(self) -> dict[str, int]:
        """Change in bytes by checkpoint name or label; "" is what has none."""
        return self._totals(lambda change: change.label or "")

    def _totals(self, key: Callable[[Change], str]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for change in self.changes:
            totals[key(change)] = totals.get(key(change), 0) + change.change_bytes
        return dict(sorted(totals.items(), key=lambda item: -abs(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON-ready data: the two peaks, totals and changes."""
        seconds = self.estimated_change_s
        return {
            "schema": SCHEMA,
            "before": _side(self.before),
            "after": _side(self.after),
            "peak_change_bytes": self.peak_change_bytes,
            "host_change_bytes": self.host_change_bytes,
            "recompute_change_flops": self.recompute_change_flops,
            "flops_change": self.flops_change,
            "estimated_change_s": None if seconds != seconds else seconds,
            "by_category": self.by_category(),
            "changes": [
                {**dataclasses.asdict(change), "change_bytes": change.change_bytes}
                for change in self.changes
            ],
        }

    def to_json(self, indent: int | None = None) -> str:
        """The difference as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_html(self, path: str | Path | None = None) -> str:
        """Both programs and what changed, as one self-contained page.

        Args:
            path: File to write it to as well.

        Returns:
            The page.
        """
        from remat._show.page import report_page

        text = report_page(self.after, self)
        if path is not None:
            write_text(path, text)
        return text

    def __str__(self) -> str:
        """The difference as a terminal shows it."""
        from remat._show.diff import diff_text

        return diff_text(self)


def diff(before: MemoryReport, after: MemoryReport) -> ReportDiff:
    """Compares two reports, as `before.diff(after)` does.

    Args:
        before: Report of the first program, for instance the one without remat.
        after: Report of the second, for the same device.

    Returns:
        What went and what came, adding up to the difference of the peaks.

    Raises:
        ValueError: One report is of the compiler's floor and one of a full compile, or
            they are for different devices: such peaks are not to be compared.
    """
    if before.exact != after.exact and before.fits and after.fits:
        raise ValueError(
            "one report is a floor (a probe) and one of a full compile, whose peaks "
            "cannot be compared; compile both in full, or probe both"
        )
    if before.target != after.target:
        raise ValueError(
            f"reports for different devices ({before.target}, {after.target}) cannot "
            "be compared; compile both for one"
        )
    first, second = _groups(before), _groups(after)
    hosted = _host_changes(before, after)
    changes = [
        _change(key, first.get(key, []), second.get(key, []), hosted)
        for key in dict.fromkeys((*first, *second))
    ]
    changes.append(_gaps(before, after))
    changed = [c for c in changes if c.change_bytes or c.to_host_bytes]
    changed.sort(key=lambda change: -abs(change.change_bytes))
    return ReportDiff(before=before, after=after, changes=tuple(changed))


_Key = tuple[str, str]


def _in_peak(buffer: Buffer) -> bool:
    return buffer.memory_space == DEVICE and buffer.category != "constants"


def _groups(report: MemoryReport) -> dict[_Key, list[Buffer]]:
    """Device buffers of the peak by category and name."""
    found: dict[_Key, list[Buffer]] = {}
    for buffer in filter(_in_peak, report.buffers):
        found.setdefault((buffer.category, _stable_name(buffer)), []).append(buffer)
    return found


def _stable_name(buffer: Buffer) -> str:
    """A name that two compiles share, which an instruction's is not."""
    if buffer.module_path or buffer.label:
        return buffer.name
    what = buffer.primitive or buffer.instruction.rstrip(".0123456789")
    return f"{what} at {buffer.source}" if buffer.source else what


def _host_changes(before: MemoryReport, after: MemoryReport) -> dict[str, int]:
    """Growth of host memory by name."""
    totals: dict[str, int] = {}
    for sign, report in ((-1, before), (1, after)):
        for buffer in report.buffers:
            if buffer.memory_space == HOST:
                name = _stable_name(buffer)
                totals[name] = totals.get(name, 0) + sign * buffer.bytes
    return totals


def _change(
    key: _Key, before: list[Buffer], after: list[Buffer], hosted: dict[str, int]
) -> Change:
    category, name = key
    largest = max((*before, *after), key=lambda buffer: buffer.bytes)
    first, second = _sum(before), _sum(after)
    moved = max(0, min(first - second, hosted.get(name, 0)))
    if moved:
        hosted[name] -= moved
    return Change(
        name=name,
        category=category,
        module_path=largest.module_path,
        label=largest.label,
        source=largest.source,
        before_bytes=first,
        after_bytes=second,
        to_host_bytes=moved,
    )


def _gaps(before: MemoryReport, after: MemoryReport) -> Change:
    """What the peaks have beyond live buffers: gaps, and alignment."""
    first, second = (
        report.peak_bytes - _sum(filter(_in_peak, report.buffers))
        for report in (before, after)
    )
    return Change(
        name="gaps between temporaries",
        category=GAPS,
        module_path=None,
        label=None,
        source=None,
        before_bytes=first,
        after_bytes=second,
    )


def _sum(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _side(report: MemoryReport) -> dict[str, Any]:
    names = ("module", "target", "peak_bytes", "host_bytes", "flops", "recompute_flops")
    return {name: getattr(report, name) for name in names}
