"""Plans that give some layers of a scan one choice and the rest another."""

import dataclasses
import functools
import itertools
import pathlib

import jax
import numpy as np
import pytest

import remat
from remat._naming._naming import name_region
from remat._plan._apply import apply_treatments
from remat._plan._errors import PlanError
from remat._plan._kinds import Kind, by_layer, find_kinds, same, solve_all
from remat._plan._modelled import Modelled
from remat._plan._named import named_candidates, near_budget
from remat._plan._pool import Pool
from remat._regions._nnx import recorded
from remat._regions._split_layers import layers_of
from remat._regions._with_policy import regions_of
from remat._sizes import format_seconds
from remat._targets._target import target
from remat.policies import Decision
from tests.helpers import saved_residuals, stable_id
from tests.plan_losses import BIG_WS, BIG_X, WS, X, layer, numbers, scanned
from tests.region_programs import X as SMALL_X
from tests.test_split_layers import (
    PROGRAMS,
    in_microbatches,
    nested_scans,
    two_in_a_step,
)
from tests.test_split_layers import WS as SMALL_WS

DATA = pathlib.Path(__file__).parent / "data"


def kinds_of(loss, *args) -> tuple[Kind, ...]:
    with recorded(loss, args, {}) as recording:
        regions = regions_of(recording.closed)
        layers = layers_of(recording.closed)
    kinds, left = find_kinds(regions, layers, target("h100"), allow_offload=False)
    assert not left
    return kinds


def some_more(regions, layers):
    """Every layer saves one value more than the last; no two steps are alike."""
    numbers = itertools.count()
    tables = {}
    for region in regions:
        ids = sorted(name_region(region.jaxpr)[1])
        tables[region.index] = [
            tuple((id_, Decision.SAVE) for id_ in ids[: next(numbers) % (len(ids) + 1)])
            for _ in range(layers.get(region.index, 1))
        ]
    return tables


@pytest.mark.parametrize("program", PROGRAMS, ids=stable_id)
def test_gradients_stay_as_they_are(program):
    split = apply_treatments(program, some_more)
    grads = jax.value_and_grad(program, (0, 1))(SMALL_WS, SMALL_X)
    found = jax.value_and_grad(split, (0, 1))(SMALL_WS, SMALL_X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        found,
        grads,
    )
    kept = saved_residuals(split, SMALL_WS, SMALL_X)
    assert len(kept) > len(saved_residuals(program, SMALL_WS, SMALL_X))


@pytest.mark.parametrize(
    ("program", "n_copies", "times", "order"),
    [
        (scanned, 6, 1, [0] * 6),
        (two_in_a_step, 6, 1, [0, 1] * 3),
        (nested_scans, 6, 1, [0] * 6),
        # Layers differ, the microbatches that run them do not.
        (in_microbatches, 6, SMALL_X.shape[0], [0] * 6),
    ],
    ids=stable_id,
)
def test_copies_are_layers_in_the_order_in_which_they_run(
    program, n_copies, times, order
):
    args = (WS, X) if program is scanned else (SMALL_WS, SMALL_X)
    (kind,) = kinds_of(program, *args)
    assert (kind.n_copies, kind.times) == (n_copies, times)
    assert list(kind.copies()) == order


def test_a_split_is_never_worse_than_one_choice_for_all():
    (kind,) = kinds_of(scanned, WS, X)
    most = same([kind], lambda kind: kind.everything).bytes
    n_split = 0
    for share in np.linspace(0, 1, 9):
        budget = int(share * most)
        found = solve_all([kind], budget)
        alike = kind.solve(budget // kind.n_copies)
        assert found.bytes <= budget
        assert found.price <= kind.n_copies * alike.price * (1 + 1e-9)
        n_split += len(found.shares[0]) > 1
        choices = by_layer([kind], found)[0]
        kept = [choice.bytes for choice in choices]
        assert len(set(choices)) <= 2 and kept == sorted(kept)
    assert n_split > 3


@pytest.fixture(scope="module")
def plan():
    table = remat.compare(
        scanned, BIG_WS, BIG_X, policies=["none", "nothing"], target="h100", exact=True
    )
    least, most = table["nothing"].peak_bytes, table["none"].peak_bytes
    budget = int(least + 0.4 * (most - least))
    return remat.plan(scanned, BIG_WS, BIG_X, budget=budget, target="h100")


def test_some_layers_keep_more(plan):
    assert 0.8 * plan.budget_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert plan.n_compiles <= 8
    (region,) = plan.regions
    assert len(region.choices) == 6 and len(plan.choices) == 2
    assert sum(region.runs.values()) == region.times == 6
    assert "layer[0" in str(plan) and "5]" in str(plan)


def test_each_kept_value_says_what_it_spares(plan):
    """Without one of the two products, a run computes that product again."""
    product = 2 * 16384 * 256 * 256
    values = [kept for choice in plan.choices for kept in choice.kept]
    assert values and "or else again" in str(plan)
    large = [kept for kept in values if kept.bytes == 16384 * 256 * 4]
    assert large and all(kept.spares_flops >= product for kept in large)
    assert all(kept.spares_s > 0 for kept in large)


def test_what_is_on_the_host_is_held_against_the_step(plan):
    """host_bytes of each run, there and back, at the rate of the target's link."""
    first, *rest = plan.choices
    moved = dataclasses.replace(
        plan,
        host_bytes=1,
        choices=(dataclasses.replace(first, host_bytes=10**6), *rest),
        estimated_step_s=1.0,
    )
    runs = moved.regions[0].runs[first.name]
    seconds = 2 * 10**6 * runs / target("h100").host_link_bytes_s
    text = " ".join(str(moved).split())
    assert f"there and back takes {format_seconds(seconds)}" in text
    assert "within the step's 1.0 s" in text
    late = dataclasses.replace(moved, estimated_step_s=1e-9)
    assert "more than the step's" in " ".join(str(late).split())


def test_its_file_reads_back_and_holds(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = remat.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert remat.check_plan(again, scanned, BIG_WS, BIG_X).ok
    ws, x = numbers()
    with pytest.raises(PlanError, match=r"input 0 was float32\[16384, 256\]"):
        again.apply(scanned)(ws, x)
    with pytest.raises(PlanError, match="2 choices"):
        _ = again.policy


def test_a_scan_that_cannot_be_split_any_more_is_refused(plan):
    def rerun(ws, x):
        """As often as six layers, but one layer."""
        body = jax.checkpoint(layer)
        total = lambda t, _: (t + body(x, ws[0]).sum(), None)  # noqa: E731
        return jax.lax.scan(total, 0.0, None, length=6)[0]

    (region,) = remat.find_regions(rerun, BIG_WS, BIG_X)
    record = dataclasses.replace(plan.regions[0], fingerprint=region.fingerprint)
    wrong = dataclasses.replace(plan, regions=(record,))
    with pytest.raises(PlanError, match="6 layers of a scan, and now 1 can"):
        jax.eval_shape(wrong.apply(rerun), BIG_WS, BIG_X)


@pytest.mark.parametrize("version", ["0_10", "0_12"])
def test_plans_made_under_either_jax_apply_under_both(version):
    """`remat.plan(scanned, WS, X, target="cpu")`, half-way to everything kept."""
    planned = remat.Plan.load(DATA / f"plan_split_jax_{version}.json")
    assert planned.versions["jax"].startswith(version.replace("_", "."))
    assert len(planned.regions[0].choices) == 6 and len(planned.choices) == 2
    ws, x = numbers()
    wanted, found = jax.grad(scanned)(ws, x), jax.grad(planned.apply(scanned))(ws, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)
    less, more = planned.choices
    first, *_, last = remat.find_regions(planned.apply(scanned), ws, x)
    for region, choice in ((first, less), (last, more)):
        marked = {n for n in region.emitted_names if n.startswith("remat.save:")}
        assert marked == {f"remat.save:{kept.id}" for kept in choice.kept}


def test_a_mix_is_no_worse_than_what_it_is_to_beat():
    """Within the bytes, FLOPs and seconds of a choice, by the model."""
    kinds = kinds_of(scanned, WS, X)
    named = {n: one.allotment for one in named_candidates(kinds) for n in one.names}
    pool = Pool(kinds, [*named.values()])
    for name in ("nothing", "save_dots", "minimal", "none"):
        goal = Modelled.of(kinds, named[name])
        found = pool.mix(named[name].bytes, goal)
        assert found is not None and found.bytes <= named[name].bytes
        assert Modelled.of(kinds, found).no_worse(goal), name
        fastest = pool.mix(named[name].bytes, goal, fastest=True)
        assert fastest is not None
        modelled = Modelled.of(kinds, fastest)
        assert modelled.no_worse(goal), name
        assert modelled.seconds <= (1 + 1e-6) * Modelled.of(kinds, found).seconds
    nowhere = dataclasses.replace(goal, flops=-1.0)
    assert pool.mix(named["none"].bytes, nowhere) is None


def test_named_policies_near_a_budget_are_candidates():
    kinds = kinds_of(scanned, WS, X)
    named = named_candidates(kinds)
    kept = {n: one.allotment.bytes for one in named for n in one.names}

    def near(budget, beside=(), is_used=False):
        found = near_budget(
            kinds,
            named,
            budget_bytes=budget,
            predict=float,
            beside=beside,
            is_used=is_used,
        )
        return [one.names[0] for one, _ in found]

    budget = kept["save_dots"]
    first = near(budget)[0]
    assert kept[first] == budget
    assert all(0.9 * budget <= kept[name] <= 1.03 * budget for name in near(budget))
    best = Modelled(flops=0.0, seconds=0.0)
    # Its very peak may be the budget: then it is compiled whatever the model says.
    assert near(budget, [best]) and set(near(budget, [best])) <= set(near(budget))
    assert first not in near(int(budget / 0.95), [best])
    # What may take more than the budget, unless the budget is a policy's own.
    assert first in near(budget - 1) and first not in near(budget - 1, is_used=True)
