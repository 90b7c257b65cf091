"""From what the closed loop found to a plan."""

import dataclasses
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from remat._compare._comparison import versions
from remat._naming._labels import Label
from remat._plan._apply import table_of
from remat._plan._by_name import names_suffice
from remat._plan._kinds import Kind, by_kind_sum, by_layer
from remat._plan._loop import ClosedLoop
from remat._plan._match import ProgramRecord, RegionRecord
from remat._plan._meter import Measured, seconds_or_none
from remat._plan._plan_file import (
    Kept,
    NamedFigures,
    Plan,
    PlanChoice,
    Trial,
    policy_of,
)
from remat._plan._solve import Choice, evaluate
from remat._plan._steer import predict_peak
from remat._regions._region import Region

N_SPARED = 24
"""Values of a choice of which it is said what keeping them spares, the largest."""


def make_plan(
    loop: ClosedLoop,
    best: Measured,
    regions: Sequence[Region],
    left: Mapping[int, str],
    *,
    budget_bytes: int,
    base_flops: int,
    forward_flops: int,
    limited_peak_bytes: int | None,
    about: Mapping[str, Any],
) -> Plan:
    """The plan of the best candidate.

    Args:
        loop: The search, ended.
        best: Its best candidate.
        regions: All regions of the loss.
        left: Why some outer regions stay as they are, by index.
        budget_bytes: What was asked for.
        base_flops: FLOPs of the step without regions.
        forward_flops: FLOPs of the forward pass.
        limited_peak_bytes: Peak with the compiler's limit at the budget, if compiled.
        about: The other fields: model, options.
    """
    report = best.report
    names, choices = _choices(loop.kinds, best)
    measured = loop.meter.measured
    solved = next((m for m in measured if m.predicted_peak_bytes is not None), None)
    by_label = {m.candidate.label: m.peak_bytes for m in measured}
    least = min(measured, key=lambda m: m.candidate.allotment.bytes)
    return Plan(
        **about,
        target=loop.meter.setup.target.name,
        budget_bytes=budget_bytes,
        peak_bytes=report.peak_bytes,
        predicted_peak_bytes=_or(best.predicted_peak_bytes, report.peak_bytes),
        first_prediction_error=None if solved is None else _error(solved),
        least_peak_bytes=least.peak_bytes,
        everything_peak_bytes=by_label.get("none"),
        host_bytes=report.host_bytes,
        recompute_flops=max(best.flops - base_flops, 0),
        forward_flops=forward_flops,
        estimated_step_s=seconds_or_none(report.estimated_step_s),
        n_compiles=loop.meter.n_full,
        origin=best.candidate.label,
        regions=tuple(
            _record(region, names.get(region.index, ()), left.get(region.index, ""))
            for region in regions
            if region.depth == 0
        ),
        choices=choices,
        programs=_programs(regions),
        named=_named(loop),
        trials=tuple(_trial(loop, m) for m in measured),
        limit_bytes=loop.meter.limit_bytes,
        limited_peak_bytes=limited_peak_bytes,
        notes=(*loop.notes, *_notes(regions, left)),
        versions=versions(),
        command=" ".join(["remat", *map(shlex.quote, sys.argv[1:])])
        if sys.argv and sys.argv[0].endswith("remat")
        else "remat.plan(...)",
    )


def _choices(
    kinds: Sequence[Kind], best: Measured
) -> tuple[dict[int, tuple[str, ...]], tuple[PlanChoice, ...]]:
    """The choices, named, and which region, or layer of it, takes which."""
    kind_of = {region.index: kind for kind in kinds for region in kind.regions}
    names: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[int, Choice], PlanChoice] = {}
    for index, choices in by_layer(kinds, best.candidate.allotment).items():
        kind = kind_of[index]
        for choice in dict.fromkeys(choices):
            key = (id(kind), choice)
            if key not in found:
                name = _letter(len(found))
                found[key] = _choice(name, choice, kind, best.candidate.removes)
        taken = tuple(found[id(kind), choice].name for choice in choices)
        names[index] = taken[:1] if len(set(taken)) == 1 else taken
    return names, tuple(found.values())


def _letter(n: int) -> str:
    letters = string.ascii_uppercase
    return letters[n] if n < len(letters) else f"{letters[n % 26]}{n // 26}"


def _choice(name: str, choice: Choice, kind: Kind, removed: bool) -> PlanChoice:
    graph = kind.graph
    sizes = {value.id: value.bytes for value in graph.values if value.id}
    kept = [
        _kept(graph.labels[id_], decision, sizes[id_])
        for decision, ids in (("save", choice.saved), ("offload", choice.offloaded))
        for id_ in ids
        if not removed
    ]
    kept.sort(key=lambda one: (-one.bytes, one.id))
    kept[:N_SPARED] = [_with_spared(one, choice, kind) for one in kept[:N_SPARED]]
    return PlanChoice(
        name=name,
        removed=removed,
        kept=tuple(kept),
        names_suffice=removed or _names_suffice(kept, choice, kind),
        bytes=choice.bytes,
        host_bytes=choice.host_bytes,
        recompute_flops=int(choice.recompute_flops),
        recompute_s=choice.recompute_s,
    )


def _with_spared(kept: Kept, choice: Choice, kind: Kind) -> Kept:
    """With what one run would do twice as well if this value alone were not kept."""
    without = evaluate(
        kind.graph,
        kind.prices,
        choice.saved - {kept.id},
        choice.offloaded - {kept.id},
    )
    return dataclasses.replace(
        kept,
        spares_flops=max(int(without.recompute_flops - choice.recompute_flops), 0),
        spares_s=max(without.recompute_s - choice.recompute_s, 0.0),
    )


def _names_suffice(kept: Sequence[Kept], choice: Choice, kind: Kind) -> bool:
    if not all(one.checkpoint_name for one in kept):
        return False
    jaxpr = kind.regions[0].jaxpr
    return names_suffice(jaxpr, table_of(choice), policy_of(kept))


def _kept(label: Label, decision: str, n_bytes: int) -> Kept:
    return Kept(
        id=label.id,
        decision=decision,
        bytes=n_bytes,
        module_path=label.module_path,
        primitive=label.primitive,
        checkpoint_name=label.checkpoint_name,
        shape=tuple(label.shape),
        dtype=str(label.dtype),
        source=label.source,
    )


def _record(region: Region, choices: tuple[str, ...], note: str) -> RegionRecord:
    return RegionRecord(
        path=region.path,
        fingerprint=region.fingerprint,
        times=region.times,
        context=region.context,
        choices=choices,
        note=note,
    )


def _programs(regions: Sequence[Region]) -> tuple[ProgramRecord, ...]:
    distinct = {region.fingerprint: region for region in regions if region.depth == 0}
    return tuple(map(ProgramRecord.of, distinct.values()))


def _named(loop: ClosedLoop) -> tuple[NamedFigures, ...]:
    samples = [measured.sample for measured in loop.meter.measured]
    figures = [
        NamedFigures(
            policies=named.names,
            predicted_peak_bytes=round(predict_peak(samples, named.allotment.bytes)),
            host_bytes=named.allotment.host_bytes,
            recompute_flops=int(
                by_kind_sum(loop.kinds, named.allotment, "recompute_flops")
            ),
            recompute_s=by_kind_sum(loop.kinds, named.allotment, "recompute_s"),
        )
        for named in loop.named()
    ]
    return tuple(sorted(figures, key=lambda f: (f.recompute_s, f.predicted_peak_bytes)))


def _trial(loop: ClosedLoop, measured: Measured) -> Trial:
    return Trial(
        label=measured.candidate.label,
        kept_bytes=measured.candidate.allotment.bytes,
        predicted_peak_bytes=measured.predicted_peak_bytes,
        peak_bytes=measured.peak_bytes,
        fits=loop.fits(measured),
    )


def _notes(regions: Sequence[Region], left: Mapping[int, str]) -> list[str]:
    paths = {region.index: region.path for region in regions}
    reasons: dict[str, list[str]] = {}
    for index, reason in left.items():
        reasons.setdefault(reason, []).append(paths[index])
    return [
        f"{', '.join(dict.fromkeys(where))}: left with its own policy, since {reason}"
        for reason, where in reasons.items()
    ]


def _error(measured: Measured) -> float:
    assert measured.predicted_peak_bytes is not None
    return measured.predicted_peak_bytes / measured.peak_bytes - 1


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
