"""The difference of two reports in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat._report._diff import Change, ReportDiff
from remat._show.console import as_text
from remat._show.palette import CATEGORY_COLORS
from remat._sizes import format_bytes, format_count

N_CHANGES = 20


def diff_view(diff: ReportDiff, n: int = N_CHANGES) -> RenderableType:
    """The difference for a rich console: peaks, what changed, what it costs."""
    table = Table(box=box.SIMPLE, padding=(0, 1), caption_justify="left")
    for column in ("change", "before", "after", "to host"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    for change in diff.changes[:n]:
        table.add_row(*_cells(change))
    if rest := diff.changes[n:]:
        left = sum(change.change_bytes for change in rest)
        table.caption = f"and {len(rest)} smaller changes, {signed(left)} together"
    return Group(Text(diff_title(diff), style="bold"), table, Text(costs(diff)))


def diff_text(diff: ReportDiff, width: int = 100) -> str:
    """The difference as plain text."""
    return as_text(diff_view(diff), width)


def diff_title(diff: ReportDiff) -> str:
    """The two peaks and what lies between them."""
    before, after = diff.before.peak_bytes, diff.after.peak_bytes
    share = f" ({diff.peak_change_bytes / before:+.0%})" if before else ""
    return (
        f"peak {format_bytes(before)} → {format_bytes(after)}: "
        f"{signed(diff.peak_change_bytes)}{share}"
    )


def costs(diff: ReportDiff) -> str:
    """What the change costs: recompute, host memory, time."""
    parts = [f"recompute {_signed_count(diff.recompute_change_flops)}FLOPs"]
    if diff.before.flops:
        parts[0] += f" of {format_count(diff.before.flops)}"
    if diff.host_change_bytes:
        parts.append(f"host {signed(diff.host_change_bytes)}")
    before, after = diff.before.estimated_step_s, diff.after.estimated_step_s
    is_alike = diff.before.estimate_source == diff.after.estimate_source
    if before > 0 and after > 0 and is_alike:
        parts.append(f"estimated time {after / before - 1:+.1%}")
    return ", ".join(parts)


def signed(n_bytes: int) -> str:
    """A size with its sign."""
    return ("+" if n_bytes > 0 else "") + format_bytes(n_bytes)


def _signed_count(n: float) -> str:
    text = format_count(n)
    return ("+" if n >= 0 else "") + text + (" " if text[-1].isdigit() else "")


def _cells(change: Change) -> tuple[Text | str, ...]:
    style = "green" if change.change_bytes < 0 else "red"
    return (
        Text(signed(change.change_bytes), style=style),
        format_bytes(change.before_bytes) if change.before_bytes else "–",
        format_bytes(change.after_bytes) if change.after_bytes else "–",
        format_bytes(change.to_host_bytes) if change.to_host_bytes else "–",
        Text(change.category, style=CATEGORY_COLORS[change.category]),
        Text(change.name),
    )
