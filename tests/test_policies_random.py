"""Random policies on random programs: the same gradients, and no more is kept."""

import re

import chex
import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from remat import policies
from remat.policies import Decision, Value
from tests.helpers import saved_residuals
from tests.random_policies import NAMES, anything

STEPS = {
    "sin": jnp.sin,
    "exp": lambda x: jnp.exp(-(x**2)),
    "dot": lambda x: x @ x,
    "batched": lambda x: jax.lax.dot_general(x, x, (((), ()), ((0, 1), (0, 1)))),
    "scale": lambda x: x / (1 + jnp.abs(x).max()),
    "sum": lambda x: x + x.sum(axis=0),
    "choose": lambda x: x * x.argmax(axis=0),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "scan": lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c) * y, y), x[0], x)[1] + x,
    **{name: lambda x, name=name: checkpoint_name(x, name) for name in NAMES},
}

unbound = anything.filter(lambda policy: not policy.needs_binding)
programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)


def run(steps, x):
    for step in steps:
        x = STEPS[step](x)
    return x.sum()


@given(anything)
def test_text_is_read_back(policy):
    assert policies.parse(repr(policy)) == policy


@given(anything, st.sampled_from(NAMES), st.sampled_from(["name", "sin", "argmax"]))
def test_known_before_any_value_is_seen(policy, name, primitive):
    value = Value(primitive=primitive, name=name if primitive == "name" else None)
    decided = policy.decide(value)
    if decided is not Decision.RECOMPUTE:
        assert policy.primitives is None or primitive in policy.primitives
    if decided is Decision.OFFLOAD:
        assert policy.offloads


@settings(max_examples=60, deadline=None)
@given(unbound, programs)
def test_saves_only_what_it_says(policy, steps):
    region = jax.checkpoint(lambda x: run(steps, x), policy=policy)
    for residual in saved_residuals(region, jnp.eye(3)):
        what = re.fullmatch(r"(host )?(?:named '(\w+)'|output of (\w+))", residual)
        assert what, residual
        host, name, primitive = what.groups()
        if host:
            assert policy.offloads
        elif primitive not in ("dot_general", "scan", "cond", "jit", "pjit"):
            value = Value(primitive=primitive or "name", name=name)
            assert policy.decide(value) is Decision.SAVE, residual


@settings(max_examples=15, deadline=None)
@given(unbound, programs)
def test_gradients_stay(policy, steps):
    x = jnp.linspace(-1, 1, 9).reshape(3, 3)
    region = jax.checkpoint(lambda x: run(steps, x), policy=policy)
    kept, plain = (jax.grad(fn)(x) for fn in (region, lambda x: run(steps, x)))
    chex.assert_trees_all_close(kept, plain, rtol=1e-4, atol=1e-5)
