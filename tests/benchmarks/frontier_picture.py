"""The planner's points under the named policies, as a picture.

Draws `docs/frontier_gpt2_h100.svg` from what `tests.benchmarks.dominance` compiled:

    python -m tests.benchmarks.dominance --models gpt2 --targets h100
    python -m tests.benchmarks.frontier_picture --target h100
"""

import argparse
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from remat._files import write_text
from tests.benchmarks.dominance import RESULTS
from tests.benchmarks.dominance_table import compiled

DOCS = Path(__file__).parent.parent.parent / "docs"
LEFT, RIGHT, TOP, BOTTOM = 60, 760, 30, 350
LINE, WIDTH, LOW = 13, 110, 12
"""Height and width of a label; how near to the axis labels stand above."""


class Axes:
    """From GiB of peak and recomputed share of the forward pass to the page."""

    def __init__(self, cell: Mapping[str, Any]) -> None:
        figures = [*compiled(cell["named"]).values()]
        self.forward = cell["forward_flops"]
        peaks = [one["peak_bytes"] for one in figures]
        self.low, self.high = 0.95 * min(peaks), 1.02 * max(peaks)
        self.most = 1.08 * max(one["recompute_flops"] for one in figures)

    def at(self, one: Mapping[str, Any]) -> tuple[int, int]:
        along = (one["peak_bytes"] - self.low) / (self.high - self.low)
        up = one["recompute_flops"] / self.most
        return round(LEFT + (RIGHT - LEFT) * along), round(BOTTOM - (BOTTOM - TOP) * up)


def planned(cell: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the planner made: points of the frontier, and a plan for each policy."""
    points = [*compiled(cell["points"]).values()]
    return points + [p for p in cell["plans"].values() if p["origin"] == "solved"]


def undominated(figures: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with less recompute than all with less memory, least memory first."""
    best: list[Mapping[str, Any]] = []
    key = lambda one: (one["peak_bytes"], one["recompute_flops"])  # noqa: E731
    for one in sorted(figures, key=key):
        if not best or one["recompute_flops"] < best[-1]["recompute_flops"]:
            best.append(one)
    return best


def steps(axes: Axes, points: list[Mapping[str, Any]]) -> str:
    """The plan at every budget: a point holds until the next one fits."""
    path = ""
    for one in points:
        x, y = axes.at(one)
        path += f"H{x}V{y}" if path else f"M{x},{y}"
    return f"{path}H{RIGHT}"


def ticks_along(axes: Axes) -> Iterator[str]:
    """A mark for every second GiB."""
    first = 2 * math.ceil(axes.low / 2**31)
    for gib in range(first, int(axes.high / 2**30) + 1, 2):
        x, _ = axes.at({"peak_bytes": gib * 2**30, "recompute_flops": 0})
        yield f'<line x1="{x}" y1="{BOTTOM}" x2="{x}" y2="{BOTTOM + 5}"/>'
        yield f'<text x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{gib}</text>'


def ticks_up(axes: Axes) -> Iterator[str]:
    """A mark for every fifth of the forward pass."""
    for share in range(0, int(100 * axes.most / axes.forward) + 1, 20):
        flops = share / 100 * axes.forward
        _, y = axes.at({"peak_bytes": axes.low, "recompute_flops": flops})
        yield f'<line x1="{LEFT - 5}" y1="{y}" x2="{LEFT}" y2="{y}"/>'
        yield f'<text x="{LEFT - 9}" y="{y + 4}" text-anchor="end">{share}</text>'


def label_heights(at: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Where labels stand: one below the other, and above the axis near it."""
    heights: dict[str, int] = {}
    last = 0
    for name in sorted(at, key=lambda n: at[n][::-1]):
        if at[name][1] <= BOTTOM - LOW:
            heights[name] = last = max(at[name][1], last + LINE)
    for name in sorted(at, key=lambda n: at[n]):
        x, y = at[name]
        if y > BOTTOM - LOW:
            below = [h for n, h in heights.items() if 0 <= x - at[n][0] < WIDTH]
            heights[name] = min([y, *(h for h in below if h > BOTTOM - 100)]) - LINE
    return heights


def picture(cell: Mapping[str, Any]) -> str:
    """The SVG, in light and dark."""
    axes = Axes(cell)
    named, points = compiled(cell["named"]), planned(cell)
    line = undominated([*points, *named.values()])
    marks = [
        f'<circle cx="{x}" cy="{y}" r="4" class="plan"/>'
        for x, y in map(axes.at, undominated(points))
    ]
    at = {name: axes.at(one) for name, one in named.items()}
    for name, height in label_heights(at).items():
        x, y = at[name]
        marks.append(
            f'<rect x="{x - 3}" y="{y - 3}" width="6" height="6" class="named"/>'
            f'<line x1="{x}" y1="{y}" x2="{x + 12}" y2="{height}"/>'
            f'<text x="{x + 14}" y="{height + 4}">{html.escape(name)}</text>'
        )
    marks += [*ticks_along(axes), *ticks_up(axes)]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 400" role="img">
<title>{cell["model"]} on {cell["target"]}: plans (dots), policies (squares)</title>
<style>text{{font:11px sans-serif;fill:#444}}.named{{fill:#4c78a8}}.plan{{fill:#e45756}}
.curve{{fill:none;stroke:#e45756;stroke-width:1.5}}line{{stroke:#999}}
@media(prefers-color-scheme:dark){{text{{fill:#ccc}}}}</style>
<line x1="{LEFT}" y1="{BOTTOM}" x2="{RIGHT}" y2="{BOTTOM}"/>
<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{BOTTOM}"/>
<path d="{steps(axes, line)}" class="curve"/>
<text x="330" y="{BOTTOM + 38}">compiled peak, GiB</text>
<text x="18" y="330" transform="rotate(-90 18 330)">recomputed, % of the
forward pass</text>
{"".join(marks)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--target", default="h100")
    given = parser.parse_args()
    cell = json.loads((RESULTS / f"{given.model}-{given.target}.json").read_text())
    path = DOCS / f"frontier_{given.model}_{given.target}.svg"
    write_text(path, picture(cell))
    print(path)


if __name__ == "__main__":
    main()
