"""A memory report as a plotly figure for notebooks."""

from __future__ import annotations

from typing import Any

from remat._report._report import MemoryReport
from remat._show.palette import CATEGORY_COLORS, PHASE_COLORS
from remat._show.report import title
from remat._sizes import format_bytes, unit_of


def report_figure(report: MemoryReport) -> Any:
    """Live memory over the schedule, above a treemap of the peak by module.

    Args:
        report: With its buffers and timeline.

    Returns:
        A `plotly.graph_objects.Figure`.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=1, specs=[[{"type": "xy"}], [{"type": "domain"}]]
    )
    unit, in_unit = unit_of(report.live_peak_bytes)
    for trace in _timeline(report, go, in_unit):
        figure.add_trace(trace, row=1, col=1)
    figure.add_trace(_treemap(report, go), row=2, col=1)
    figure.update_layout(title=title(report), height=800, bargap=0)
    figure.update_yaxes(title_text=f"live ({unit})", row=1, col=1)
    figure.update_xaxes(title_text="place in the schedule", row=1, col=1)
    return figure


def _timeline(report: MemoryReport, go: Any, in_unit: int) -> list[Any]:
    """Bars up to the next point, a trace for each pass, and a marker at the peak."""
    points = report.timeline
    if not points:
        return []
    ends = [*(point.position for point in points[1:]), points[-1].position + 1]
    spans = list(zip(points, ends, strict=True))
    traces = [
        go.Bar(
            x=[p.position for p in points if p.phase == phase],
            width=[end - p.position for p, end in spans if p.phase == phase],
            offset=0,
            y=[p.device_bytes / in_unit for p in points if p.phase == phase],
            text=[p.instruction for p in points if p.phase == phase],
            textposition="none",
            name=phase or "other",
            marker_color=color,
            marker_line_width=0,
        )
        for phase, color in PHASE_COLORS.items()
        if any(p.phase == phase for p in points)
    ]
    peak = max(points, key=lambda point: point.device_bytes)
    traces.append(
        go.Scatter(
            x=[peak.position],
            y=[peak.device_bytes / in_unit],
            mode="markers",
            marker={"symbol": "triangle-down", "size": 12, "color": "#b3261e"},
            name=f"peak {format_bytes(peak.device_bytes)}",
        )
    )
    return traces


def _treemap(report: MemoryReport, go: Any) -> Any:
    """Modules, each with what is in it; sizes in bytes."""
    sizes: dict[tuple[str, ...], int] = {}
    colors: dict[tuple[str, ...], str] = {}
    for buffer in report.buffers:
        if buffer.memory_space != "device":
            continue
        modules = buffer.module_path or f"({buffer.category})"
        leaf = buffer.label or buffer.primitive or buffer.instruction
        path = ("peak", *modules.split("/"), leaf)
        for depth in range(1, len(path) + 1):
            part = path[:depth]
            sizes[part] = sizes.get(part, 0) + buffer.bytes
            colors.setdefault(part, CATEGORY_COLORS[buffer.category])
    return go.Treemap(
        ids=["/".join(path) for path in sizes],
        labels=[path[-1] for path in sizes],
        parents=["/".join(path[:-1]) for path in sizes],
        values=list(sizes.values()),
        text=[format_bytes(size) for size in sizes.values()],
        marker_colors=[colors[path] for path in sizes],
        branchvalues="total",
    )
