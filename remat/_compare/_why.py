"""Three lines on what the best row of a comparison changed, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from remat._report._diff import Change, ReportDiff, diff
from remat._sizes import format_bytes, format_count

if TYPE_CHECKING:
    from remat._compare._comparison import Comparison, Row

N_NAMES = 3
"""Names a line lists."""


def why(comparison: Comparison) -> tuple[str, ...]:
    """Says what the best policy does to the memory of the step.

    Args:
        comparison: With the reports of its rows.

    Returns:
        Three lines: the peaks, what went and what moved to the host, what it costs.
        Empty where no policy fits, or nothing comparable was compiled.
    """
    if comparison.best is None:
        return ()
    best = comparison[comparison.best]
    other = _other(comparison, best)
    if other is None or best.report is None or other.report is None:
        return ()
    change = diff(other.report, best.report)
    return (
        f"{best.policy} against {other.policy}: peak {format_bytes(other.peak_bytes)} "
        f"→ {format_bytes(best.peak_bytes)}"
        f"{_share(change.peak_change_bytes, other.peak_bytes)}.",
        _memory(change),
        _cost(best, other, change),
    )


def _other(comparison: Comparison, best: Row) -> Row | None:
    """The row without remat; for that row, the one that needs least."""
    rows = [
        row
        for row in comparison.rows
        if row is not best and row.report and row.exact == best.exact
    ]
    none = next((row for row in rows if row.policy == "none"), None)
    return none or min(rows, key=lambda row: row.peak_bytes, default=None)


def _memory(change: ReportDiff) -> str:
    """What went, what came, what moved: the largest of each."""
    moved = sum(one.to_host_bytes for one in change.changes)
    parts = [
        f"{title} {_names(changes)}"
        for title, changes in (("Went:", change.went), ("came:", change.came))
        if changes
    ]
    if moved:
        parts.append(f"to the host: {format_bytes(moved)}")
    return ("; ".join(parts) or "Nothing changed at the peak") + "."


def _names(changes: Iterable[Change]) -> str:
    """The largest changes by module, the rest as a sum."""
    sizes: dict[str, int] = {}
    for one in changes:
        name = f"{one.category} of {one.name}" if one.module_path else one.name
        sizes[name] = sizes.get(name, 0) + abs(one.change_bytes)
    first = sorted(sizes.items(), key=lambda item: -item[1])[:N_NAMES]
    texts = [f"{format_bytes(size)} {name}" for name, size in first]
    if rest := sum(sizes.values()) - sum(size for _, size in first):
        texts.append(f"{format_bytes(rest)} more")
    return ", ".join(texts)


def _cost(best: Row, other: Row, change: ReportDiff) -> str:
    flops = best.flops - other.flops
    share = flops / other.flops if other.flops else 0.0
    parts = [f"{format_count(flops)} more FLOPs ({share:+.1%})"]
    if not flops:
        parts = ["no more FLOPs"]
    elif flops < 0:
        parts = [f"{format_count(-flops)} fewer FLOPs ({share:+.1%})"]
    if change.host_change_bytes:
        parts.append(f"{format_bytes(change.host_change_bytes)} more host memory")
    if best.estimated_step_s and other.estimated_step_s:
        ratio = best.estimated_step_s / other.estimated_step_s - 1
        parts.append(f"{ratio:+.1%} estimated time")
    return f"Costs {', '.join(parts)}."


def _share(change_bytes: int, of_bytes: int) -> str:
    return f" ({change_bytes / of_bytes:+.0%})" if of_bytes else ""
