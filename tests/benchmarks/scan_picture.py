"""Memory against the number of steps, both axes logarithmic, as an SVG."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
LEFT, RIGHT, TOP, BOTTOM = 70, 640, 30, 380
MIB = 2**20
COLORS = ("#4c78a8", "#9ecae9", "#e45756", "#54a24b", "#b279a2")


class Axes:
    """From steps and bytes to the page."""

    def __init__(self, lengths: Sequence[int], all_bytes: Sequence[int]) -> None:
        self.first, self.last = math.log2(min(lengths)), math.log2(max(lengths))
        self.low = math.floor(math.log10(min(all_bytes) / MIB))
        self.high = math.ceil(math.log10(max(all_bytes) / MIB))

    def x(self, n: int) -> float:
        share = (math.log2(n) - self.first) / (self.last - self.first)
        return round(LEFT + (RIGHT - LEFT) * share, 1)

    def y(self, n_bytes: float) -> float:
        share = (math.log10(n_bytes / MIB) - self.low) / (self.high - self.low)
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)


def picture(
    peaks: Mapping[str, Sequence[int]], lengths: Sequence[int], target: str
) -> str:
    """The SVG, in light and dark.

    Args:
        peaks: Bytes at each length, by how the scan is run.
        lengths: Numbers of steps.
        target: What it was compiled for.
    """
    axes = Axes(lengths, [one for row in peaks.values() for one in row])
    parts = [*_grid(axes, lengths), *_lines(axes, peaks, lengths)]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 430" role="img">
<title>Compiled peak of a scan's gradient against its steps, {target}</title>
<style>text{{font:12px sans-serif;fill:#444}}.grid{{stroke:#ccc;stroke-width:.6}}
polyline{{fill:none;stroke-width:2}}@media(prefers-color-scheme:dark){{
text{{fill:#ccc}}.grid{{stroke:#444}}}}</style>
<text x="{LEFT}" y="16">compiled peak on {target}, MiB</text>
<text x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 38}">steps</text>
{chr(10).join(parts)}
</svg>
"""


def _grid(axes: Axes, lengths: Sequence[int]) -> list[str]:
    parts = []
    for power in range(axes.low, axes.high + 1):
        y = axes.y(10**power * MIB)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{10**power:,}</text>'
        )
    for n in lengths[::2]:
        x = axes.x(n)
        parts.append(
            f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{BOTTOM}"/>'
            f'<text x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{n:,}</text>'
        )
    return parts


def _lines(
    axes: Axes, peaks: Mapping[str, Sequence[int]], lengths: Sequence[int]
) -> list[str]:
    """A line for each way, its name at the end, none over another."""
    parts, last = [], 0.0
    colors = dict(zip(peaks, COLORS, strict=False))
    for way, row in sorted(peaks.items(), key=lambda one: -one[1][-1]):
        points = " ".join(
            f"{axes.x(n)},{axes.y(one)}" for n, one in zip(lengths, row, strict=True)
        )
        last = max(axes.y(row[-1]), last + 15)
        parts.append(
            f'<polyline points="{points}" stroke="{colors[way]}"/>'
            f'<text x="{RIGHT + 8}" y="{last + 4:.1f}">{html.escape(way)}</text>'
        )
    return parts
