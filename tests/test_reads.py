"""Which equations of a region read one of its inputs."""

import jax
import jax.numpy as jnp
import pytest

from remat import _jax_compat as compat
from remat._naming._reads import reading_inputs

X = jnp.ones((3, 3))


def products(jaxpr):
    """Every product in a jaxpr, in program order, inner ones included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in compat.subjaxprs(eqn.params):
            yield from products(compat.open_jaxpr(inner))


def through_scan(w, x):
    def body(carry, weight):
        return carry @ carry, jnp.sin(carry) @ weight

    return jax.lax.scan(body, x, w[None])


def through_cond(w, x):
    return jax.lax.cond(True, lambda w, y: y @ w, lambda w, y: y @ y, w, jnp.sin(x))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda w, x: jnp.sin(x) @ w, [True]),
        (lambda w, x: jnp.sin(x) @ jnp.sin(x), [False]),
        (lambda w, x: jnp.sin(x) @ w.T.astype("bfloat16").reshape(3, 3), [True]),
        (lambda w, x: jnp.sin(x) @ (2 * w), [False]),
        (lambda w, x: jax.jit(lambda v: jnp.sin(x) @ v)(w), [True]),
        (lambda w, x: jnp.sin(x) @ jax.jit(lambda v: v.T)(w), [True]),
        (lambda w, x: jax.checkpoint(lambda v: jnp.sin(x) @ v)(w), [True]),
        (through_scan, [False, True]),
        (through_cond, [False, True]),
    ],
)
def test_products_that_read_an_input(fn, expected):
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(fn)(X, X))
    reading = reading_inputs(jaxpr)
    assert [id(eqn) in reading for eqn in products(jaxpr)] == expected
