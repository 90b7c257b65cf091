"""Different policies for the layers of one scan."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat
from remat import policies
from remat._scan._runs import spans
from tests.helpers import stable_id
from tests.region_programs import D, X, block

N = 6
WS = 0.3 * jr.normal(jr.key(0), (N, D, D))
BIAS = jr.normal(jr.key(1), (N, D))

layer = jax.checkpoint(block)


def scanned(ws, x, **options):
    return (lax.scan(lambda h, w: (layer(w, h), None), x, ws, **options)[0] ** 2).sum()


def reverse(ws, x):
    return scanned(ws, x, reverse=True)


def unrolled_by_two(ws, x):
    return scanned(ws, x, unroll=2)


def everything_at_once(ws, x):
    """Constants, integers, keys, several carries, ys, and xs read outside a region."""
    scale = jnp.sin(x.sum())

    def body(carry, inputs):
        h, n, key = carry
        w, b, index = inputs
        key, draw = jr.split(key)
        y = layer(w * scale, h) + b + jr.normal(draw, h.shape)
        return (y, n + index, key), (y.sum(), index, b * scale)

    init = (x, jnp.int32(0), jr.key(0))
    xs = (ws, BIAS, jnp.arange(N))
    (h, n, _), ys = lax.scan(body, init, xs, reverse=True)
    return (h**2).sum() * n + sum(jnp.sum(y) for y in ys)


def in_jit_and_cond(ws, x):
    inner = jax.jit(layer)

    def run(ws, x):
        return lax.scan(lambda h, w: (inner(w, h), h), x, ws)[1].sum()

    return lax.cond(x.sum() > -9, run, lambda ws, x: x.sum(), ws, x)


def two_in_a_step(ws, x):
    def body(h, pair):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                h = layer(pair[i], h)
        return h, None

    return lax.scan(body, x, ws.reshape(3, 2, D, D))[0].sum()


def nested_scans(ws, x):
    def group(h, ws):
        return lax.scan(lambda h, w: (layer(w, h), h.sum()), x * 0 + h, ws)

    h, ys = lax.scan(group, x, ws.reshape(3, 2, D, D))
    return h.sum() + ys.sum()


def in_microbatches(ws, x):
    return lax.scan(lambda t, x: (t + scanned(ws, x[None]), None), 0.0, x)[0]


def in_shard_map(ws, x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    def mapped(ws, x):
        return lax.psum(scanned(ws, x), "d")

    return mapped(ws, x)


PROGRAMS = (
    scanned,
    reverse,
    unrolled_by_two,
    everything_at_once,
    in_jit_and_cond,
    two_in_a_step,
    nested_scans,
    in_microbatches,
    in_shard_map,
)
FIRST = policies.first_layers(2, "save_dots", "nothing")
LISTED = policies.layers(
    ["none", "save_dots", policies.save(policies.larger_than(1)), *["everything"] * 3]
)


def assert_close(actual, expected, tolerance=1e-6):
    def check(a, e):
        scale = max(1.0, float(np.abs(e).max()))
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_of_jitted_programs(loss):
    changed = remat.with_policy(loss, FIRST)
    expected = jax.jit(jax.grad(loss))(WS, X)
    assert_close(jax.jit(jax.grad(changed))(WS, X), expected, 1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        everything_at_once,
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in PROGRAMS
            if p is not everything_at_once
        ),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    "policy",
    [pytest.param(FIRST, marks=pytest.mark.slow), LISTED],
    ids=["first", "listed"],
)
def test_gradients_are_those_of_the_scan(loss, policy):
    changed = remat.with_policy(loss, policy)
    expected = jax.value_and_grad(loss, (0, 1))(WS, X)
    # Eager scans are compiled, and other loops are fused in other ways.
    assert_close(jax.value_and_grad(changed, (0, 1))(WS, X), expected)


def test_gradients_are_bit_equal():
    changed = jax.grad(remat.with_policy(scanned, LISTED), (0, 1))(WS, X)
    plain = jax.grad(scanned, (0, 1))(WS, X)
    jax.tree.map(np.testing.assert_array_equal, changed, plain)


def found(loss, policy):
    regions = remat.find_regions(remat.with_policy(loss, policy), WS, X)
    return [(r.times, r.context, str(r.policy), r.prevent_cse) for r in regions]


@pytest.mark.parametrize(
    ("loss", "policy", "expected"),
    [
        (
            scanned,
            FIRST,
            [(2, "scan", "save_dots", False), (4, "scan", "nothing", False)],
        ),
        (
            reverse,
            FIRST,
            [(2, "scan", "save_dots", False), (4, "scan", "nothing", False)],
        ),
        (
            scanned,
            policies.every_nth_layer(2, "nothing", "save_dots"),
            [(3, "scan", "nothing", False), (3, "scan", "save_dots", False)],
        ),
        (
            scanned,
            policies.first_layers(1, "save_dots", "nothing"),
            [(1, "straight line", "save_dots", True), (5, "scan", "nothing", False)],
        ),
        (
            scanned,
            policies.first_layers(4, "none", "nothing"),
            [(2, "scan", "nothing", False)],
        ),
        (
            scanned,
            policies.first_layers(9, "save_dots"),
            [(6, "scan", "save_dots", False)],
        ),
        (
            unrolled_by_two,
            FIRST,
            [
                (2, "unrolled scan", "save_dots", True),
                (4, "unrolled scan", "nothing", True),
            ],
        ),
        (
            two_in_a_step,
            policies.first_layers(3, "save_dots", "nothing"),
            [
                (1, "straight line", "save_dots", True),
                (1, "straight line", "save_dots", True),
                (1, "straight line", "save_dots", True),
                (1, "straight line", "nothing", True),
                (1, "straight line", "nothing", True),
                (1, "straight line", "nothing", True),
            ],
        ),
        (
            nested_scans,
            FIRST,
            [(2, "scan", "save_dots", False), (4, "scan", "nothing", False)],
        ),
        (
            in_microbatches,
            FIRST,
            [(4, "scan", "save_dots", False), (8, "scan", "nothing", False)],
        ),
        (
            scanned,
            {"block": FIRST},
            [(2, "scan", "save_dots", False), (4, "scan", "nothing", False)],
        ),
    ],
    ids=stable_id,
)
def test_a_scan_becomes_as_few_as_run_its_layers_in_order(loss, policy, expected):
    assert found(loss, policy) == expected


def test_kinds_in_few_loops():
    def shown(kinds):
        return [
            (s.repeats, "".join(str(r.kind) * r.n_steps for r in s.runs))
            for s in spans(kinds)
        ]

    assert shown("aaaa") == [(1, "aaaa")]
    assert shown("aabb") == [(1, "aabb")]
    assert shown("abab") == [(2, "ab")]
    assert shown("ababa") == [(2, "ab"), (1, "a")]
    assert shown("aabaabaa") == [(2, "aab"), (1, "aa")]
    assert shown("abcd") == [(1, "abcd")]


def test_no_weights_are_kept():
    """Nothing as large as a layer's weights is made for the backward pass."""
    changed = remat.with_policy(scanned, LISTED)
    _, backward = jax.vjp(lambda ws: changed(ws, X), WS)
    kept = [x for x in jax.tree.leaves(backward) if x.shape[-2:] == (D, D)]
    assert kept
    assert all(x is WS for x in kept)


@pytest.mark.slow
def test_higher_derivatives_and_vmap():
    changed = remat.with_policy(scanned, LISTED)
    hessian = jax.hessian(changed, argnums=1)(WS, X)
    assert_close(hessian, jax.hessian(scanned, argnums=1)(WS, X), 1e-5)
    xs = jnp.stack([X, 2 * X])
    mapped = jax.vmap(jax.grad(changed), (None, 0))(WS, xs)
    assert_close(mapped, jax.vmap(jax.grad(scanned), (None, 0))(WS, xs), 1e-5)


def test_segmented_scan_cannot_be_split():
    def loss(ws, x):
        return remat.scan(lambda h, w: (layer(w, h), None), x, ws, segments=3)[0].sum()

    with pytest.raises(remat.RegionError, match="cut into segments"):
        remat.with_policy(loss, FIRST)(WS, X)


def test_wrong_number_of_layers_is_an_error():
    with pytest.raises(policies.PolicyError, match="2 policies, but the stack has 6"):
        remat.with_policy(scanned, policies.layers(["nothing", "save_dots"]))(WS, X)
