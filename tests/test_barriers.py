"""`prevent_cse` as is right where a region runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat
from remat import policies
from tests.region_programs import WS, X, block


def unrolled(ws, x, prevent_cse=False):
    layer = jax.checkpoint(block, prevent_cse=prevent_cse)
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


def scanned(ws, x, prevent_cse=True, **options):
    layer = jax.checkpoint(block, prevent_cse=prevent_cse)
    h, _ = lax.scan(lambda h, w: (layer(w, h), None), x, ws, **options)
    return (h**2).mean()


def partly_unrolled(ws, x):
    return scanned(ws, x, prevent_cse=False, unroll=2)


def fully_unrolled(ws, x):
    return scanned(ws, x, prevent_cse=False, unroll=True)


def scans_of_one_step(ws, x):
    for w in ws:
        layer = jax.checkpoint(block, prevent_cse=False)
        x, _ = lax.scan(lambda h, w: (layer(w, h), None), x, w[None])  # noqa: B023
    return (x**2).mean()


def nested(ws, x):
    """A region in a region, in the same step of a loop."""

    def outer(w, h):
        for _ in range(2):
            h = jax.checkpoint(block, prevent_cse=False)(w, h)
        return h

    layer = jax.checkpoint(outer)
    h, _ = lax.scan(lambda h, w: (layer(w, h), None), x, ws)
    return (h**2).mean()


def scan_in_region(ws, x):
    return jax.checkpoint(scanned, prevent_cse=False)(ws, x)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (unrolled, [True] * 3),
        (scanned, [False]),
        (partly_unrolled, [True]),
        (fully_unrolled, [True]),
        (scans_of_one_step, [True] * 3),
        (nested, [False, True, True]),
        (scan_in_region, [True, False]),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
@pytest.mark.parametrize(
    "policy",
    ["nothing", policies.save(policies.larger_than(1))],
    ids=["named", "bound"],
)
def test_where_a_region_runs_decides(loss, expected, policy):
    regions = remat.find_regions(remat.with_policy(loss, policy), WS, X)
    assert [region.prevent_cse for region in regions] == expected


def test_one_function_in_a_loop_and_outside():
    layer = jax.jit(jax.checkpoint(block, prevent_cse=False))

    def loss(ws, x):
        x, _ = lax.scan(lambda h, w: (layer(w, h), None), layer(ws[0], x), ws)
        return x.sum()

    regions = remat.find_regions(remat.with_policy(loss, "nothing"), WS, X)
    assert [region.prevent_cse for region in regions] == [True, False]


def test_a_region_that_gets_no_policy_stays():
    def loss(ws, x):
        with jax.named_scope("a"):
            x = jax.checkpoint(block, prevent_cse=False)(ws[0], x)
        with jax.named_scope("b"):
            return jax.checkpoint(block, prevent_cse=False)(ws[1], x).sum()

    regions = remat.find_regions(remat.with_policy(loss, {"b*": "nothing"}), WS, X)
    assert [region.prevent_cse for region in regions] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [unrolled, scanned, partly_unrolled, fully_unrolled, scans_of_one_step, nested],
    ids=lambda f: f.__name__,
)
def test_xla_undoes_no_region(loss):
    """Temporary memory of a compiled gradient, in shares of what is kept without."""
    ws = jax.ShapeDtypeStruct((6, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((16384, 256), jnp.float32)

    def temp_bytes(policy):
        step = jax.grad(remat.with_policy(loss, policy))
        return remat.analyze(step, ws, x, target="h100").temp_bytes

    assert temp_bytes("nothing") < 0.7 * temp_bytes("none")


@pytest.mark.parametrize(
    "loss",
    [pytest.param(nested, marks=pytest.mark.slow), scan_in_region],
    ids=lambda f: f.__name__,
)
def test_regions_in_regions_all_get_a_policy(loss):
    """A policy that JAX can apply, and its like that only names can, keep the same."""
    named = remat.with_policy(loss, "save_dots")
    bound = remat.with_policy(loss, policies.save(policies.dots()) & everything_large())
    kept = [len(remat.residuals(fn, WS, X)) for fn in (named, bound)]
    assert (
        kept[0]
        == kept[1]
        > len(remat.residuals(remat.with_policy(loss, "nothing"), WS, X))
    )
    for changed in (named, bound):
        regions = remat.find_regions(changed, WS, X)
        assert len({region.policy for region in regions}) == 1
        expected = jax.grad(loss)(WS, X)
        assert jnp.array_equal(jax.grad(changed)(WS, X), expected)


def everything_large():
    return policies.save(policies.larger_than(1))
