"""Curves: models learn, and what is recomputed changes no loss."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat import models
from remat.models._data import open_text
from tests.training_runs import losses

TWO_HUNDRED: dict[str, Any] = {"steps": 200, "batch": 8, "seq": 64, "n_sample": 0}


@pytest.fixture(scope="module")
def without_regions(tmp_path_factory):
    """Dtype to the losses of 200 steps in which nothing is recomputed."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path_factory.mktemp("none")
        models.train("gpt2-tiny", out=out, policy="none", dtype=dtype, **TWO_HUNDRED)
        found[dtype] = losses(out)
        assert found[dtype][-1] < 0.6 * found[dtype][0]
    return found


def planned(dtype):
    """A plan for the runs of 200 steps."""
    sizes: dict[str, Any] = {"batch": 8, "seq": 64, "dtype": jnp.dtype(dtype).type}
    return plan_of(models.build("gpt2-tiny", **sizes))


def plan_of(built):
    """A plan for half of what full recomputation saves."""
    table = remat.compare(
        built.loss, *built.args, policies=["none", "nothing"], target="cpu"
    )
    budget = sum(row.peak_bytes for row in table.rows) // 2
    return remat.plan(built.loss, *built.args, budget=budget, target="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)]
)
@pytest.mark.parametrize("policy", ["nothing", "save_dots", "offload_dots", "plan"])
def test_policies_change_no_loss(tmp_path, without_regions, policy, dtype, tolerance):
    given = planned(dtype) if policy == "plan" else policy
    models.train("gpt2-tiny", out=tmp_path, policy=given, dtype=dtype, **TWO_HUNDRED)
    found, wanted = losses(tmp_path), without_regions[dtype]
    assert len(found) == 200
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_a_run_goes_on_under_other_policies(tmp_path, without_regions):
    out = tmp_path / "run"
    plan = planned("float32")
    for steps, policy in ((60, "nothing"), (110, "save_dots"), (160, plan)):
        options = {**TWO_HUNDRED, "steps": steps, "keep": 5}
        models.train("gpt2-tiny", out=out, policy=policy, dtype="float32", **options)
    last: dict[str, Any] = {"policy": "offload_dots", "keep": 5, "n_sample": 0}
    done = models.train("gpt2-tiny", out=out, **last)
    assert done.started_at == 160 and done.step == 200
    wanted = without_regions["float32"]
    np.testing.assert_allclose(losses(out), wanted, rtol=0, atol=1e-5)
    # What a checkpoint holds, by name, shape and type: one under any policy.
    written = {
        step: (out / "checkpoints" / str(step) / "state" / "_METADATA").read_text()
        for step in (60, 110, 160, 200)
    }
    assert len(set(written.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nothing", "save_dots", "offload_dots", "plan"])
def test_policies_change_no_bit_where_nothing_is_compiled(policy):
    options: dict[str, Any] = {"batch": 2, "seq": 32, "scan_layers": False}
    built = models.build("gpt2-tiny", dtype=jnp.float32, **options)
    data = open_text(None, 32)
    ends = []
    for each in ("none", plan_of(built) if policy == "plan" else policy):
        gradient = jax.value_and_grad(remat.with_policy(built.loss, each))
        params, curve = jax.jit(built.init)(jax.random.key(0)), []
        for step in range(4):
            loss, change = gradient(params, data.batch(0, step, 2))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, change)
            curve.append(float(loss))
        ends.append((curve, params))
    assert ends[0][0] == ends[1][0]
    chex.assert_trees_all_equal(ends[0][1], ends[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-nnx", "mixtral-tiny"])
def test_every_model_of_words_learns(tmp_path, name):
    done = models.train(name, out=tmp_path, steps=60, seq=64, n_sample=20)
    found = losses(tmp_path)
    assert found[-1] < 0.7 * found[0]
    assert done.sample is not None and done.sample.startswith("The ")


def test_a_vit_takes_no_text(tmp_path):
    with pytest.raises(models.TrainError, match="takes no text"):
        models.train("vit-tiny", out=tmp_path, data=__file__)


@pytest.mark.slow
def test_a_vit_learns_digits(tmp_path):
    done = models.train("vit-tiny", out=tmp_path, steps=1000, batch=32)
    assert done.accuracy is not None and done.accuracy > 0.75
