"""`with_policy` on random programs: gradients stay as they were."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat

STEPS = {
    "dot": lambda v, w, n: (jnp.tanh(w @ v), w, n),
    "sin": lambda v, w, n: (jnp.sin(v) + 0.5, w, n),
    "outer": lambda v, w, n: (v, jnp.cos(w) * jnp.outer(v, v), n),
    "swap": lambda v, w, n: (w[0], w.T + v, n),
    "index": lambda v, w, n: (v * v[n % 3], w, n),
    "count": lambda v, w, n: (v, w, n + (v.sum() > 0)),
    "where": lambda v, w, n: (jnp.where((v > 0) & (n > 1), v, 2 * v), w, n),
    "name": lambda v, w, n: (checkpoint_name(v, "named"), w, n),
    "forget": lambda v, w, n: (jnp.ones(3) * n, w, n),
}
"""What one step makes of a vector, a matrix and a count."""


def run(program, state):
    """Run a random program on a vector, a matrix and a count."""
    for step in program:
        state = run_step(step, state)
    return state


def run_step(step, state):
    if isinstance(step, str):
        return STEPS[step](*state)
    kind, body = step[0], step[1]
    if kind == "jit":
        return jax.jit(lambda state: run(body, state))(state)
    if kind == "checkpoint":
        return run_region(body, state)
    if kind == "scan":
        return run_scan(body, state)
    other = step[2]
    return jax.lax.cond(
        state[0].sum() > 0, lambda s: run(body, s), lambda s: run(other, s), state
    )


def run_region(body, state):
    """A region with an unused input, a literal output, and a pytree of outputs."""

    @jax.checkpoint
    def region(inputs, unused):
        v, w, n = run(body, (inputs["v"], inputs["w"], inputs["n"]))
        return {"v": v, "w": w, "n": n}, inputs["v"], 1.0

    v, w, n = state
    out, _, one = region({"v": v, "w": w, "n": n}, jnp.arange(2))
    return out["v"] * one, out["w"], out["n"]


def run_scan(body, state):
    def one(carry, x):
        v, w, n = run(body, carry)
        return (v + x, w, n), v

    state, ys = jax.lax.scan(one, state, jnp.array([0.5, -0.5]))
    return state[0] + ys.sum(0), state[1], state[2]


steps = st.recursive(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    lambda bodies: st.lists(
        st.one_of(
            st.sampled_from(sorted(STEPS)),
            st.tuples(st.sampled_from(["jit", "checkpoint", "scan"]), bodies),
            st.tuples(st.just("cond"), bodies, bodies),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=6,
)
policies = st.sampled_from(["none", "nothing", "save_dots", "everything"])


def check(body, policy):
    program = [("checkpoint", body), "sin", ("checkpoint", ["dot"])]

    def loss(v, w, n):
        v, w, n = run(program, (v, w, n))
        return v.sum() + (w**2).mean(), {"n": n, "label": "text"}

    args = (
        jnp.array([0.3, -0.7, 1.1]),
        jnp.arange(9.0).reshape(3, 3) / 9,
        jnp.int32(1),
    )

    @jax.jit
    def both(*args):
        changed = remat.with_policy(loss, policy)
        expected, aux = jax.grad(loss, (0, 1), has_aux=True)(*args)
        actual, changed_aux = jax.grad(changed, (0, 1), has_aux=True)(*args)
        assert changed_aux["label"] == "text"
        return (expected, aux["n"]), (actual, changed_aux["n"])

    expected, actual = both(*args)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5 * scale)


relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(relaxed, max_examples=8)
@given(body=steps, policy=policies)
def test_gradients_of_random_programs(body, policy):
    check(body, policy)


@pytest.mark.slow
@settings(relaxed, max_examples=100)
@given(body=steps, policy=policies)
def test_gradients_of_many_random_programs(body, policy):
    check(body, policy)
