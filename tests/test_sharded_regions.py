"""Regions inside `shard_map`, on eight host devices."""

import functools

import jax
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat
from remat import policies
from tests.helpers import stable_id
from tests.region_programs import D, block

N_DEVICES = 8
WS = 0.3 * jr.normal(jr.key(0), (4, D, D))
X = jr.normal(jr.key(1), (2 * N_DEVICES, D))


def loss_with(layer):
    """A scan of layers that talk to each other, inside a shard_map."""
    mesh = Mesh(np.array(jax.devices()[:N_DEVICES]), ("data",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    def mapped(ws, x):
        def body(h, w):
            h = layer(w, h)
            return h * lax.pmean(h.mean(), "data"), None

        return lax.psum((lax.scan(body, x, ws)[0] ** 2).sum(), "data")

    return mapped


def assert_close(actual, expected):
    def check(a, e):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * float(np.abs(e).max()))

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize(
    ("policy", "n_regions"),
    [
        pytest.param("nothing", 1, marks=pytest.mark.slow),
        pytest.param("none", 0, marks=pytest.mark.slow),
        (policies.save(policies.dots() & policies.larger_than(1)), 1),
        (policies.first_layers(1, "save_dots", "nothing"), 2),
    ],
    ids=stable_id,
)
@pytest.mark.parametrize(
    "made",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["own regions", "made"],
)
def test_policies_in_shard_map(policy, n_regions, made):
    loss = loss_with(block if made else jax.checkpoint(block))
    changed = remat.with_policy(loss, policy, regions="scan" if made else None)
    assert len(remat.find_regions(changed, WS, X)) == n_regions
    actual = jax.jit(jax.grad(changed, (0, 1)))(WS, X)
    assert_close(actual, jax.jit(jax.grad(loss, (0, 1)))(WS, X))


def test_what_is_kept_in_shard_map():
    def kept(policy):
        found = remat.residuals(remat.with_policy(loss, policy), WS, X)
        return [residual.bytes for residual in found]

    loss = loss_with(jax.checkpoint(block))
    stack = 4 * X.size * 4  # four layers, float32
    # Beside the layers' inputs, the results of the two products in each.
    assert sum(kept("save_dots")) - sum(kept("nothing")) == 2 * stack


@pytest.mark.slow
def test_a_plan_in_shard_map():
    loss = loss_with(jax.checkpoint(block))
    found = remat.plan(loss, WS, X, target="cpu")
    assert [(region.times, region.choices) for region in found.regions] == [(4, ("A",))]
    expected = jax.jit(jax.grad(loss))(WS, X)
    assert_close(jax.jit(jax.grad(found.apply(loss)))(WS, X), expected)


def test_pattern_in_shard_map():
    def layer(w, x):
        with jax.named_scope("layer"):
            return block(w, x)

    changed = remat.with_regions(loss_with(layer), "layer")
    (region,) = remat.find_regions(changed, WS, X)
    assert (region.path, region.times) == ("layer", 4)
