"""Which of the compiled candidates is the plan, by what the compiler made of them.

What is judged is compiled: the peak, the FLOPs of the step, and the roofline estimate
of its time (`MemoryReport.estimated_step_s`), memory traffic included. The model that
candidates come from only says which to compile.

The plan recomputes no more and is no slower than the named policies that fit, those
first that use most of the budget: with the budget at a policy's own peak, the plan is
never worse than that policy. Of the candidates that are left the fastest is taken, and
of equally fast ones that which recomputes least. Less recompute alone is not the aim:
where memory is slow, to keep a value can take longer than to compute it again.
"""

import math
from collections.abc import Sequence

from remat._plan._meter import Measured

EQUAL = 1e-3
"""Estimates that differ by less than this share are equal."""


def step_s(measured: Measured) -> float:
    """Estimated time; where the target's figures are unknown, the model's recompute."""
    seconds = measured.report.estimated_step_s
    return measured.candidate.allotment.price if math.isnan(seconds) else seconds


def no_worse(one: Measured, other: Measured) -> bool:
    """Whether a candidate recomputes no more than another and is no slower."""
    return one.flops <= other.flops and step_s(one) <= step_s(other)


def best_of(fitting: Sequence[Measured]) -> Measured | None:
    """The plan among candidates that fit; None of none.

    Args:
        fitting: Compiled candidates within the budget.
    """
    rivals = list(fitting)
    named = [measured for measured in fitting if measured.candidate.is_named]
    for policy in sorted(named, key=lambda m: (-m.peak_bytes, m.flops)):
        # A policy that none of those left matches sets no bound.
        rivals = [m for m in rivals if no_worse(m, policy)] or rivals
    if not rivals:
        return None
    fastest = min(map(step_s, rivals))
    equal = [m for m in rivals if step_s(m) <= fastest * (1 + EQUAL)]
    return min(equal, key=lambda m: (m.flops, step_s(m), m.peak_bytes))
