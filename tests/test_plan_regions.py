"""Plans for regions made from outside, and plans where a policy is taken."""

import jax
import numpy as np
import pytest

import remat
from tests.plan_losses import LAYERS, WS, X, layer, numbers


def bare(ws, x):
    """Layers in a scan, no regions."""
    x, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)
    return (x**2).mean()


@pytest.fixture(scope="module")
def planned():
    least = remat.compare(
        remat.with_regions(bare, "scan"), WS, X, policies=["nothing"], target="cpu"
    )
    budget = int(1.2 * least["nothing"].peak_bytes)
    return remat.plan(bare, WS, X, budget=budget, target="cpu", regions="scan")


def test_regions_are_made_where_there_are_none(planned):
    assert len(planned.regions) == 1 and planned.regions[0].times == LAYERS
    assert planned.peak_bytes <= planned.budget_bytes
    ws, x = numbers()
    wanted, have = jax.grad(bare)(ws, x), jax.grad(planned.apply(bare))(ws, x)
    np.testing.assert_allclose(have, wanted, rtol=1e-6, atol=1e-8)


def test_the_file_remembers_which_regions_to_make(planned, tmp_path):
    planned.save(tmp_path / "plan.json")
    again = remat.Plan.load(tmp_path / "plan.json")
    assert len(remat.find_regions(again.apply(bare), *numbers())) >= 1
    assert remat.check_plan(again, bare, WS, X).ok


def test_a_plan_stands_where_a_policy_does(planned):
    ws, x = numbers()
    by_policy = remat.with_policy(bare, planned)
    np.testing.assert_allclose(by_policy(ws, x), bare(ws, x), rtol=1e-6)
    with pytest.raises(remat.PlanError, match="ran 6 times and runs 3 times now"):
        by_policy(ws[:3], x)
