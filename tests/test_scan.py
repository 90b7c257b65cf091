"""`remat.scan` against `jax.lax.scan`: values, derivatives, transformations, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import remat
from remat._scan._segments import balanced
from tests.scan_programs import BODIES, assert_same, value_and_gradient

TOLERANCE = {"half": 2e-2}
LENGTHS = [*range(51), 97, 1000]


def assert_equals_lax(name, n, reverse, **options):
    def both():
        got = value_and_gradient(remat.scan, name, n, reverse=reverse, **options)
        return got, value_and_gradient(lax.scan, name, n, reverse=reverse)

    assert_same(*jax.jit(both)(), rtol=TOLERANCE.get(name, 3e-5))


@pytest.mark.parametrize("n", LENGTHS)
def test_equals_lax_scan_for_every_length(n):
    # Bodies, directions and levels take turns; `test_scan_sweep.py` has them all.
    name, levels = BODIES[n % 4], 1 + (n // 2) % 4
    assert_equals_lax(name, n, reverse=n % 3 == 0, segments=balanced(max(n, 1), levels))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "none"},
        {"policy": "everything"},
        {"segments": None},
        {"segments": 5, "unroll": 3},
        {"segments": (4, 3, 2), "unroll": True},
        {"max_saved": 8},
        {"offload_carry": True},
        {"offload_carry": True, "segments": None},
        {"offload_carry": True, "segments": (4, 3, 2), "policy": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", [pytest.param("counter", marks=pytest.mark.slow), "gate"]
)
def test_equals_lax_scan_with_every_option(name, options):
    assert_equals_lax(name, 23, reverse=False, **options)


@settings(deadline=None, max_examples=6)
@given(
    n=st.integers(0, 60),
    lengths=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    name=st.sampled_from(BODIES),
    reverse=st.booleans(),
    is_region=st.booleans(),
)
def test_equals_lax_scan_for_any_nest(n, lengths, name, reverse, is_region):
    outermost = -(-max(n, 1) // int(np.prod(lengths, dtype=int)))
    policy = "nothing" if is_region else "none"
    assert_equals_lax(name, n, reverse, segments=(outermost, *lengths), policy=policy)


# --- derivatives


def scalar(scan, x, xs, **options):
    last, ys = scan(lambda c, x: (jnp.sin(c * x) + x, c * x), x, xs, **options)
    return (last**2).sum() + (ys**3).sum()


DERIVATIVES = {
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "reverse twice": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), (0, 1)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_of_every_order(derivative):
    x, xs = jnp.arange(2.0) / 3, jnp.linspace(0.1, 1.0, 14).reshape(7, 2)
    of = DERIVATIVES[derivative]
    cut = functools.partial(scalar, remat.scan, segments=(2, 2, 2))
    got = jax.jit(of(cut))(x, xs)
    assert_same(got, jax.jit(of(functools.partial(scalar, lax.scan)))(x, xs), 1e-5)


def test_only_what_is_differentiated_is():
    x, xs = jnp.ones(2), jnp.ones((11, 2))
    for argnums in (0, 1):
        got = jax.grad(functools.partial(scalar, remat.scan), argnums)(x, xs)
        assert_same(
            got, jax.grad(functools.partial(scalar, lax.scan), argnums)(x, xs), 1e-5
        )


def test_closing_over_differentiated_arrays():
    def loss(scan, w):
        @jax.jit
        def inner(v):
            return scan(lambda c, _: (jnp.tanh(w @ c + v), None), w[0], None, 13)[0]

        return inner(2 * w[1]).sum()

    w = jnp.arange(9.0).reshape(3, 3) / 9
    got = jax.grad(functools.partial(loss, remat.scan))(w)
    assert_same(got, jax.grad(functools.partial(loss, lax.scan))(w), 1e-5)


# --- transformations


def test_vmap_over_carry_and_xs():
    xs = jnp.linspace(0.1, 1.0, 3 * 11 * 2).reshape(3, 11, 2)
    x = jnp.arange(6.0).reshape(3, 2) / 7

    def gradients(scan):
        one = jax.grad(functools.partial(scalar, scan), (0, 1))
        return (
            jax.vmap(one)(x, xs),
            jax.vmap(one, (None, 0))(x[0], xs),
            jax.vmap(one, (0, None))(x, xs[0]),
        )

    assert_same(
        jax.jit(gradients, static_argnums=0)(remat.scan), gradients(lax.scan), 1e-5
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_keep_their_sharding(axis_type):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(axis_type,))
    row, rows = NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "d"))
    x = jax.device_put(jnp.arange(4.0) / 4, row)
    xs = jax.device_put(jnp.linspace(0.1, 1, 44).reshape(11, 4), rows)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(functools.partial(scalar, remat.scan), (0, 1)))(x, xs)
        want = jax.jit(jax.grad(functools.partial(scalar, lax.scan), (0, 1)))(x, xs)
    assert_same(jax.device_get(got), jax.device_get(want), 1e-5)
    assert got[0].sharding.is_equivalent_to(want[0].sharding, 1)
    assert got[1].sharding.is_equivalent_to(want[1].sharding, 2)


def test_collectives_in_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def loss(scan, x):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P())
        def mapped(x):
            def body(c, x):
                return jnp.sin(c + x * lax.psum(c.mean(), "d")), c.sum()

            last, ys = scan(body, x, jnp.linspace(0, 1, 11))
            return lax.psum((last**2).sum() + ys.sum(), "d")

        return mapped(x)

    x = jnp.arange(4.0) / 4
    got = jax.jit(jax.grad(functools.partial(loss, remat.scan)))(x)
    assert_same(got, jax.jit(jax.grad(functools.partial(loss, lax.scan)))(x), 1e-5)


def test_without_jit_as_a_python_loop():
    with jax.disable_jit():
        got = remat.scan(lambda c, x: (c + x, c), 1.0, jnp.arange(5.0))
        want = lax.scan(lambda c, x: (c + x, c), 1.0, jnp.arange(5.0))
    assert_same(got, want, 1e-6)


# --- types and errors are those of lax.scan


@pytest.mark.parametrize("init", [0, 0.0, np.float32(1), jnp.int8(3)], ids=repr)
@pytest.mark.parametrize("segments", ["sqrt", (3, 3, 2), None])
def test_weak_and_promoted_carries(init, segments):
    def outcome(scan, **options):
        def run():
            return scan(lambda c, x: (c * 1.0 + x, c), init, jnp.ones(17), **options)

        try:
            return jax.tree.map(jax.typeof, jax.eval_shape(run))
        except TypeError as error:  # an int8 carry comes out as another type
            return str(error)

    assert outcome(remat.scan, segments=segments) == outcome(lax.scan)


@pytest.mark.parametrize(
    "call",
    [
        lambda scan: scan(lambda c, x: (c, c, c), 0.0, jnp.ones(9)),
        lambda scan: scan(lambda c, x: ((c, c), c), 0.0, jnp.ones(9)),
        lambda scan: scan(lambda c, x: (c, c), 0.0, (jnp.ones(9), jnp.ones(8))),
        lambda scan: scan(lambda c, x: (c, c), 0.0, jnp.ones(9), length=8),
        lambda scan: scan(lambda c, x: (c, c), 0.0),
        lambda scan: scan(lambda c, x: (c, c), 0.0, 1.0),
        lambda scan: scan(lambda c, x: (c, c), 0.0, jnp.ones(9), unroll=-1),
        lambda scan: scan(None, 0.0, jnp.ones(9)),
    ],
)
def test_errors_are_those_of_lax_scan(call):
    with pytest.raises(Exception) as wanted:
        call(lax.scan)
    with pytest.raises(type(wanted.value)) as given_error:
        call(remat.scan)
    assert str(given_error.value) == str(wanted.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"segments": (2, 2)},
            remat.SegmentsError,
            "holds 4 steps and the scan has 97",
        ),
        ({"max_saved": 2}, remat.SegmentsError, "give at least"),
        ({"max_saved": 0}, remat.SegmentsError, "at least 1 carry, got 0"),
        ({"policy": "nothin"}, remat.policies.PolicyError, "nothing"),
        ({"policy": ["a"]}, remat.policies.PolicyError, "got a list"),
    ],
)
def test_own_errors(options, error, message):
    with pytest.raises(error, match=message):
        remat.scan(lambda c, _: (c, None), 0.0, None, 97, **options)


def test_a_body_without_derivative_can_be_run():
    def body(c, _):
        def host(c):
            return np.asarray(c) + 1

        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), c), None

    assert float(remat.scan(body, 0.0, None, 10)[0]) == 10.0


def test_nothing_is_traced_per_step():
    n_traced = 0

    def body(c, x):
        nonlocal n_traced
        n_traced += 1
        return c + x, c

    jax.make_jaxpr(lambda: remat.scan(body, 0.0, jnp.ones(100)))()
    assert n_traced == 1
