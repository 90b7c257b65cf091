"""A plan as terminal tables and as HTML."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat._plan._match import RegionRecord
from remat._plan._plan_file import Kept, Plan, PlanChoice
from remat._sizes import format_bytes, format_count, format_flop, format_seconds
from remat._targets._target import TargetError, target

MAX_VALUES = 24
"""Values of a choice that a table lists; a sum stands for the rest."""
MAX_NAMED = 8
"""Named policies listed on either side of the plan."""


def plan_tables(plan: Plan) -> RenderableType:
    """The plan for a rich console."""
    parts: list[RenderableType] = [Text(_title(plan), style="bold")]
    parts += [_choice_table(plan, choice) for choice in plan.choices]
    parts += [_named_table(plan), Text("\n".join(summary(plan)))]
    return Group(*parts)


def plan_text(plan: Plan, width: int = 120) -> str:
    """The tables as plain text."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(plan_tables(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def plan_html(plan: Plan) -> str:
    """The plan as HTML that a notebook shows."""
    parts = [f"<p><b>{html.escape(_title(plan))}</b></p>"]
    for choice in plan.choices:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"
            for cells in map(_cells, choice.kept)
        )
        head = "".join(f"<th>{column}</th>" for column in COLUMNS)
        caption = html.escape(_choice_title(plan, choice))
        parts.append(
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    lines = "<br>".join(map(html.escape, summary(plan)))
    return "".join(parts) + f"<p><small>{lines}</small></p>"


def summary(plan: Plan) -> list[str]:
    """The figures, a line each."""
    share = plan.recompute_flops / plan.forward_flops if plan.forward_flops else 0.0
    used = plan.peak_bytes / plan.budget_bytes
    lines = [
        f"peak {format_bytes(plan.peak_bytes)} compiled "
        f"({format_bytes(plan.predicted_peak_bytes)} predicted), {100 * used:.1f} % of "
        f"the budget of {format_bytes(plan.budget_bytes)}",
        f"recomputes {100 * share:.1f} % of the forward pass "
        f"({format_flop(plan.recompute_flops)})" + _step(plan),
        f"{plan.n_compiles} compiles" + _prediction(plan) + _missed(plan),
    ]
    if plan.host_bytes:
        lines.append(_host(plan))
    if plan.limited_peak_bytes is not None:
        peak = format_bytes(plan.limited_peak_bytes)
        lines.append(f"peak {peak} where the compiler is limited to the budget")
    if plan.origin == "none":
        lines.append("everything fits: the regions are removed")
    elif plan.origin != "solved":
        lines.append(f"the choice is that of {plan.origin}")
    if plan.target.startswith("cpu"):
        lines.append("compiled for the CPU; a TPU or GPU may rank choices otherwise")
    return [*lines, *plan.notes]


def _host(plan: Plan) -> str:
    """What is on the host, and whether moving it hides behind the step's compute."""
    line = f"host {format_bytes(plan.host_bytes)}"
    moved = sum(
        n * choice.host_bytes
        for choice in plan.choices
        for region in plan.regions
        for name, n in region.runs.items()
        if name == choice.name
    )
    try:
        link = target(plan.target).host_link_bytes_s
    except TargetError:  # a plan of a device that this version does not know
        return line
    if not moved or not link or plan.estimated_step_s is None:
        return line
    both_ways_s = 2 * moved / link
    fits = "within" if both_ways_s <= plan.estimated_step_s else "more than"
    return (
        f"{line}; there and back takes {format_seconds(both_ways_s)} of the link to "
        f"the host, {fits} the step's {format_seconds(plan.estimated_step_s)}"
    )


COLUMNS = ("value", "decision", "size a run", "or else again", "shape", "line")


def _title(plan: Plan) -> str:
    return f"plan for {plan.model} on {plan.target}"


def _choice_title(plan: Plan, choice: PlanChoice) -> str:
    regions = [region for region in plan.regions if choice.name in region.choices]
    runs = sum(region.runs[choice.name] for region in regions)
    where = _listed(dict.fromkeys(_place(region, choice.name) for region in regions))
    time = format_seconds(choice.recompute_s)
    host = f" + {format_bytes(choice.host_bytes)} on the host"
    return (
        f"{choice.name}: {where} ({runs} runs); each keeps {format_bytes(choice.bytes)}"
        + (host if choice.host_bytes else "")
        + f", recomputes {format_flop(choice.recompute_flops)} in {time}"
    )


def _place(region: RegionRecord, choice: str) -> str:
    """A region's path, and which of its layers take a choice, counted from 0."""
    if len(region.choices) == 1:
        return region.path
    layers = [i for i, name in enumerate(region.choices) if name == choice]
    runs = [
        [i for _, i in run]
        for _, run in itertools.groupby(
            enumerate(layers), lambda pair: pair[1] - pair[0]
        )
    ]
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{region.path}[{','.join(spans)}]"


def _choice_table(plan: Plan, choice: PlanChoice) -> Table:
    table = Table(
        title=_choice_title(plan, choice),
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1),
    )
    for i, column in enumerate(COLUMNS):
        justify = "right" if i in (2, 3) else "left"
        table.add_column(column, justify=justify, no_wrap=i < 4)
    for kept in choice.kept[:MAX_VALUES]:
        table.add_row(*_cells(kept))
    rest = choice.kept[MAX_VALUES:]
    if rest:
        size = format_bytes(sum(kept.bytes for kept in rest))
        table.add_row(f"and {len(rest)} more", "", size, "", "", "")
    last = "everything, nothing is recomputed" if choice.removed else "everything else"
    table.add_row(last, "save" if choice.removed else "recompute", "", "", "", "")
    return table


def _cells(kept: Kept) -> tuple[str, ...]:
    name = kept.checkpoint_name or kept.id
    shape = f"{kept.dtype}[{','.join(map(str, kept.shape))}]"
    size = format_bytes(kept.bytes)
    return name, kept.decision, size, _spared(kept), shape, kept.source or ""


def _spared(kept: Kept) -> str:
    """What would run again if the value were not kept."""
    if kept.spares_flops is None or kept.spares_s is None:
        return ""
    time = format_seconds(kept.spares_s)
    return f"{format_flop(kept.spares_flops)}, {time}"


def _named_table(plan: Plan) -> Table:
    table = Table(
        title="beside the named policies, by the model",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1),
    )
    table.add_column("policy")
    for column in ("peak", "host", "recompute", "its time"):
        table.add_column(column, justify="right", no_wrap=True)
    ours = _recompute_s(plan)
    rows = [
        (
            ours,
            _listed_policies(["this plan"]),
            format_bytes(plan.peak_bytes),
            format_bytes(plan.host_bytes) if plan.host_bytes else "–",
            _share(plan, plan.recompute_flops),
        )
    ]
    for named in plan.named:
        rows.append(
            (
                named.recompute_s,
                _listed_policies(named.policies),
                "~ " + format_bytes(named.predicted_peak_bytes),
                format_bytes(named.host_bytes) if named.host_bytes else "–",
                _share(plan, named.recompute_flops),
            )
        )
    rows.sort(key=lambda row: row[0])
    for seconds, policy, *cells in rows:
        style = "bold green" if policy == "this plan" else None
        table.add_row(policy, *cells, format_seconds(seconds), style=style)
    return table


def _recompute_s(plan: Plan) -> float:
    seconds = {choice.name: choice.recompute_s for choice in plan.choices}
    return sum(
        n * seconds[name] for region in plan.regions for name, n in region.runs.items()
    )


def _share(plan: Plan, flops: float) -> str:
    if not plan.forward_flops:
        return format_count(flops)
    return f"{100 * flops / plan.forward_flops:.1f} % fwd"


def _listed_policies(names: Iterable[str]) -> str:
    return _listed(sorted(names, key=lambda name: ("_" in name, len(name))), most=2)


def _listed(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _step(plan: Plan) -> str:
    if plan.estimated_step_s is None:
        return ""
    return f", step {format_seconds(plan.estimated_step_s)} (estimate)"


def _prediction(plan: Plan) -> str:
    if plan.first_prediction_error is None:
        return ""
    error = 100 * plan.first_prediction_error
    return f", first prediction {error:+.1f} % off"


def _missed(plan: Plan) -> str:
    """The least step that was seen not to fit."""
    over = [trial for trial in plan.trials if not trial.fits]
    if not over:
        return ""
    least = min(over, key=lambda trial: trial.peak_bytes)
    return f"; the least that did not fit takes {format_bytes(least.peak_bytes)}"
