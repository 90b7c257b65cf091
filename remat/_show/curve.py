"""The memory-recompute curve as a plotly figure and as a terminal table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from remat._plan._curve import Curve, CurvePoint
from remat._sizes import format_bytes, format_seconds, unit_of


def curve_figure(curve: Curve) -> Any:
    """Time of the recompute against peak memory; compiled points marked."""
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, in_unit = unit_of(max(map(_peak, (*curve.points, *curve.named)), default=0))
    groups = (
        ("frontier", curve.points, "lines+markers"),
        ("compiled", [p for p in curve.points if p.peak_bytes is not None], "markers"),
        ("named policies", curve.named, "markers"),
    )
    for name, points, mode in groups:
        figure.add_scatter(
            x=[_peak(point) / in_unit for point in points],
            y=[1e3 * point.recompute_s for point in points],
            text=[", ".join(point.policies[:4]) for point in points],
            mode=mode,
            name=name,
        )
    figure.update_layout(
        title=f"{curve.model} on {curve.target}",
        xaxis_title=f"peak device memory ({unit})",
        yaxis_title="time of recompute (ms, by the model)",
    )
    return figure


def curve_text(curve: Curve, width: int = 110) -> str:
    """The points and the named policies, least memory first."""
    table = Table(title=f"{curve.model} on {curve.target}", box=box.SIMPLE)
    table.add_column("choice")
    for column in ("peak", "host", "recompute", "its time"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in sorted((*curve.points, *curve.named), key=_peak):
        share = point.recompute_flops / (curve.forward_flops or 1)
        mark = "" if point.peak_bytes is not None else "~ "
        table.add_row(
            ", ".join(point.policies[:3]) or "frontier",
            mark + format_bytes(_peak(point)),
            format_bytes(point.host_bytes) if point.host_bytes else "–",
            f"{100 * share:.1f} % fwd",
            format_seconds(point.recompute_s),
        )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _peak(point: CurvePoint) -> int:
    known = point.peak_bytes
    return point.predicted_peak_bytes if known is None else known
