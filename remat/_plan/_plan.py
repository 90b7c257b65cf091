"""`remat.plan`: a budget in, the best choice for each region out, proven by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat._compare._measure import forward_flops, prepare
from remat._lint._lint import lint_program
from remat._lint._notes import notes_of
from remat._lint._program import Traced
from remat._plan._errors import PlanError
from remat._plan._loop import MAX_COMPILES, ClosedLoop
from remat._plan._make import make_plan
from remat._plan._meter import Measured
from remat._plan._named import named_candidates
from remat._plan._opened import name_of, open_loss
from remat._plan._plan_file import Plan
from remat._regions._make_regions import Wanted
from remat._regions._with_policy import with_policy, with_regions
from remat._sizes import parse_bytes
from remat._targets._target import Target


def plan(
    loss: Callable[..., Any],
    *args: Any,
    budget: int | str | None = None,
    target: Target | str | None = None,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    allow_offload: bool = True,
    regions: Wanted | None = None,
    headroom: float | str = "0%",
    compiler_options: Mapping[str, Any] | None = None,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Plan:
    """Chooses what each region keeps, so that a training step uses a budget well.

    For each region an integer program finds the set of values whose keeping spares
    most time. The choice is compiled, and corrected by what was measured, until the
    compiled peak is within the budget and close to it.

    Args:
        loss: `loss(*args, **kwargs) -> scalar` with `jax.checkpoint` regions in it.
        *args: Arrays or `jax.ShapeDtypeStruct`s (with shardings, for a mesh), or
            pytrees of them. Nothing is allocated for shapes.
        budget: Device memory the step may use (`"12GiB"`, or bytes); None for all that
            a program may use of the target.
        target: `"v5e"`, `"h100"`, ...; None for the attached default device.
        optimizer: An optax optimizer whose update is part of the step.
        step: `step(loss)` returns the whole step, instead of the default one.
        allow_offload: Whether values may move to host memory, as far as the link to
            the host is idle while the regions compute.
        regions: Regions to make first, in a loss that has none: `"scan"`, a pattern of
            module paths, or a list of these, as `remat.with_regions` takes them.
            `plan.apply` makes them too.
        headroom: Share of the budget to leave free: `"5%"` or 0.05.
        compiler_options: XLA options for every compile.
        has_aux: As in `jax.value_and_grad`.
        argnums: As in `jax.value_and_grad`.
        model: What the plan is for; `remat check` loads it by this name.
        options: Further facts to record.
        on_progress: Called with a line of text as the work goes on.
        **kwargs: Keyword arguments of the loss.

    Returns:
        The plan. `plan.apply(loss)` puts it to work, `plan.save("plan.json")` keeps
        it, and `print(plan)` shows it.

    Raises:
        PlanError: Even the least choice needs more than the budget, or no region can
            be planned.
        ValueError: For an unknown target, a budget that is no size, or a loss without
            regions.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)))
        >>> loss = lambda w, x: layer(layer(x, w), w).sum()
        >>> found = remat.plan(loss, jnp.eye(8), jnp.ones((4, 8)), target="cpu")
        >>> found.peak_bytes <= found.budget_bytes
        True
    """
    free = parse_share(headroom, "headroom")
    size = parse_bytes(budget) if budget is not None else None
    name = name_of(loss)
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
    available = opened.target.available_bytes
    limit = available if size is None else size
    usable = int(limit * (1 - free))
    loop = ClosedLoop(
        opened.meter,
        opened.kinds,
        usable,
        whole_device=usable >= available,
        named=functools.cache(lambda: named_candidates(opened.kinds)),
    )
    best = loop.run()
    unwrapped = with_policy(loss, "none")
    setup = opened.meter.setup
    made = make_plan(
        loop,
        best,
        opened.regions,
        opened.left,
        budget_bytes=limit,
        base_flops=prepare(unwrapped, setup).flops,
        forward_flops=forward_flops(unwrapped, setup),
        limited_peak_bytes=_limited_peak(loop, best),
        about={
            "model": model or name,
            "options": {
                "optimizer": optimizer is not None,
                "allow_offload": allow_offload,
                "headroom": headroom,
                "regions": _listed(regions),
                "compiler_options": dict(compiler_options or {}),
                **(options or {}),
            },
        },
    )
    return dataclasses.replace(
        made, notes=(*made.notes, *_lint_notes(made, loss, args, kwargs))
    )


_MEANT_BY_PLANS = frozenset({"saves-nothing", "saves-everything", "scores-dominate"})
"""Findings about what is kept: a plan has weighed that."""


def _lint_notes(
    made: Plan, loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """What lint says of the planned program, a line for each rule."""
    program = Traced.of(made.apply(loss), args, kwargs).under(None)
    found = [f for f in lint_program(program) if f.code not in _MEANT_BY_PLANS]
    return notes_of({"lint": found}, n_policies=1)


def _listed(regions: Wanted | None) -> list[str] | None:
    """What regions are made, as JSON holds it."""
    if regions is None:
        return None
    return [regions] if isinstance(regions, str) else list(regions)


def parse_share(share: float | str, what: str) -> float:
    """`"5%"` or 0.05 as 0.05.

    Raises:
        PlanError: It is neither, or not within 0 and 1.
    """
    text = str(share).strip()
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise PlanError(f'{what} is a share such as "5%" or 0.05, not {share!r}')
    return value


def _limited_peak(loop: ClosedLoop, best: Measured) -> int | None:
    """The peak when the TPU compiler may use the budget only, where that differs."""
    if not loop.is_tpu or loop.squeezed or loop.meter.n_full >= MAX_COMPILES:
        return None
    return loop.meter.within(best.candidate, loop.budget_bytes).peak_bytes
