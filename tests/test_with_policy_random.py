"""`with_policy` on random programs: gradients stay as they were."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import remat
from remat import policies, testing
from remat._lint._program import Traced
from tests.grid_oracle import decisions
from tests.random_policies import NAMES, bound


@jax.custom_vjp
def ruled(v, w):
    return jnp.tanh(w @ v)


def ruled_forward(v, w):
    out = jnp.tanh(w @ v)
    return out, (v, w, 1 - out * out)


def ruled_backward(kept, g):
    v, w, slope = kept
    return w.T @ (g * slope), jnp.outer(g * slope, v)


ruled.defvjp(ruled_forward, ruled_backward)

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
    "reduce": lambda v, w, n: (v - v.mean() + w.max(0), w, n + w.argmax() % 3),
    "softmax": lambda v, w, n: (jax.nn.softmax(v), w, n),
    "top_k": lambda v, w, n: (v * jax.lax.top_k(v, 1)[0], w, n),
    "ruled": lambda v, w, n: (ruled(v, w), w, n),
    "relu": lambda v, w, n: (jax.nn.relu(v) - v / 3, w, n),
    "half": lambda v, w, n: (v.astype(jnp.bfloat16).astype(v.dtype) + v / 2, w, n),
    **{
        f"name {name}": lambda v, w, n, name=name: (
            checkpoint_name(jnp.sin(v), name),
            checkpoint_name(w @ w / 3, name),
            n,
        )
        for name in NAMES
    },
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
    if kind == "scope":
        with jax.named_scope("inner"):
            return run(body, state)
    if kind == "vmap":
        return run_vmap(body, state)
    if kind == "shard":
        return run_shard(body, state)
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


def run_vmap(body, state):
    v, w, n = state
    vs = jax.vmap(lambda v: run(body, (v, w, n))[0])(jnp.stack([v, -v]))
    return vs.sum(0), w, n


def run_shard(body, state):
    """Each of eight devices runs the body on rows of its own."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    rows, whole = PartitionSpec("x"), PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows
    )
    def shards(vs, w, n):
        out, *_ = run_region(body, (vs[0], w, n))
        return (out + jax.lax.psum(vs[0], "x") / 8)[None]

    v, w, n = state
    return shards(jnp.stack([v * k / 8 for k in range(8)]), w, n).mean(0), w, n


steps = st.recursive(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    lambda bodies: st.lists(
        st.one_of(
            st.sampled_from(sorted(STEPS)),
            st.tuples(
                st.sampled_from(["jit", "checkpoint", "scan", "scope", "vmap"]), bodies
            ),
            st.tuples(st.just("cond"), bodies, bodies),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=6,
)
ARGS = (
    jnp.array([0.3, -0.7, 1.1]),
    jnp.arange(9.0).reshape(3, 3) / 9,
    jnp.int32(1),
)


def loss_of(body):
    program = [("checkpoint", body), "sin", ("checkpoint", ["dot"])]

    def loss(v, w, n):
        v, w, n = run(program, (v, w, n))
        return v.sum() + (w**2).mean(), {"n": n, "label": "text"}

    return loss


def applied(loss, policy):
    """The loss under a policy; None where the policy names what nothing emits."""
    changed = remat.with_policy(loss, policy)
    try:
        jax.eval_shape(lambda *args: changed(*args)[0], *ARGS)
    except remat.NoNamesFound:
        return None
    return changed


def assert_close(actual, expected):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5 * scale)


def check_gradients(body, policy):
    loss = loss_of(body)
    changed = applied(loss, policy)
    if changed is None:
        return

    @jax.jit
    def both(*args):
        expected, aux = jax.grad(loss, (0, 1), has_aux=True)(*args)
        actual, changed_aux = jax.grad(changed, (0, 1), has_aux=True)(*args)
        assert changed_aux["label"] == "text"
        return (expected, aux["n"]), (actual, changed_aux["n"])

    expected, actual = both(*ARGS)
    assert_close(actual, expected)


def check_second_derivatives(body, policy):
    """Of the gradient along itself; offloading and these do not go together in JAX."""
    loss = loss_of([step for step in body if step != "ruled"])
    changed = applied(loss, policy)
    if changed is None or policy.offloads:
        return

    def curved(fn, *args):
        grad = jax.grad(lambda v, w: fn(v, w, args[2])[0], (0, 1))
        return jax.jvp(grad, args[:2], args[:2])[1]

    both = jax.jit(lambda *args: (curved(changed, *args), curved(loss, *args)))
    assert_close(*both(*ARGS))


def check_saves_what_it_says(body, policy):
    """What is kept beyond inputs is made by what the policy says it keeps.

    A function with a derivative rule is one value to a policy, which a residual shows
    as what was computed last: programs without these tell more.
    """
    assume(not any(step in repr(body) for step in RULED))
    loss = loss_of(body)
    changed = applied(loss, policy)
    if changed is None:
        return
    allowed = set()
    for linted in Traced.of(loss, ARGS, {}).under("nothing").regions:
        kept = decisions(linted, policy)
        for value, decision in kept.items():
            maker = linted.flow.makers.get(value)
            on_host = decision is policies.Decision.OFFLOAD
            dtype = str(linted.flow.flow.values[value].aval.dtype)
            allowed.add((made_by(linted.flow, maker), dtype, on_host))
    for residual in testing._kept_beyond_nothing(loss, policy, ARGS, {}):
        if residual.primitive in (None, "cond", "while", "scan"):
            continue  # a branch's or a loop's result: its parts were asked about
        found = (residual.primitive, residual.dtype, residual.on_host)
        assert found in allowed, (policy, residual)


def made_by(flow, position):
    """The primitive that makes a value, looked for through names and moves."""
    while position is not None:
        equation = flow.equation(position)
        if not equation.moves and equation.eqn.primitive.name not in COPIES:
            return equation.eqn.primitive.name
        position = flow.makers.get(equation.operands[0]) if equation.operands else None
    return None


RULED = ("ruled", "relu", "softmax")
COPIES = ("name", "reduce_precision", "copy", "copy_p")

# A rule of the user's own must say itself how it is sharded.
ON_DEVICES = sorted(set(STEPS) - {"ruled"})

relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
slow = pytest.mark.slow
pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.MissingNamesWarning"),
    pytest.mark.filterwarnings("ignore::remat.UnmatchedRuleWarning"),
]


@settings(relaxed, max_examples=8)
@given(body=steps, policy=bound)
def test_gradients_of_random_programs(body, policy):
    check_gradients(body, policy)


@slow
@settings(relaxed, max_examples=150)
@given(body=steps, policy=bound)
def test_gradients_of_many_random_programs(body, policy):
    check_gradients(body, policy)


@settings(relaxed, max_examples=3)
@given(body=steps, policy=bound)
def test_second_derivatives_of_random_programs(body, policy):
    check_second_derivatives(body, policy)


@slow
@settings(relaxed, max_examples=60)
@given(body=steps, policy=bound)
def test_second_derivatives_of_many_random_programs(body, policy):
    check_second_derivatives(body, policy)


@settings(relaxed, max_examples=15)
@given(body=steps, policy=bound)
def test_random_programs_save_what_the_policy_says(body, policy):
    check_saves_what_it_says(body, policy)


@slow
@settings(relaxed, max_examples=300)
@given(body=steps, policy=bound)
def test_many_random_programs_save_what_the_policy_says(body, policy):
    check_saves_what_it_says(body, policy)


@settings(relaxed, max_examples=2)
@given(body=st.lists(st.sampled_from(ON_DEVICES), min_size=1), policy=bound)
def test_random_programs_on_eight_devices(body, policy):
    check_gradients([("shard", body)], policy)


@slow
@settings(relaxed, max_examples=40)
@given(body=st.lists(st.sampled_from(ON_DEVICES), min_size=1), policy=bound)
def test_many_random_programs_on_eight_devices(body, policy):
    check_gradients([("shard", body)], policy)
