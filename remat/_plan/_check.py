"""Whether a plan still holds: compile its model again and hold it to the figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat._compare._measure import Setup, compiled_report, prepare
from remat._compile._compile import CompileError
from remat._plan._errors import PlanError
from remat._plan._plan import parse_share
from remat._plan._plan_file import Plan
from remat._sizes import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCheck:
    """A plan, compiled again."""

    model: str
    """What it is for."""
    target: str
    """The device."""
    budget_bytes: int
    """The plan's budget."""
    planned_peak_bytes: int
    """The peak that the plan states."""
    peak_bytes: int | None
    """The peak now; None where the plan cannot be applied or compiled."""
    ok: bool
    """Whether the peak is within the budget and near the plan's."""
    why: str
    """What is wrong, or that it holds."""

    def to_dict(self) -> dict[str, Any]:
        """The check as JSON-ready data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One line."""
        verdict = "ok" if self.ok else "FAILED"
        return f"{self.model} on {self.target}: {verdict}, {self.why}"


def check_plan(
    plan: Plan | str | Path,
    loss: Callable[..., Any] | None = None,
    *args: Any,
    tolerance: float | str = "2%",
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PlanCheck:
    """Compiles a planned step again and says whether the plan still holds.

    Args:
        plan: A plan or its file.
        loss: The loss as it is now; None loads the model that the plan names, with the
            settings that it records.
        *args: The loss's arguments.
        tolerance: How far the peak may drift from the plan's: `"2%"` or 0.02.
        optimizer: As for `plan`.
        step: As for `plan`.
        has_aux: As for `plan`.
        argnums: As for `plan`.
        compiler_options: Default: those of the plan.
        **kwargs: The loss's keyword arguments.

    Returns:
        The peak now, and whether it is within the budget and near the plan's. A model
        whose regions changed is no error: the check says so, and fails.

    Raises:
        PlanError: The file is no plan, or the model cannot be loaded.
    """
    drift = parse_share(tolerance, "tolerance")
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if compiler_options is None:
        compiler_options = plan.options.get("compiler_options", {})
    settings = {
        "optimizer": optimizer,
        "step": step,
        "has_aux": has_aux,
        "argnums": argnums,
    }
    if loss is None:
        loss, args, settings = _load(plan, settings)
    setup = Setup.of(
        plan.target, args, kwargs, compiler_options=compiler_options, **settings
    )
    try:
        prepared = prepare(plan.apply(loss), setup)
        report = compiled_report(prepared, setup, limit_bytes=plan.limit_bytes)
    except (PlanError, CompileError) as error:
        return _result(plan, None, False, str(error).partition("\n")[0])
    return _judged(plan, report.peak_bytes, drift)


def _judged(plan: Plan, peak_bytes: int, drift: float) -> PlanCheck:
    now = format_bytes(peak_bytes)
    if peak_bytes > plan.budget_bytes:
        of = format_bytes(plan.budget_bytes)
        return _result(
            plan, peak_bytes, False, f"peak {now} exceeds the budget of {of}"
        )
    change = peak_bytes / plan.peak_bytes - 1
    moved = f"{100 * change:+.2f} % from the plan's {format_bytes(plan.peak_bytes)}"
    if abs(change) > drift:
        why = f"peak {now} drifted by {moved}, more than {100 * drift:g} %"
        return _result(plan, peak_bytes, False, why)
    return _result(plan, peak_bytes, True, f"peak {now}, {moved}")


def _result(plan: Plan, peak: int | None, ok: bool, why: str) -> PlanCheck:
    return PlanCheck(
        model=plan.model,
        target=plan.target,
        budget_bytes=plan.budget_bytes,
        planned_peak_bytes=plan.peak_bytes,
        peak_bytes=peak,
        ok=ok,
        why=why,
    )


def _load(
    plan: Plan, settings: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The model that a plan names, with the settings that it records."""
    from remat._cli._load import load_model

    options = plan.options
    sizes = {name: options.get(name) for name in ("batch", "seq", "mesh")}
    try:
        loaded = load_model(plan.model, target=plan.target, **sizes)
    except ValueError as error:
        raise PlanError(
            f"cannot load the model {plan.model!r} that the plan is for: {error}. "
            "Give the loss and its arguments"
        ) from error
    known = {**settings, **{k: v for k, v in loaded.options.items() if k in settings}}
    wants_optimizer = bool(options.get("optimizer"))
    if wants_optimizer and known["optimizer"] is None and known["step"] is None:
        import optax

        known["optimizer"] = optax.adamw(1e-3)
    elif not wants_optimizer:
        known["optimizer"] = None
    return loaded.loss, loaded.args, known
