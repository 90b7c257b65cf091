"""Compare policies on one loss for one target, from compiled programs.

Every policy is traced (that gives the exact FLOPs), lowered, and compiled for the
target, two at a time; programs that are equal are compiled once, and answers are kept
on disk. Where the target is a TPU, a probe that stops after buffer assignment gives a
floor in a fraction of a second; rows that could matter are then compiled in full under
the device's real limit, because the compiler uses the memory it is given and only that
compile says what a run will use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat._compare._candidates import labelled_policies, lintable
from remat._compare._comparison import Comparison, advise, best_row, versions
from remat._compare._findings import findings_of
from remat._compare._measure import Setup
from remat._compare._session import Progress, Session
from remat._regions._make_regions import Wanted, checked_regions, made_first
from remat._sizes import parse_bytes
from remat._targets._target import Target


def compare(
    loss: Callable[..., Any],
    *args: Any,
    policies: Sequence[Any] | Mapping[str, Any] | None = None,
    target: Target | str | None = None,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    budget: int | str | None = None,
    regions: Wanted | None = None,
    exact: bool = False,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    compiler_options: Mapping[str, Any] | None = None,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compiles a training step under several policies and says which one to use.

    Args:
        loss: `loss(*args, **kwargs) -> scalar`; its `jax.checkpoint` regions (which
            `nn.remat`, `nnx.remat` and the like make) get each policy in turn.
        *args: Arrays or `jax.ShapeDtypeStruct`s (with shardings, for a mesh), or
            pytrees of them. Nothing is allocated for shapes.
        policies: Names, policies, JAX callables, plans or their files
            (`"plan.json"`); a mapping gives them labels. The default is a set of
            fourteen. `"none"` removes the regions, and `"nothing + sqrt"` also cuts
            the scans by `remat.segment_scans`.
        target: `"v5e"`, `"h100"`, ...; None for the attached default device.
        optimizer: An optax optimizer whose update is part of the step.
        step: `step(loss)` returns the whole step, instead of the default one.
        budget: Device memory the step may use (`"12GiB"`); default the target's.
        regions: Regions to make first, in code that has none: `"scan"`, a pattern of
            module paths such as `"Block_*"`, or a list of these, as
            `remat.with_regions` takes them.
        exact: Compile every row in full, also where a TPU probe would do.
        has_aux: As in `jax.value_and_grad`.
        argnums: As in `jax.value_and_grad`.
        compiler_options: XLA options for every compile.
        model: What the comparison is of, for its title.
        options: Further facts to record with the result.
        on_progress: Called with a line of text as the work goes on.
        **kwargs: Keyword arguments of the loss.

    Returns:
        A row per policy, the recommended one, and a sentence that says why. Shows
        itself as a table in a notebook and when printed.

    Raises:
        ValueError: For an unknown policy or target, a budget that is no size, or a
            loss without regions.
    """
    name = getattr(loss, "__qualname__", type(loss).__name__)
    loss = made_first(loss, regions)
    setup = Setup.of(
        target,
        args,
        kwargs,
        compiler_options=compiler_options,
        optimizer=optimizer,
        step=step,
        has_aux=has_aux,
        argnums=argnums,
    )
    device = setup.target
    probe = device.kind == "tpu" and not exact
    limit = parse_bytes(budget) if budget is not None else device.available_bytes
    session = Session(setup, limit, on_progress or (lambda line: None))
    labelled = labelled_policies(policies)
    with session:
        session.start(loss, labelled, probe)
        # While the compilers are at work.
        findings = findings_of(loss, args, kwargs, lintable(labelled), device)
        rows = session.rows(probe)
    best = best_row(rows)
    return Comparison(
        model=model or name,
        target=device,
        budget_bytes=limit,
        rows=tuple(rows),
        best=best.policy if best else None,
        advice=advise(rows, device, limit),
        skipped=tuple(session.skipped),
        failed=tuple(session.failed),
        findings=findings,
        options={
            "optimizer": optimizer is not None,
            "exact": exact,
            "regions": None if regions is None else list(checked_regions(regions)),
            "compiler_options": dict(compiler_options or {}),
            **(options or {}),
        },
        versions=versions(),
        n_compiles=session.n_compiles,
    )
