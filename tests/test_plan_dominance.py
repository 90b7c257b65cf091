"""With a named policy's peak for its budget, a plan is never worse than the policy."""

import math

import pytest

import remat
from tests.plan_losses import WS, X, scanned

POLICIES = ("none", "nothing", "save_dots", "save_dots_no_batch", "minimal")


def check_plans(loss, args, target, policies):
    """Plans for the compiled peaks of policies, held against them in all figures."""
    table = remat.compare(loss, *args, policies=policies, target=target, exact=True)
    for row in table.rows:
        plan = remat.plan(loss, *args, budget=row.peak_bytes, target=target)
        assert plan.peak_bytes <= row.peak_bytes, row.policy
        assert plan.recompute_flops <= row.recompute_flops, row.policy
        ours, theirs = plan.estimated_step_s, row.estimated_step_s
        if ours is not None and theirs is not None and not math.isnan(theirs):
            assert ours <= theirs, row.policy


def test_plans_are_never_worse_than_policies():
    check_plans(scanned, (WS, X), "cpu", ("nothing", "save_dots"))


SLOWER_ON_TPU = pytest.mark.xfail(
    reason="a two-layer model's plan at the peak of save_dots_no_batch recomputes 4 % "
    "less than it and is 5 % slower by XLA's cycles: peaks are no function of what is "
    "kept there, so the policy is foreseen to be over the budget and is not compiled; "
    "GPT-2 at its own size has no such case",
    strict=False,
)


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("v5e", marks=SLOWER_ON_TPU), "h100"])
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_plans_for_models_are_never_worse_than_policies(model, target):
    # So large that peaks follow what is kept, and values leave a TPU's on-chip memory.
    built = remat.models.build(model, batch=256, seq=256)
    check_plans(built.loss, built.args, target, POLICIES)
