"""A comparison as a terminal table, an HTML table and a plotly figure."""

from __future__ import annotations

import html
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat._compare._comparison import Comparison, Row, recompute_share
from remat._lint._notes import notes_of
from remat._sizes import format_bytes, format_seconds, unit_of

COLUMNS = (
    "policy",
    "fits",
    "peak",
    "saved",
    "temporaries",
    "host",
    "recompute",
    "moved",
    "step (estimate)",
)


DROPPED_WHEN_NARROW = (("moved", 124), ("temporaries", 112), ("host", 98))
"""Columns left out on a terminal of fewer characters, in this order."""


def comparison_table(comparison: Comparison, width: int = 140) -> RenderableType:
    """The comparison for a rich console: title, rows, advice and what has no row."""
    dropped = {column for column, least in DROPPED_WHEN_NARROW if width < least}
    shown = [i for i, column in enumerate(COLUMNS) if column not in dropped]
    table = Table(
        title=_title(comparison), title_justify="left", box=box.SIMPLE, padding=(0, 1)
    )
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i < 2 else "right", no_wrap=True)
    none = _baseline(comparison)
    for row in comparison.rows:
        texts = cells(row, none, comparison.best)
        style = "bold green" if row.policy == comparison.best else None
        table.add_row(*(texts[i] for i in shown), style=style)
    return Group(
        table,
        Text(comparison.advice, style="bold"),
        *(Text(line) for line in comparison.explain()),
        Text("\n".join(_notes(comparison)), style="dim"),
    )


def cells(row: Row, none: Row | None, best: str | None) -> tuple[str, ...]:
    """The text of a row's cells, one for each of `COLUMNS`."""
    mark = "" if row.exact else "≥ "
    fits = {True: "yes", False: "no", None: "likely"}[row.fits]
    return (
        f"{row.policy} ◀" if row.policy == best else row.policy,
        fits,
        mark + format_bytes(row.peak_bytes),
        _saved(row, none),
        mark + format_bytes(row.temp_bytes),
        format_bytes(row.host_bytes) if row.host_bytes else "–",
        f"{100 * recompute_share(row):.1f} % fwd" if row.recompute_flops else "–",
        format_bytes(row.bytes_accessed),
        _time(row, none),
    )


def comparison_text(comparison: Comparison, width: int = 140) -> str:
    """The table as plain text."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(comparison, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def comparison_html(comparison: Comparison) -> str:
    """The table as HTML that a notebook shows, readable in light and dark."""
    none = _baseline(comparison)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    lines = []
    for row in comparison.rows:
        weight = ' style="font-weight:bold"' if row.policy == comparison.best else ""
        inside = "".join(
            f"<td>{html.escape(cell)}</td>"
            for cell in cells(row, none, comparison.best)
        )
        lines.append(f'<tr{weight} title="{html.escape(row.note)}">{inside}</tr>')
    why = "<br>".join(html.escape(line) for line in comparison.explain())
    notes = "<br>".join(html.escape(line) for line in _notes(comparison))
    return (
        f"<table><caption>{html.escape(_title(comparison))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        f"<p><b>{html.escape(comparison.advice)}</b></p>"
        f"<p>{why}</p><p><small>{notes}</small></p>"
    )


FAR = 4
"""A limit of more than this many times the largest peak is not drawn."""


def comparison_figure(comparison: Comparison) -> Any:
    """Peak device memory against estimated step time, the limit as a line."""
    import plotly.graph_objects as go

    figure = go.Figure()
    most = max((row.peak_bytes for row in comparison.rows), default=0)
    unit, in_unit = unit_of(most)
    for exact, name in ((True, "compiled in full"), (False, "floor (≥)")):
        rows = [row for row in comparison.rows if row.exact is exact]
        if rows:
            figure.add_scatter(
                x=[row.peak_bytes / in_unit for row in rows],
                y=[1e3 * (row.estimated_step_s or 0.0) for row in rows],
                text=[row.policy for row in rows],
                mode="markers+text",
                textposition="top center",
                name=name,
            )
    # A limit far away would press all rows into one line; the title has it.
    if comparison.budget_bytes <= FAR * most:
        figure.add_vline(x=comparison.budget_bytes / in_unit, line_dash="dash")
    figure.update_layout(
        title=_title(comparison),
        xaxis_title=f"peak device memory ({unit})",
        yaxis_title="estimated step (ms)",
    )
    return figure


def _title(comparison: Comparison) -> str:
    return (
        f"{comparison.model} on {comparison.target.name}, "
        f"{format_bytes(comparison.budget_bytes)} usable"
    )


def _baseline(comparison: Comparison) -> Row | None:
    return next((row for row in comparison.rows if row.policy == "none"), None)


def _saved(row: Row, none: Row | None) -> str:
    """Against `none`: peak against peak, or floor against floor."""
    if none is None or row is none:
        return "–"
    if row.exact:
        base, size = (none.peak_bytes if none.exact else None), row.peak_bytes
    else:
        base, size = none.floor_bytes, row.floor_bytes
    if not base or size is None:
        return "?"
    return f"{format_bytes(base - size)} ({100 * (base - size) / base:.0f} %)"


def _time(row: Row, none: Row | None) -> str:
    if row.estimated_step_s is None:
        return "–"
    time = format_seconds(row.estimated_step_s)
    if none is None or not none.estimated_step_s:
        return time
    return f"{time} ({row.estimated_step_s / none.estimated_step_s:.2f}×)"


def _notes(comparison: Comparison) -> list[str]:
    lines = [f"{row.policy}: {row.note}" for row in comparison.rows if row.note]
    if comparison.skipped:
        names = ", ".join(failure.policy for failure in comparison.skipped)
        lines.append(f"skipped, the model emits none of their names: {names}")
    lines += [f"failed {f.policy}: {f.reason}" for f in comparison.failed]
    # Those of skipped policies are why they were skipped.
    rows = {row.policy for row in comparison.rows}
    lines += notes_of(
        {p: found for p, found in comparison.findings.items() if p in rows}, len(rows)
    )
    missing = {name for row in comparison.rows for name in row.missing_names}
    if missing:
        lines.append(
            "names that some policies list and this model does not emit: "
            f"{', '.join(sorted(missing))}"
        )
    if not all(row.exact for row in comparison.rows):
        lines.append(
            "≥ is a floor: what the compiler can squeeze the step to. A run uses more; "
            "--exact compiles those rows in full."
        )
    if comparison.target.kind == "cpu":
        lines.append(
            "compiled for the CPU, whose compiler can rank policies unlike a TPU's or "
            "GPU's; choose a --target to decide for an accelerator"
        )
    return lines
