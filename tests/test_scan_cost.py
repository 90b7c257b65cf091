"""What `remat.scan` keeps and recomputes: residuals, FLOPs, compiled memory."""

import functools
import math
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import policies
from remat._scan._segments import StepCosts, balanced, kept, n_carries

WIDTH = 4


def sine(c, x):
    return jnp.sin(c if x is None else c + x) * 1.01, None


def matmul(c, w):
    return jnp.tanh(c @ w), None


def wide(c, w):
    """Inner values eight times the carry."""
    h = checkpoint_name(jnp.tanh(jnp.tile(c, 4)), "h")
    return c + (jnp.sin(h).reshape(4, -1).sum(0) * w), None


def loss(scan, body, **options):
    return lambda x, xs, n: (scan(body, x, xs, length=n, **options)[0] ** 2).sum()


def n_runs(jaxpr, primitive, times=1):
    """How often one run of a program computes a primitive."""
    total = 0
    for eqn in jaxpr.eqns:
        total += times * (eqn.primitive.name == primitive)
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for sub in jec.jaxprs_in_params(eqn.params):
            total += n_runs(getattr(sub, "jaxpr", sub), primitive, inner)
    return total


# --- recompute


@pytest.mark.parametrize(
    "lengths", [(24,), (4, 6), (10, 10), (2, 3, 4), (5, 5, 5), (2, 3, 2, 2)], ids=str
)
@pytest.mark.parametrize("has_xs", [False, True])
def test_k_levels_take_exactly_k_minus_1_extra_forward_passes(lengths, has_xs):
    n = math.prod(lengths)
    fn = functools.partial(loss(remat.scan, sine, policy="none", segments=lengths), n=n)
    jaxpr = jax.make_jaxpr(jax.grad(fn))(1.0, jnp.ones(n) if has_xs else None)
    assert n_runs(jaxpr, "sin") == n + (len(lengths) - 1) * n


@pytest.mark.parametrize("n", [7, 23, 97, 1021])
def test_two_levels_take_one_extra_pass_with_a_rest_too(n):
    fn = functools.partial(loss(remat.scan, sine, policy="none"), n=n)
    assert n_runs(jax.make_jaxpr(jax.grad(fn))(1.0, None), "sin") == 2 * n


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_extra_flops_are_k_minus_1_forward_passes(levels):
    x, ws = jnp.ones((8, WIDTH)), jnp.ones((27, WIDTH, WIDTH))
    lengths = (3,) * (levels - 1) + (27 // 3 ** (levels - 1),)

    def products(fn):
        jaxpr = jax.make_jaxpr(jax.grad(functools.partial(fn, n=27), (0, 1)))(x, ws)
        return n_runs(jaxpr, "dot_general")

    plain = products(loss(lax.scan, matmul))
    cut = products(loss(remat.scan, matmul, policy="none", segments=lengths))
    assert (plain, cut) == (27 * 3, 27 * (3 + levels - 1))


def test_a_region_adds_its_own_recompute():
    gradient = jax.grad(loss(remat.scan, wide, segments=(5, 5)))
    jaxpr = jax.make_jaxpr(gradient, static_argnums=2)(
        jnp.ones(WIDTH), jnp.ones(25), 25
    )
    # Forward, segment and region; the last needs only the cosine of what it was.
    assert n_runs(jaxpr, "sin") == 2 * 25


# --- residuals between forward and backward pass


def residual_bytes(fn, *args):
    """Bytes of what `jax.vjp` keeps, other than its arguments."""
    program = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fn, *a)[1]))(*args)
    jaxpr = getattr(program, "jaxpr", program)
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    kept = {var for var in jaxpr.outvars if not isinstance(var, jec.Literal)} & made
    types: list[Any] = [v.aval for v in kept]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in types)


@pytest.mark.parametrize("n", [25, 97, 1000])
@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("has_xs", [False, True])
@pytest.mark.parametrize("policy", ["none", "nothing", "everything"])
def test_residuals_are_one_carry_a_segment(n, levels, has_xs, policy):
    lengths = balanced(n, levels)
    options = {"length": n, "segments": lengths, "policy": policy}

    def last(x, xs):
        return remat.scan(sine, x, xs, **options)[0]

    x, xs = jnp.ones(WIDTH), jnp.ones((n, WIDTH)) if has_xs else None
    carry_bytes = WIDTH * 4 + (4 if has_xs else 0)
    rest_is_free = 4 if has_xs and n % math.prod(lengths[1:]) else 0  # position known
    wanted = n_carries(n, lengths) * carry_bytes - rest_is_free
    assert residual_bytes(last, x, xs) == wanted


def test_what_no_backward_pass_reads_is_not_kept():
    def body(carry, _):
        c, total, n = carry
        return (jnp.sin(c), total + c, n + 1), None

    def last(c):
        return remat.scan(body, (c, jnp.zeros(WIDTH), 0), None, 49)[0][:2]

    assert residual_bytes(last, jnp.ones(WIDTH)) == 7 * WIDTH * 4


# --- which bodies are regions by default


def has_region(body, xs, **options):
    fn = functools.partial(loss(remat.scan, body, **options), n=36)
    return bool(remat.find_regions(fn, jnp.ones(WIDTH), xs))


def test_a_body_is_a_region_where_it_makes_more_than_its_carry():
    assert not has_region(sine, None)
    assert has_region(wide, jnp.ones(36))
    assert not has_region(wide, jnp.ones(36), policy="none")
    assert has_region(sine, None, policy="nothing")


@pytest.mark.parametrize("n", [*range(1, 20), 64])
@pytest.mark.parametrize("body", [sine, matmul, wide])
def test_never_keeps_more_than_a_scan_of_regions(n, body):
    x = jnp.ones(WIDTH)
    xs = {sine: None, matmul: jnp.ones((n, WIDTH, WIDTH)), wide: jnp.ones(n)}[body]
    region = loss(lax.scan, jax.checkpoint(body))
    cut = loss(remat.scan, body)
    position = 4 * n if xs is not None else 0
    assert residual_bytes(
        functools.partial(cut, n=n), x, xs
    ) <= position + residual_bytes(functools.partial(region, n=n), x, xs)


# --- the compiled program

CARRY = 2**16
X = jax.ShapeDtypeStruct((CARRY,), jnp.float32)


def temp_carries(body, n, *, target="h100", **options):
    """Compiled temporaries and host bytes of a gradient, in carries."""
    fn = jax.grad(lambda x: (remat.scan(body, x, None, n, **options)[0] ** 2).sum())
    report = remat.analyze(fn, X, target=target)
    return report.temp_bytes / (4 * CARRY), report.host_bytes / (4 * CARRY)


def three_of(c, _):
    return c + 1e-3 * jnp.sin(c * jnp.cos(c)), None


@pytest.mark.parametrize(
    ("body", "n", "options", "costs"),
    [
        (sine, 1024, {}, StepCosts()),
        (sine, 1021, {}, StepCosts()),
        (sine, 1000, {"segments": (10, 10, 10)}, StepCosts()),
        (three_of, 1021, {}, StepCosts()),
    ],
)
def test_compiled_temporaries_are_the_formula_on_h100(body, n, options, costs):
    lengths = options.get("segments", balanced(n, 2, costs))
    temporaries, _ = temp_carries(body, n, **options)
    # and the cotangent of one carry
    assert abs(temporaries - (kept(n, lengths, costs) + 1)) <= 0.02 * temporaries + 1


def test_xs_are_not_copied_on_h100():
    n = 97
    fn = jax.grad(lambda x, xs: (remat.scan(sine, x, xs)[0] ** 2).sum(), (0, 1))
    xs = jax.ShapeDtypeStruct((n, CARRY), jnp.float32)
    temporaries = remat.analyze(fn, X, xs, target="h100").temp_bytes / (4 * CARRY)
    assert abs(temporaries - (kept(n, balanced(n, 2), StepCosts()) + 1)) <= 1.4


def test_offloaded_carries_wait_on_the_host_of_an_h100():
    temporaries, on_host = temp_carries(three_of, 100, offload_carry=True)
    assert on_host == 20
    # The carries of four segments, the steps of two of five, and what moves.
    assert temporaries <= 4 + 2 * 5 + 1
    assert temp_carries(three_of, 100)[0] >= 20


def test_a_nested_offloading_policy_compiles_for_an_h100():
    def body(x, w):
        x = checkpoint_name(x, "r")
        return x + jnp.tanh(x @ w), None

    def total(ws, x):
        options = {"segments": (4, 3), "policy": policies.offload_names("r")}
        return (remat.scan(body, x, ws, **options)[0] ** 2).sum()

    ws = jax.ShapeDtypeStruct((12, 1024, 1024), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    report = remat.analyze(jax.grad(total), ws, x, target="h100")
    assert report.host_bytes == 3 * 8192 * 1024 * 2
