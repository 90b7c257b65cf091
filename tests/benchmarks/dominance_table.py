"""Which points of a frontier hold against which policies, and the Markdown of it."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
"""`peak_bytes`, `recompute_flops` and `estimated_step_s`, all compiled."""


def axes(one: Figures) -> tuple[float, float, float]:
    """What is compared: peak, FLOPs computed twice, estimated time."""
    return one["peak_bytes"], one["recompute_flops"], one["estimated_step_s"]


EQUAL_PEAK = 1e-5
"""Peaks that differ by a smaller share are equal: some hundred bytes of scratch."""


def holds(one: Figures, against: Figures) -> bool:
    """Whether a point is no worse than a policy in all three."""
    (peak, *ours), (most, *theirs) = axes(one), axes(against)
    no_more = all(a <= b for a, b in zip(ours, theirs, strict=True))
    return no_more and peak <= (1 + EQUAL_PEAK) * most


def is_better(one: Figures, against: Figures) -> bool:
    """Whether it is no worse in all, and better in one."""
    (peak, *ours), (most, *theirs) = axes(one), axes(against)
    better = ours != theirs or peak < (1 - EQUAL_PEAK) * most
    return holds(one, against) and better


def compiled(figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """Those that compiled."""
    return {name: one for name, one in figures.items() if "failed" not in one}


def champion(points: Mapping[str, Figures], policy: Figures) -> Figures:
    """The fastest of the points that beat a policy; where none does, itself."""
    better = [p for p in compiled(points).values() if is_better(p, policy)]
    return min(better, key=lambda p: p["estimated_step_s"], default=policy)


def verdict(one: Figures, policy: Figures) -> str:
    """A word for the table."""
    if not holds(one, policy):
        return "no"
    return "better" if is_better(one, policy) else "equal"


def markdown(cells: Sequence[Mapping[str, Any]]) -> str:
    """The results of all cells as a Markdown page."""
    lines = [
        "# Plans against named policies",
        "",
        "Made by `python -m tests.benchmarks.dominance`. All figures are compiled: the "
        "peak in MiB, GFLOP computed twice (counted from the jaxpr), estimated ms of a "
        "step (roofline of the compiled program). A policy is held against at most ten "
        "points of the planner's frontier, and is a candidate itself; where there is a "
        'plan, it had the policy\'s peak for its budget. "better": no worse in all '
        'three figures and better in one; "equal": the same in all three. Peaks within '
        "0.001 % (some hundred bytes of scratch space) count as equal.",
        "",
        *_summary(cells),
    ]
    for cell in cells:
        if cell["points"]:
            lines += ["", f"## {cell['model']} on {_place(cell)}", "", *_rows(cell)]
        else:
            lines += ["", f"{cell['model']} on {cell['target']}: not finished."]
    return "\n".join(lines) + "\n"


def _place(cell: Mapping[str, Any]) -> str:
    """The devices, and how the model differs from its preset there."""
    sizes = ", ".join(f"{k}={v}" for k, v in cell.get("sizes", {}).items())
    place = cell.get("place", cell["target"])
    return f"{place} ({sizes})" if sizes else place


def _summary(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| model | target | policies | points | better | equal | plans: better | "
        "equal | no | compiles | first prediction off |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        if not cell["points"]:
            continue
        named = compiled(cell["named"])
        points, plans = compiled(cell["points"]), cell["plans"]
        found = [verdict(champion(points, one), one) for one in named.values()]
        planned = [verdict(plans[name], named[name]) for name in plans]
        counts: list[Any] = [found.count(word) for word in ("better", "equal")]
        for word in ("better", "equal", "no"):
            counts.append(planned.count(word) if plans else "–")
        compiles = [plan["n_compiles"] for plan in plans.values()]
        most = f"{min(compiles)}-{max(compiles)}" if compiles else "–"
        row = [cell["model"], cell["target"], len(named), len(points), *counts, most]
        row.append(_first_errors(plans.values()))
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines


def _first_errors(plans: Iterable[Mapping[str, Any]]) -> str:
    """How far off the peaks of the first solved points were: the middle, the most."""
    errors = [abs(plan["first_prediction_error"] or 0.0) for plan in plans]
    if not errors:
        return "–"
    return f"{statistics.median(errors):.1%}, at most {max(errors):.1%}"


def _rows(cell: Mapping[str, Any]) -> list[str]:
    lines = [
        "| policy | peak | again | ms | point: peak | again | ms | | plan: peak | "
        "again | ms | |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|---|",
    ]
    named = compiled(cell["named"])
    for name in sorted(named, key=lambda n: axes(named[n])):
        policy = named[name]
        point = champion(cell["points"], policy)
        plan = cell["plans"].get(name)
        columns = [name, *_figures(policy), *_figures(point), verdict(point, policy)]
        columns += [*_figures(plan), "" if plan is None else verdict(plan, policy)]
        lines.append("| " + " | ".join(columns) + " |")
    for name, failed in cell["named"].items():
        if "failed" in failed:
            lines.append(f"| {name} | does not compile: {failed['failed'][:60]} |")
    return lines


def _figures(one: Figures | None) -> list[str]:
    if one is None:
        return ["–", "–", "–"]
    peak, flops, seconds = axes(one)
    return [f"{peak / 2**20:.1f}", f"{flops / 1e9:.1f}", f"{1e3 * seconds:.2f}"]
