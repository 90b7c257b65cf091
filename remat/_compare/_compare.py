"""Compare policies on one loss for one target, from compiled programs.

Every policy is traced (that gives the exact FLOPs), lowered, and compiled for the
target, two at a time; programs that are equal are compiled once, and answers are kept
on disk. Where the target is a TPU, a probe that stops after buffer assignment gives a
floor in a fraction of a second; rows that could matter are then compiled in full under
the device's real limit, because the compiler uses the memory it is given and only that
compile says what a run will use.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from remat import policies as catalogue
from remat._compare._comparison import (
    Comparison,
    Failure,
    Row,
    advise,
    best_row,
    versions,
)
from remat._compare._findings import findings_of
from remat._compare._measure import (
    Prepared,
    Setup,
    compiled_report,
    first_line,
    forward_flops,
    prepare,
)
from remat._compile._compile import CompileError
from remat._plan._plan_file import Plan
from remat._regions._make_regions import Wanted, checked_regions, made_first
from remat._regions._with_policy import NoNamesFound, with_policy
from remat._report._report import MemoryReport
from remat._scan._segment_scans import segment_scans
from remat._sizes import format_bytes, parse_bytes
from remat._targets._target import Target

DEFAULT_POLICIES = (
    "none",
    "save_dots",
    "save_dots_no_batch",
    "minimal",
    "minimal_with_context",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_qkv_proj",
    "save_out_proj",
    "nothing",
    "offload_dots",
    "offload_dots_no_batch",
    "qkv_proj_offloaded",
    "minimal_offloaded",
)
"""The rows of a comparison where nothing else is asked for."""

SEGMENTED = " + sqrt"
"""Ends a row's name whose scans are also cut by `remat.segment_scans`."""

FLOOR_MARGIN = 0.35
"""A floor this close below the limit does not settle whether the program fits."""

N_CANDIDATES = 3
"""Programs compiled in full because their floors make them likely to be the best."""

N_WORKERS = 2
"""Compiles that run side by side."""

Progress = Callable[[str], None]


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
    session = _Session(setup, limit, on_progress or (lambda line: None))
    labelled = _labelled(policies)
    with session:
        session.start(loss, labelled, probe)
        # While the compilers are at work.
        findings = findings_of(loss, args, kwargs, _lintable(labelled), device)
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


def _labelled(policies: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    if policies is None:
        policies = DEFAULT_POLICIES
    if isinstance(policies, str):
        policies = (policies,)
    if isinstance(policies, Mapping):
        given = list(policies.items())
    else:
        given = [(None, policy) for policy in policies]
    if not given:
        raise ValueError("policies is empty; name at least one, such as 'nothing'")
    labelled: dict[str, Any] = {}
    for label, policy in given:
        if isinstance(policy, str) and policy.endswith(".json"):
            label, policy = label or policy, Plan.load(policy)
        if isinstance(policy, Plan):
            labelled.setdefault(label or "plan", policy)
            continue
        if isinstance(policy, str) and policy.endswith(SEGMENTED):
            cut = _Segmented(catalogue.as_policy(policy.removesuffix(SEGMENTED)))
            labelled.setdefault(label or policy, cut)
            continue
        resolved = catalogue.as_policy(policy)
        labelled.setdefault(label or resolved.name, resolved)
    return labelled


@dataclasses.dataclass(frozen=True, slots=True)
class _Segmented:
    """A policy, and every scan of the loss cut into sqrt(N) segments."""

    policy: catalogue.Policy


def _applied(loss: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    if isinstance(policy, Plan):
        return policy.apply(loss)
    if isinstance(policy, _Segmented):
        return segment_scans(with_policy(loss, policy.policy))
    return with_policy(loss, policy)


def _lintable(labelled: Mapping[str, Any]) -> dict[str, catalogue.Policy]:
    """The rows that are policies; a plan was linted when it was made."""
    return {
        label: one.policy if isinstance(one, _Segmented) else one
        for label, one in labelled.items()
        if not isinstance(one, Plan)
    }


class _Session:
    """One comparison under way: what its rows share.

    Compiles run in threads (XLA releases the interpreter lock); tracing and lowering
    hold it, so they stay on the calling thread.
    """

    def __init__(self, setup: Setup, limit_bytes: int, say: Progress) -> None:
        self.setup = setup
        self.limit_bytes = limit_bytes
        self.say = say
        self.n_compiles = 0
        self.pool = ThreadPoolExecutor(N_WORKERS)
        self.answers: dict[tuple[str, bool], Future[MemoryReport]] = {}
        self.prepared: dict[str, Prepared] = {}
        self.skipped: list[Failure] = []
        self.failed: list[Failure] = []

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        # On an error or Ctrl-C nobody will read what is still queued.
        self.pool.shutdown(wait=False, cancel_futures=True)

    def start(
        self, loss: Callable[..., Any], policies: Mapping[str, Any], probe: bool
    ) -> None:
        """Traces and lowers every row, and sends it to be compiled."""
        unwrapped = with_policy(loss, "none")
        self.say("tracing the step without remat")
        self.base_flops = prepare(unwrapped, self.setup).flops
        self.forward_flops = forward_flops(unwrapped, self.setup)
        for label, policy in policies.items():
            self.say(f"lowering {label}")
            try:
                self.prepared[label] = prepare(_applied(loss, policy), self.setup)
            except NoNamesFound as error:
                self.skipped.append(Failure(policy=label, reason=first_line(error)))
                continue
            self._submit(label, probe)

    def rows(self, probe: bool) -> list[Row]:
        """The rows in the order asked for, once they are compiled."""
        rows = {label: self._row(label, probe) for label in self.prepared}
        if probe:
            self._compile_what_matters(rows)
        return [row for row in rows.values() if row is not None]

    def _submit(self, label: str, probe: bool) -> Future[MemoryReport]:
        one = self.prepared[label]
        if (one.key, probe) not in self.answers:
            self.answers[one.key, probe] = self.pool.submit(
                compiled_report,
                one,
                self.setup,
                probe=probe,
                on_compile=lambda: self._compiling(label, probe),
            )
        return self.answers[one.key, probe]

    def _compiling(self, label: str, probe: bool) -> None:
        self.say(f"{'probing' if probe else 'compiling'} {label}")
        self.n_compiles += not probe

    def _row(self, label: str, probe: bool, floor: int | None = None) -> Row | None:
        one = self.prepared[label]
        try:
            report = self._submit(label, probe).result()
        except CompileError as error:
            self.failed.append(Failure(policy=label, reason=first_line(error)))
            return None
        self.say(f"{label}: {format_bytes(report.peak_bytes)}")
        too_big = report.peak_bytes > self.limit_bytes
        fits = False if too_big else None if probe else report.fits
        notes = list(one.warnings)
        if fits is False:
            needs, of = format_bytes(report.peak_bytes), format_bytes(self.limit_bytes)
            notes.insert(0, f"needs {needs} of {of}")
        return Row(
            policy=label,
            fits=fits,
            floor_bytes=report.peak_bytes if probe else floor,
            flops=one.flops,
            recompute_flops=one.flops - self.base_flops,
            forward_flops=self.forward_flops,
            estimated_step_s=_known(report.estimated_step_s),
            exact=not probe,
            note="; ".join(notes),
            missing_names=one.missing_names,
            report=report,
            **{name: getattr(report, name) for name in _SHARED},
        )

    def _compile_what_matters(self, rows: dict[str, Row | None]) -> None:
        """Full compiles where a floor settles nothing, and of what could be best."""
        floors = {label: row for label, row in rows.items() if row is not None}
        threshold = (1 - FLOOR_MARGIN) * self.limit_bytes
        wanted = [
            label
            for label, row in floors.items()
            # Savings are against `none`, so that one has to be right.
            if row.peak_bytes >= threshold or label == "none"
        ]
        hopeful = [row for row in floors.values() if row.fits is not False]
        hopeful.sort(key=lambda row: (row.estimated_step_s or 0.0, row.peak_bytes))
        wanted += self._first_programs(hopeful, wanted)
        for label in wanted:
            self._submit(label, probe=False)
        for label in wanted:
            rows[label] = self._row(label, False, floors[label].floor_bytes)
        _calibrate(rows, floors)

    def _first_programs(self, rows: Sequence[Row], known: Sequence[str]) -> list[str]:
        """The rows of the first `N_CANDIDATES` programs that are not known yet."""
        seen = {self.prepared[label].key for label in known}
        limit = len(seen) + N_CANDIDATES
        found = []
        for row in rows:
            key = self.prepared[row.policy].key
            if row.policy not in known and (key in seen or len(seen) < limit):
                seen.add(key)
                found.append(row.policy)
        return found


_SHARED = (
    "peak_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "generated_code_bytes",
    "live_peak_bytes",
    "bytes_accessed",
)


def _calibrate(rows: dict[str, Row | None], floors: Mapping[str, Row]) -> None:
    """Puts the time estimates of floors on the scale of full compiles.

    A program squeezed to its floor is not the one that would run. The rows that were
    compiled in full tell by how much the estimates differ.
    """
    ratios = []
    for label, row in rows.items():
        full = row.estimated_step_s if row is not None and row.exact else None
        floor = floors[label].estimated_step_s if label in floors else None
        if full and floor:
            ratios.append(full / floor)
    if not ratios:
        return
    scale = statistics.median(ratios)
    for label, row in rows.items():
        if row is not None and not row.exact:
            time = floors[label].estimated_step_s
            rows[label] = dataclasses.replace(
                row, estimated_step_s=time and scale * time
            )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
