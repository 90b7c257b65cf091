"""Which of the compiled candidates is the plan, by what the compiler made of them.

What is judged is compiled: the peak, the FLOPs of the step, and the estimate of its
time (`MemoryReport.estimated_step_s`), memory traffic included. The model that
candidates come from only says which to compile.

A budget is there to be used: the plan is, of the candidates that use it, the one that
recomputes least. It recomputes no more and is no slower than the named policies that
use it and are compiled: with the budget at such a policy's own peak the plan is never
worse than the policy. A smaller candidate that is no worse in either figure goes first.

Where memory is slow, to keep a value can take longer than to compute it again. A
candidate that leaves budget unused may then be faster by the estimate; the plan says
so, and a smaller budget gets it.
"""

import math
from collections.abc import Sequence

from remat._plan._errors import PlanError
from remat._plan._meter import Measured
from remat._sizes import format_bytes, format_seconds

FULL = 0.93
"""A candidate that takes this share of the budget uses it."""
SLOWER = 0.005
"""Estimates that differ by less than this share are equal."""


def step_s(measured: Measured) -> float:
    """Estimated time; where the target's figures are unknown, the model's recompute."""
    seconds = measured.report.estimated_step_s
    return measured.candidate.allotment.price if math.isnan(seconds) else seconds


def no_worse(one: Measured, other: Measured) -> bool:
    """Whether a candidate recomputes no more than another and is no slower."""
    return one.flops <= other.flops and step_s(one) <= step_s(other)


def best_of(fitting: Sequence[Measured], budget_bytes: int) -> Measured | None:
    """The plan among candidates that fit; None of none.

    Args:
        fitting: Compiled candidates within the budget.
        budget_bytes: What they fit.
    """
    rivals = list(fitting)
    named = [m for m in fitting if m.candidate.is_named and is_full(m, budget_bytes)]
    for policy in sorted(named, key=lambda m: (-m.peak_bytes, m.flops)):
        # A policy that none of those left matches sets no bound.
        rivals = [m for m in rivals if no_worse(m, policy)] or rivals
    full = [m for m in rivals if is_full(m, budget_bytes)]
    best = min(full or rivals, key=_order, default=None)
    if best is None:
        return None
    return min((m for m in rivals if no_worse(m, best)), key=_order)


def _order(measured: Measured) -> tuple[float, float, int]:
    return measured.flops, step_s(measured), measured.peak_bytes


def is_full(measured: Measured, budget_bytes: int) -> bool:
    """Whether a candidate uses the budget."""
    return measured.peak_bytes >= FULL * budget_bytes


def faster_than(best: Measured, fitting: Sequence[Measured]) -> Measured | None:
    """The fastest candidate that fits, if it beats the plan by more than rounding."""
    fastest = min(fitting, key=step_s, default=best)
    return fastest if step_s(fastest) < (1 - SLOWER) * step_s(best) else None


def faster_note(best: Measured, fitting: Sequence[Measured]) -> list[str]:
    """Where less memory is faster by the estimate, the line that says so."""
    found = faster_than(best, fitting)
    if found is None:
        return []
    return [
        f"by the estimate, a budget of {format_bytes(found.peak_bytes)} gives a faster "
        f"step ({found.candidate.label}: {format_seconds(step_s(found))}, this plan: "
        f"{format_seconds(step_s(best))}): to keep more takes more memory traffic than "
        "it spares"
    ]


def too_small(budget_bytes: int, measured: Sequence[Measured]) -> PlanError:
    """The error where none fits: the least that was compiled, and what would help."""
    least = min(measured, key=lambda m: m.peak_bytes)
    largest = list(least.report.by_category().items())[:3]
    what = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    budget, needed = format_bytes(budget_bytes), format_bytes(least.peak_bytes)
    return PlanError(
        f"a budget of {budget} is below the {needed} that the least choice "
        f"({least.candidate.label}) needs; at its peak: {what}. "
        "Make the batch or the sequence smaller, shard the step over more devices, "
        "accumulate gradients, or cut the loss into chunks if logits stand out"
    )
