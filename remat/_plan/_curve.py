"""`remat.frontier`: the least recompute at each peak, and where policies stand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat._compare._measure import forward_flops
from remat._files import write_text
from remat._plan._choose import Allotment
from remat._plan._errors import PlanError
from remat._plan._kinds import Kind, by_kind_sum, same, solve_all
from remat._plan._meter import Candidate, Meter
from remat._plan._named import named_candidates
from remat._plan._opened import name_of, open_loss
from remat._plan._solve import evaluate
from remat._plan._steer import Sample, predict_peak
from remat._regions._make_regions import Wanted
from remat._regions._with_policy import with_policy, with_regions
from remat._targets._target import Target

SCHEMA = "remat.frontier/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One choice for all regions."""

    policies: tuple[str, ...]
    """The named policies that choose this; empty for a point of the frontier."""
    predicted_peak_bytes: int
    """Peak by the line through the compiled points around."""
    peak_bytes: int | None
    """Compiled peak; None where it was not compiled."""
    kept_bytes: int
    """Kept on the device by all regions, by the model."""
    host_bytes: int
    """Moved to the host, by the model."""
    recompute_flops: int
    """Arithmetic done twice in a step."""
    recompute_s: float
    """Its time by the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Memory against recompute, for one step on one target."""

    model: str
    """What it is of."""
    target: str
    """The device."""
    forward_flops: int
    """FLOPs of the forward pass."""
    points: tuple[CurvePoint, ...]
    """Choices that no other one beats, least memory first."""
    named: tuple[CurvePoint, ...]
    """The named policies, those that keep the same together."""

    def to_dict(self) -> dict[str, Any]:
        """The curve as JSON-ready data."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self, path: str | Path | None = None) -> str:
        """The curve as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def plot(self) -> Any:
        """Recompute time against peak memory, as a plotly figure."""
        from remat._show.curve import curve_figure

        return curve_figure(self)

    def to_html(self) -> str:
        """The figure as HTML."""
        return self.plot().to_html(include_plotlyjs="cdn", full_html=False)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        """The points and policies as a terminal table."""
        from remat._show.curve import curve_text

        return curve_text(self)


def frontier(
    loss: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    n_points: int = 16,
    n_compiled: int = 2,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    allow_offload: bool = False,
    regions: Wanted | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    model: str | None = None,
    on_progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Curve:
    """The least recompute at each peak, and where the named policies stand.

    Args:
        loss: As for `remat.plan`, as are the other arguments not named here.
        *args: Arrays or shapes.
        target: `"v5e"`, `"h100"`, ...; None for the attached default device.
        n_points: Points of the curve, its ends included.
        n_compiled: How many of them are compiled, spread evenly; at least the two
            ends. The others are predicted from these.
        optimizer: An optax optimizer whose update is part of the step.
        step: `step(loss)` returns the whole step.
        allow_offload: Whether points may move values to the host.
        regions: Regions to make first, as for `remat.plan`.
        compiler_options: XLA options for every compile.
        has_aux: As in `jax.value_and_grad`.
        argnums: As in `jax.value_and_grad`.
        model: What the curve is of.
        on_progress: Called with a line of text as the work goes on.
        **kwargs: Keyword arguments of the loss.

    Returns:
        The curve, with `.plot()`.

    Raises:
        PlanError: Fewer than two points are asked for, or no region can be planned.
    """
    if n_points < 2 or not 2 <= n_compiled <= n_points:
        raise PlanError(
            "a curve has its two ends compiled: n_points and n_compiled are at least "
            f"2 and n_compiled at most n_points, not {n_points} and {n_compiled}"
        )
    name = model or name_of(loss)
    if regions is not None:
        loss = with_regions(loss, regions)
    opened = open_loss(
        loss,
        args,
        kwargs,
        target=target,
        optimizer=optimizer,
        step=step,
        has_aux=has_aux,
        argnums=argnums,
        compiler_options=compiler_options,
        allow_offload=allow_offload,
        say=on_progress or (lambda line: None),
    )
    points = _points(opened.kinds, n_points)
    peaks = _compiled(opened.meter, points, n_compiled)
    samples = [
        Sample(kept_bytes=points[i].bytes, peak_bytes=peak) for i, peak in peaks.items()
    ]

    def placed(one: Allotment, names: tuple[str, ...], peak: int | None) -> CurvePoint:
        return CurvePoint(
            policies=names,
            predicted_peak_bytes=round(predict_peak(samples, one.bytes)),
            peak_bytes=peak,
            kept_bytes=one.bytes,
            host_bytes=one.host_bytes,
            recompute_flops=int(by_kind_sum(opened.kinds, one, "recompute_flops")),
            recompute_s=by_kind_sum(opened.kinds, one, "recompute_s"),
        )

    unwrapped = with_policy(loss, "none")
    return Curve(
        model=name,
        target=opened.target.name,
        forward_flops=forward_flops(unwrapped, opened.meter.setup),
        points=tuple(placed(p, (), peaks.get(i)) for i, p in enumerate(points)),
        named=tuple(
            placed(named.allotment, named.names, None)
            for named in named_candidates(opened.kinds)
        ),
    )


def _points(kinds: Sequence[Kind], n: int) -> list[Allotment]:
    """Optima at evenly spread budgets, without those that are the same."""
    nothing = same(kinds, lambda k: evaluate(k.graph, k.prices, frozenset()))
    everything = same(kinds, lambda kind: kind.everything)
    budgets = [round(everything.bytes * i / (n - 1)) for i in range(1, n - 1)]
    between = [solve_all(kinds, budget) for budget in budgets]
    distinct = {p.bytes: p for p in (nothing, *between, everything)}
    return [distinct[kept] for kept in sorted(distinct)]


def _compiled(
    meter: Meter, points: Sequence[Allotment], n_compiled: int
) -> dict[int, int]:
    """Compiled peaks by position: the ends, and some between."""
    last = len(points) - 1
    spread = {round(last * i / (n_compiled - 1)) for i in range(n_compiled)}
    peaks: dict[int, int] = {}
    for i in sorted(spread):
        removes = i == last
        label = "none" if removes else f"point {i}"
        candidate = Candidate(label=label, allotment=points[i], removes=removes)
        (measured,) = meter.full((candidate, None))
        peaks[i] = measured.peak_bytes
    return peaks
