"""The largest sizes that fit, as a terminal table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from remat._compare._comparison import recompute_share
from remat._compare._fit import Fit, FitRow
from remat._sizes import format_bytes, format_seconds


def fit_table(fit: Fit) -> Table:
    """The result for a rich console, largest size first."""
    table = Table(
        title=f"largest {fit.what} of {fit.model} on {fit.target.name}, "
        f"{format_bytes(fit.budget_bytes)} usable",
        title_justify="left",
        header_style="bold",
        caption="\n".join(f"skipped {s.policy}: {s.reason}" for s in fit.skipped),
        caption_justify="left",
    )
    table.add_column("policy")
    for column in (f"largest {fit.what}", "peak", "host", "recompute", "step", "per"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in sorted(fit.rows, key=lambda row: -row.largest):
        table.add_row(*_cells(row))
    return table


def fit_text(fit: Fit, width: int = 100) -> str:
    """The table as plain text."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(fit_table(fit))
    return capture.get()


def _cells(found: FitRow) -> tuple[str, ...]:
    row = found.row
    return (
        row.policy,
        str(found.largest) if found.largest else "none fits",
        format_bytes(row.peak_bytes),
        format_bytes(row.host_bytes) if row.host_bytes else "–",
        f"{100 * recompute_share(row):.1f} % fwd",
        _time(row.estimated_step_s),
        _time(row.estimated_step_s, max(found.largest, 1)),
    )


def _time(seconds: float | None, n: int = 1) -> str:
    return "–" if seconds is None else format_seconds(seconds / n)
