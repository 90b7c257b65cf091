"""A memory report in the terminal: totals, categories, timeline, largest buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat._explain._explain import explain_report
from remat._finding import Finding
from remat._report._buffer import Buffer
from remat._report._report import MemoryReport
from remat._show.console import as_text
from remat._show.palette import CATEGORY_COLORS
from remat._show.timeline import timeline_text
from remat._sizes import format_bytes, format_count, format_seconds

N_BUFFERS = 15
N_SUMMITS = 3
SMALL = 0.005
"""Shares below this are in no legend."""


def report_view(
    report: MemoryReport,
    width: int = 100,
    findings: Iterable[Finding] | None = None,
) -> RenderableType:
    """The report for a rich console.

    Args:
        report: What to show.
        width: Columns of the terminal.
        findings: What was found out about it; None to look at the report alone.

    Returns:
        Title, totals, a bar of categories, the timeline, the largest buffers, notes.
    """
    found = explain_report(report) if findings is None else tuple(findings)
    parts: list[RenderableType] = [Text(title(report), style="bold"), _totals(report)]
    if report.buffers:
        parts += ["", _bar(report, width), "", timeline_text(report.timeline, width)]
        parts += [_summits(report), buffers_table(report, width)]
    parts += [_finding(one) for one in found]
    parts += [Text(note, style="dim") for note in report.notes]
    return Group(*parts)


def report_text(report: MemoryReport, width: int = 100) -> str:
    """The report as plain text."""
    return as_text(report_view(report, width), width)


def title(report: MemoryReport) -> str:
    """One line: what it is, what it needs, whether it fits."""
    least = "" if report.exact or not report.fits else "at least "
    verdict = "fits" if report.fits else "DOES NOT FIT"
    if report.exact is False and report.fits:
        verdict = "may fit"
    return (
        f"{report.module or 'program'} on {report.target}: peak {least}"
        f"{format_bytes(report.peak_bytes)} of {format_bytes(report.available_bytes)} "
        f"usable: {verdict}"
    )


def totals(report: MemoryReport) -> list[tuple[str, str]]:
    """Name and text of the figures worth a line, those that are zero left out."""
    sizes = {
        "arguments": report.argument_bytes,
        "outputs": report.output_bytes,
        "aliased": -report.alias_bytes,
        "temporaries": report.temp_bytes,
        "of these gaps": report.fragmentation_bytes,
        "constants": report.constant_bytes,
        "code": report.generated_code_bytes,
        "host": report.host_bytes,
        "on chip": report.on_chip_bytes,
    }
    shown = [(name, format_bytes(size)) for name, size in sizes.items() if size]
    if report.flops:
        shown.append(("FLOPs", format_count(report.flops)))
    if report.recompute_flops:
        share = report.recompute_flops / max(1, report.flops)
        shown.append(("recomputed", f"{format_count(report.recompute_flops)}"))
        shown[-1] = ("recomputed", f"{shown[-1][1]} ({share:.1%})")
    if report.bytes_accessed:
        shown.append(("moved", format_bytes(report.bytes_accessed)))
    if report.cost.n_collectives:
        count, size = report.cost.n_collectives, report.cost.collective_bytes
        shown.append(("collectives", f"{count:.0f} ({format_bytes(round(size))})"))
    if report.cost.n_kernels:
        count, size = report.cost.n_kernels, report.cost.kernel_bytes
        shown.append(("custom kernels", f"{count:.0f} ({format_bytes(round(size))})"))
    if math.isfinite(report.estimated_step_s):
        seconds = format_seconds(report.estimated_step_s)
        shown.append((f"time by {report.estimate_source}", seconds))
    return shown


def buffers_table(report: MemoryReport, width: int, n: int = N_BUFFERS) -> Table:
    """The largest buffers at the peak."""
    least = 1e-4 * report.peak_bytes
    shown = [one for one in report.buffers[:n] if one.bytes >= least]
    rest = report.buffers[len(shown) :]
    table = Table(
        title="largest at the peak",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1),
        caption=_rest(rest),
        caption_justify="left",
    )
    for column in ("size", "unpadded") if width >= 110 else ("size",):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("value", overflow="fold", ratio=1)
    if width >= 90:
        table.add_column("line", overflow="ellipsis", no_wrap=True, max_width=28)
    for buffer in shown:
        table.add_row(*_cells(buffer, width))
    return table


def shape_text(buffer: Buffer) -> str:
    """`bf16`-like type and shape, `float32[8,128]`."""
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"


def _cells(buffer: Buffer, width: int) -> Iterable[Text | str]:
    yield format_bytes(buffer.bytes)
    if width >= 110:
        padded = buffer.unpadded_bytes < buffer.bytes
        yield format_bytes(buffer.unpadded_bytes) if padded else "–"
    what = [buffer.category]
    if buffer.memory_space != "device":
        what.append(buffer.memory_space)
    if buffer.phase and buffer.phase not in what:
        what.append(buffer.phase)
    color = CATEGORY_COLORS[buffer.category]
    yield Text(" · ".join(what), style=color)
    stacked = f" ×{buffer.n_stacked}" if buffer.n_stacked > 1 else ""
    yield shape_text(buffer) + stacked
    yield Text(buffer.name)
    if width >= 90:
        yield buffer.source or "–"


def _rest(buffers: Iterable[Buffer]) -> str | None:
    rest = list(buffers)
    if not rest:
        return None
    return f"and {len(rest)} more, {format_bytes(sum(b.bytes for b in rest))} together"


def _totals(report: MemoryReport) -> Text:
    text = Text()
    for i, (name, value) in enumerate(totals(report)):
        text.append("  " if i else "").append(f"{name} ", "dim").append(value)
    return text


def _bar(report: MemoryReport, width: int) -> Text:
    """One line of blocks, each category's share its length, and their sizes."""
    sizes = report.by_category()
    whole = sum(sizes.values()) or 1
    bar, legend = Text(), Text()
    end = drawn = 0
    for category, size in sizes.items():
        end += size
        upto = round(width * end / whole)
        bar.append("█" * (upto - drawn), CATEGORY_COLORS[category])
        drawn = upto
        if size < SMALL * whole:
            continue
        legend.append("█ ", CATEGORY_COLORS[category])
        legend.append(f"{category} {format_bytes(size)} ({size / whole:.0%})  ")
    return bar.append("\n").append_text(legend)


def _summits(report: MemoryReport) -> Text:
    """The peak and the next ones down: what else would have to shrink."""
    text = Text()
    for i, point in enumerate(report.summits(N_SUMMITS)):
        runs = f", of {point.n_runs} runs" if point.n_runs > 1 else ""
        text.append("peak " if i == 0 else "then ", "dim")
        text.append(format_bytes(point.device_bytes))
        text.append(
            f" at {point.instruction} ({point.phase or 'other'}{runs})  ", "dim"
        )
    return text


def _finding(finding: Finding) -> Text:
    style = {"error": "bold red", "warning": "yellow", "info": "cyan"}
    text = Text("● ", style=style[finding.severity])
    if finding.source:
        text.append(f"{finding.source}: ", "bold")
    return text.append(f"{finding.message} {finding.fix}")
