"""Live memory over the schedule, drawn with block characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from remat._report._timeline import TimelinePoint
from remat._show.palette import PHASE_COLORS
from remat._sizes import format_bytes

_BLOCKS = " ▁▂▃▄▅▆▇█"


def timeline_text(points: Sequence[TimelinePoint], width: int, height: int = 6) -> Text:
    """A chart of device memory, colored by pass, the peak marked below.

    Args:
        points: In schedule order; of each column's points the highest counts.
        width: Columns of the terminal.
        height: Rows of the chart.

    Returns:
        `height` rows of blocks and two of legend.
    """
    if not points:
        return Text()
    label = format_bytes(max(point.device_bytes for point in points))
    columns = _columns(points, max(10, width - len(label) - 2))
    most = max(point.device_bytes for point in columns) or 1
    text = Text()
    for row in reversed(range(height)):
        text.append(f"{label if row == height - 1 else '':>{len(label)}} ", "dim")
        for point in columns:
            eighths = round(8 * height * point.device_bytes / most) - 8 * row
            block = _BLOCKS[max(0, min(8, eighths))]
            text.append(block, PHASE_COLORS[point.phase])
        text.append("\n")
    peak = max(range(len(columns)), key=lambda i: columns[i].device_bytes)
    text.append(" " * (len(label) + 1 + peak) + "▲ peak\n", "bold")
    return text.append_text(_legend(columns))


def _legend(columns: Sequence[TimelinePoint]) -> Text:
    text = Text()
    for phase in dict.fromkeys(point.phase for point in columns):
        text.append("█ ", PHASE_COLORS[phase])
        text.append(f"{phase or 'other'}  ", "dim")
    return text


def _columns(points: Sequence[TimelinePoint], width: int) -> list[TimelinePoint]:
    """The highest point of each column; a column without takes its left neighbor's."""
    first, last = points[0].position, points[-1].position
    width = min(width, last - first + 1)
    found: list[TimelinePoint | None] = [None] * width
    for point in points:
        column = (point.position - first) * width // (last - first + 1)
        highest = found[column]
        if highest is None or point.device_bytes > highest.device_bytes:
            found[column] = point
    columns: list[TimelinePoint] = []
    for point in found:
        columns.append(point or columns[-1])
    return columns
