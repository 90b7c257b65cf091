"""The graph of a region says exactly what JAX then keeps and computes again."""

import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat import target
from remat._plan._graph import GraphError, build_graph
from remat._plan._prices import Prices
from remat._plan._solve import Choice, Solver, evaluate
from remat._regions._with_policy import find_regions
from tests.planning_programs import (
    PROGRAMS,
    W,
    X,
    float_positions,
    keeping,
    kept_bytes,
    live_flops,
    loss_of,
    region_jaxpr,
)

V5E = target("v5e")
FLOPS = Prices(flop=1.0)


def graph_of(fn, *args):
    return build_graph(region_jaxpr(fn, *args), V5E)


def check_exact(fn, args, choice: Choice) -> None:
    """Tracing the gradient shows the predicted bytes and FLOPs, and equal numbers."""
    loss, at = loss_of(fn), float_positions(args)
    planned = keeping(loss, choice)
    plain = jax.value_and_grad(lambda *a: jnp.sum(fn(*a)), at)
    extra = live_flops(jax.value_and_grad(planned, at), *args)
    assert extra - live_flops(plain, *args) == choice.recompute_flops
    assert kept_bytes(planned, *args) - kept_bytes(loss, *args) == choice.bytes


def check_gradients(fn, args, choice: Choice) -> None:
    loss, at = loss_of(fn), float_positions(args)
    wanted = jax.grad(loss, at)(*args)
    got = jax.grad(keeping(loss, choice), at)(*args)
    for want, have in zip(wanted, got, strict=True):
        assert (want == have).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_solved_choices_are_what_jax_does(name):
    fn, args = PROGRAMS[name]
    graph = graph_of(fn, *args)
    solver = Solver(graph, FLOPS)
    everything = solver.solve(1 << 40)
    for share in (0.0, 0.4, 1.0):
        check_exact(fn, args, solver.solve(int(share * everything.bytes)))
    check_gradients(fn, args, solver.solve(everything.bytes // 2))


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_choice_is_what_jax_does(name):
    fn, args = PROGRAMS[name]
    graph = graph_of(fn, *args)
    for seed in range(2):
        pick = random.Random(seed)
        saved = frozenset(i for i in sorted(graph.ids()) if pick.random() < 0.4)
        check_exact(fn, args, evaluate(graph, FLOPS, saved))


_UNARY = (jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.silu, jnp.exp, jax.nn.softmax)


@st.composite
def random_programs(draw):
    """A few products, element-wise functions, reductions and loops on 4 x 4 arrays."""
    kinds = ["unary", "matmul", "add", "mul", "mean", "scan", "topk", "jit"]
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.integers(0, 99), st.integers(0, 99)),
            min_size=2,
            max_size=7,
        )
    )

    def fn(x, w):
        made = [x, w]
        for kind, i, j in steps:
            a, b = made[i % len(made)], made[j % len(made)]
            made.append(_step(kind, i, a, b))
        return sum(made[2:]) * 0.1

    return fn


def _step(kind, i, a, b):
    unary = _UNARY[i % len(_UNARY)]
    if kind == "unary":
        return unary(0.1 * a)
    if kind == "jit":
        return jax.jit(unary)(0.1 * a)
    if kind == "matmul":
        return a @ b
    if kind == "mean":
        return a - a.mean(axis=-1, keepdims=True)
    if kind == "topk":
        return a + jax.lax.top_k(b, 2)[0].sum()
    if kind == "scan":
        return jax.lax.scan(lambda c, v: (jnp.sin(c @ a) + v, None), a, a[:2])[0]
    return a + b if kind == "add" else a * b


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(random_programs(), st.integers(0, 1000))
def test_random_programs_and_choices(fn, seed):
    graph = graph_of(fn, X, W)
    pick = random.Random(seed)
    saved = frozenset(i for i in sorted(graph.ids()) if pick.random() < 0.5)
    choice = evaluate(graph, FLOPS, saved)
    loss = loss_of(fn)
    planned = keeping(loss, choice)
    assert kept_bytes(planned, X, W) - kept_bytes(loss, X, W) == choice.bytes
    plain = jax.value_and_grad(lambda *a: jnp.sum(fn(*a)), (0, 1))
    extra = live_flops(jax.value_and_grad(planned, (0, 1)), X, W)
    assert extra - live_flops(plain, X, W) == choice.recompute_flops


def test_required_values_and_their_readers():
    graph = graph_of(lambda x, w: jnp.sin(x @ w) @ w, X, W)
    named = {
        graph.values[v].id: graph.readers[v]
        for v in graph.required
        if graph.values[v].id
    }
    assert list(named) == ["sin"]  # the second product's operand
    assert named["sin"].startswith("dot_general (test_plan_graph.py:")


def test_what_is_not_differentiated_requires_less():
    fn = PROGRAMS["mlp"][0]
    jaxpr = region_jaxpr(fn, X, W)
    both = build_graph(jaxpr, V5E)
    only_x = build_graph(jaxpr, V5E, active=(True, False))
    assert len(only_x.required) < len(both.required)


def test_loops_count_their_steps():
    fn, args = PROGRAMS["scan, carry"]
    graph = graph_of(fn, *args)
    (product,) = (e for e in graph.equations if e.primitive == "dot_general")
    assert product.flops == 3 * 2 * 4**3
    tanh = next(v for v in graph.values if v.id == "tanh")
    assert tanh.bytes == 3 * 64


def test_what_no_step_changes_counts_once():
    def fn(x, w):
        step = lambda c, _: (jnp.sin(c @ jnp.tanh(w)), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=5)[0]

    graph = graph_of(fn, X, W)
    size = {v.id: v.bytes for v in graph.values}
    assert (size["tanh"], size["dot_general"]) == (64, 5 * 64)


def test_inner_regions_are_part_of_the_graph():
    inner = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)))
    graph = graph_of(lambda x: jnp.exp(inner(x)), X)
    assert {"tanh", "sin", "exp"} <= graph.ids()


def test_regions_that_need_a_mesh_say_so():
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(jax.devices()[:2], ("x",))
    region = jax.checkpoint(lambda x: jnp.sin(jax.lax.psum(jnp.tanh(x), "x")))
    mapped = jax.shard_map(
        region, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
    )
    (found,) = find_regions(lambda x: mapped(x).sum(), X)
    with pytest.raises(GraphError, match="inside a shard_map"):
        build_graph(found.jaxpr, V5E)


def test_regions_around_a_shard_map_count_all_devices():
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(jax.devices()[:2], ("x",))
    mapped = jax.shard_map(
        lambda x: jnp.tanh(jnp.sin(x)),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
    )
    graph = graph_of(lambda x: mapped(x) * 2, X)
    sine = next(v for v in graph.values if v.id == "tanh")
    assert sine.bytes == 64  # two halves of 32


def test_times_and_flops_follow_the_target():
    big = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    graph = graph_of(lambda x, w: jnp.sin(x @ w), big, big)
    assert graph.forward_matmul_flops == 2 * 1024**3
    assert graph.forward_s >= 2 * 1024**3 / V5E.flops_bf16


def test_what_only_a_fused_kernel_holds_has_a_price_on_gpus():
    """XLA for GPUs makes one kernel of a softmax, which keeping its parts takes apart;
    the product that it reads and the probabilities that it writes are free."""

    def attention(w, x):
        scores = jnp.where(x > 0, x @ w, -1e9)
        return jax.nn.softmax(scores.astype(jnp.float32)) @ w

    args = jnp.ones((64, 64)), jnp.ones((32, 64))
    on_gpu = build_graph(region_jaxpr(attention, *args), target("h100"))
    dear = {value.id for value in on_gpu.values if value.id and value.keep_s}
    assert {"reduce_max", "sub", "exp", "reduce_sum", "select_n"} <= dear
    assert not dear & {"dot_general", "div", "dot_general.2"}
    on_tpu = build_graph(region_jaxpr(attention, *args), V5E)
    assert not any(value.keep_s for value in on_tpu.values)
