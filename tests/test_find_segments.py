"""Which scans run in segments, as told: the cut, what is kept, what runs again."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat
from remat._scan._segments import balanced
from tests.benchmarks.scan_scaling import extra_forwards_of
from tests.scan_programs import assert_same


def step(x, t):
    return x + 1e-3 * jnp.sin(x * jnp.cos(x) + t), None


def loss(scan, n, x):
    return (scan(step, x, jnp.arange(n, dtype=jnp.float32))[0] ** 2).sum()


# A long scan, its length prime or not, in memory of 2 sqrt(N) carries


@pytest.mark.parametrize("n", [1024, 1021])
def test_a_long_scan_is_told_as_it_is_cut(n):
    x = jnp.linspace(0.0, 1.0, 1024)
    cut = functools.partial(loss, remat.scan, n)
    (scan,) = remat.find_segments(cut, x)
    assert (scan.n_steps, len(scan.lengths)) == (n, 2)
    assert scan.block * (scan.n_segments - 1) < n <= scan.block * scan.n_segments
    assert abs(scan.block - math.sqrt(n)) <= 1
    assert scan.max_saved <= 2 * math.sqrt(n)
    assert (scan.recompute_factor, scan.is_region) == (1, True)
    assert str(scan.source).startswith("test_find_segments.py:")
    got = jax.jit(jax.grad(cut))(x)
    assert_same(got, jax.jit(jax.grad(functools.partial(loss, lax.scan, n)))(x), 1e-5)


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_a_long_scan_of_prime_length_needs_2_sqrt_n_carries(name):
    n, width = 1021, 2**18
    x = jax.ShapeDtypeStruct((width,), jnp.float32)
    cut = functools.partial(loss, remat.scan, n)
    found = remat.explain(cut, x, target=name, step=jax.grad)
    (scan,) = remat.find_segments(cut, x)
    (told,) = [one for one in found.findings if one.code == "scan-in-segments"]
    assert f"{n:,} steps as" in str(scan) and str(scan) in told.message
    argument, result, cotangent = 1, 1, 1
    inside_a_step = 3
    carries = 2 * math.sqrt(n) + argument + result + cotangent + inside_a_step
    assert found.report.peak_bytes <= carries * width * 4


@pytest.mark.parametrize(
    ("n", "segments"),
    [
        (24, (4, 6)),
        (97, "sqrt"),
        (97, 5),
        (1000, (10, 10, 10)),
        (1021, balanced(1021, 3)),
        (95, (5, 5, 4)),
        (61, (2, 3, 4, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_recompute_factor_is_that_of_the_program(n, segments, reverse):
    def cut(x):
        def body(c, _):
            return jnp.sin(c) * 1.01, None

        options = {"segments": segments, "policy": "none", "reverse": reverse}
        return remat.scan(body, x, None, n, **options)[0]

    (scan,) = remat.find_segments(cut, 1.0)
    assert scan.recompute_factor == pytest.approx(extra_forwards_of(cut, 1.0, n))


def test_scans_cut_from_outside_and_those_that_are_not():
    def both(x):
        body = lambda c, _: (jnp.sin(c), None)  # noqa: E731
        return lax.scan(body, lax.scan(body, x, None, 64)[0], None, 5)[0]

    assert remat.find_segments(both, 1.0) == ()
    (scan,) = remat.find_segments(remat.segment_scans(both), 1.0)
    assert (scan.n_steps, scan.lengths) == (64, (8, 8))
    assert remat.find_segments(jax.grad(remat.segment_scans(both)), 1.0) == (scan,)
