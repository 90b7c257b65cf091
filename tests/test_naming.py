"""Naming intermediates, keeping any set of them, and listing what is kept."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from remat import policies
from remat._naming._naming import KeepMarked, NamingError, bind, keep, name_region
from remat._naming._residuals import residuals
from remat._regions._with_policy import find_regions, with_policy
from remat.policies import Decision
from tests.helpers import saved_residuals
from tests.planning_programs import (
    PROGRAMS,
    W,
    X,
    float_positions,
    keeping_table,
    loss_of,
    region_jaxpr,
    tanh_matmul,
)


def ids(fn, *args) -> list[str]:
    return list(name_region(region_jaxpr(fn, *args))[1])


def kept_by(fn, *args, **decisions) -> list[str]:
    loss = keeping_table(loss_of(fn), {k: Decision[v] for k, v in decisions.items()})
    return saved_residuals(loss, *args)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        query = checkpoint_name(nn.Dense(4, name="query")(x), "query_proj")
        return nn.Dense(4, name="out")(jnp.tanh(query))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        return x + Attention(name="attention")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.remat(Block)(name=f"layer_{i}")(x)
        return x


@pytest.fixture(scope="module")
def model():
    module = Model()
    variables = module.init(jax.random.key(0), X)

    def loss(variables, x):
        y: Any = module.apply(variables, x)
        return y.sum()

    return loss, variables


def test_labels_say_where_a_value_comes_from(model):
    loss, variables = model
    region = find_regions(loss, variables, X)[1]
    labels = name_region(region.jaxpr)[1]
    label = labels["attention.query:add"]
    assert label.module_path == "layer_1/attention/query"
    assert label.primitive == "add"
    assert label.checkpoint_name == "query_proj"
    assert (label.shape, label.dtype, label.bytes) == ((4, 4), "float32", 64)
    assert label.source is not None and label.source.startswith("test_naming.py:")


def test_equal_regions_have_equal_ids(model):
    loss, variables = model
    first, second = find_regions(loss, variables, X)
    assert list(name_region(first.jaxpr)[1]) == list(name_region(second.jaxpr)[1])


def test_ids_are_unique_numbered_and_stable():
    def fn(x):
        return jnp.sin(jnp.sin(x)) + jnp.sin(x)

    assert ids(fn, X) == ["sin", "sin.2", "sin.3", "add"]
    assert ids(fn, X) == ids(fn, X)


def test_prefix_stands_in_front():
    names = name_region(region_jaxpr(jnp.sin, X), prefix="r0/")[1]
    assert list(names) == ["r0/sin"]


@pytest.mark.parametrize("name", ["custom_vjp", "cond", "callback"])
def test_naming_changes_no_gradient(name):
    fn, args = PROGRAMS[name]
    loss = loss_of(fn)
    every = dict.fromkeys(ids(fn, *args), Decision.SAVE)
    named = keeping_table(loss, every)
    at = float_positions(args)
    wanted = jax.grad(loss, at)(*args)
    for want, got in zip(wanted, jax.grad(named, at)(*args), strict=True):
        assert (want == got).all()


@pytest.mark.parametrize("name", ["relu", "top_k"])
def test_named_regions_can_be_vmapped(name):
    fn, args = PROGRAMS[name]
    named = keeping_table(loss_of(fn), dict.fromkeys(ids(fn, *args), Decision.SAVE))
    batch = [jnp.stack([a, 2 * a]) for a in args]
    wanted = jax.vmap(jax.grad(loss_of(fn)))(*batch)
    assert jnp.allclose(jax.vmap(jax.grad(named))(*batch), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["silu", "relu"])
def test_named_regions_have_second_derivatives(name):
    fn, args = PROGRAMS[name]
    named = keeping_table(loss_of(fn), dict.fromkeys(ids(fn, *args), Decision.SAVE))
    wanted = jax.hessian(loss_of(fn))(*args)
    assert jnp.allclose(jax.hessian(named)(*args), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fn", "value"),
    [
        (lambda x: jnp.sin(jnp.tanh(jnp.sin(x))), "tanh"),
        (lambda x: jnp.exp(jnp.sin(x)) * x, "exp"),
        (lambda x: jax.nn.sigmoid(jnp.sin(x)), "logistic"),
        (lambda x: jax.lax.top_k(jnp.sin(x), 2)[0], "top_k[1]"),
    ],
)
def test_the_backward_pass_reads_the_named_value(fn, value):
    """Their rules read their own results: a name beside them would keep a twin."""
    table = {value: Decision.SAVE}
    jaxpr = jax.make_jaxpr(jax.grad(keeping_table(loss_of(fn), table)))(X)
    region = next(e for e in jaxpr.eqns if e.primitive.name == "remat2")
    again = {eqn.primitive.name for eqn in region.params["jaxpr"].eqns}
    assert value.split("[")[0] not in again


def test_without_settling_the_twin_is_computed_again():
    def fn(x):
        return jnp.sin(checkpoint_name(jnp.tanh(jnp.sin(x)), "t"))

    policy = jax.checkpoint_policies.save_only_these_names("t")

    def loss(x):
        return jax.checkpoint(fn, policy=policy)(x).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(X)
    region = next(e for e in jaxpr.eqns if e.primitive.name == "remat2")
    assert "tanh" in {eqn.primitive.name for eqn in region.params["jaxpr"].eqns}


def test_what_only_a_custom_rule_makes_can_be_kept():
    def fn(x, w):
        return jnp.sin(tanh_matmul(jnp.sin(x), w))

    assert "custom_vjp_call>cos" in ids(fn, X, W)
    table = {"custom_vjp_call>cos": Decision.SAVE, "sin": Decision.SAVE}
    loss = keeping_table(loss_of(fn), table)
    assert saved_residuals(loss, X, W) == [
        "named 'remat.save:custom_vjp_call>cos'",
        "named 'remat.save:sin'",
    ]


def test_names_in_loops_and_branches_are_honoured():
    fn, args = PROGRAMS["scan, all"]
    loss = keeping_table(loss_of(fn), {"tanh": Decision.SAVE, "sin": Decision.SAVE})
    kept = [r for r in residuals(loss, *args) if not r.is_argument]
    assert {(r.primitive, r.shape, r.times) for r in kept} >= {("tanh", (4, 4), 3)}
    fn, args = PROGRAMS["cond"]
    saved = keeping_table(loss_of(fn), {"tanh": Decision.SAVE, "exp": Decision.SAVE})
    assert len(saved_residuals(saved, *args)) > len(saved_residuals(loss_of(fn), *args))


def test_integers_bools_and_keys():
    fn, args = PROGRAMS["dropout"]
    labels = name_region(region_jaxpr(fn, *args))[1]
    dtypes = {label.dtype for label in labels.values()}
    assert {"bool", "uint32", "float32"} <= dtypes
    assert not any(dtype.startswith("key") for dtype in dtypes)
    loss = keeping_table(loss_of(fn), {"lt": Decision.SAVE})
    (mask,) = [r for r in residuals(loss, *args) if not r.is_argument]
    assert (mask.primitive, mask.dtype, mask.bytes) == ("lt", "bool", 16)


def test_values_can_go_to_the_host():
    kept = kept_by(lambda x, w: jnp.sin(x @ w), X, W, dot_general="OFFLOAD")
    assert len(kept) == 1 and kept[0].startswith("host ")


def test_unknown_ids_are_refused():
    jaxpr = region_jaxpr(jnp.sin, X)
    with pytest.raises(NamingError, match=r"no value 'sinn'.*'sin'"):
        keep(jaxpr, {"sinn": Decision.SAVE})


def test_programs_without_kept_values_stay_the_same_object():
    jaxpr = region_jaxpr(lambda x: jnp.sin(jnp.tanh(x)), X)
    assert keep(jaxpr, {})[0] is jaxpr


def test_the_policy_of_kept_names_is_hashable_and_picklable():
    policy = keep(region_jaxpr(jnp.sin, X), {"sin": Decision.SAVE})[1]
    assert pickle.loads(pickle.dumps(policy)) == policy == KeepMarked()
    assert hash(policy) == hash(KeepMarked())


def test_kept_values_show_in_compiled_programs(model):
    loss, variables = model
    table = {"attention:tanh": Decision.SAVE, "attention.query:add": Decision.SAVE}
    grad = jax.jit(jax.grad(keeping_table(loss, table)))
    text = grad.lower(variables, X).compile().as_text() or ""
    assert "layer_1/attention/query/keep=query_proj/" in text
    assert "layer_0/attention/keep=attention:tanh/" in text


def test_bind_applies_rules_by_module(model):
    loss, variables = model
    policy = policies.save(policies.in_module("attention/query"))
    bound = with_policy(loss, policy)
    kept = [r for r in residuals(bound, variables, X) if not r.is_argument]
    at_query = [r for r in kept if r.module_path.endswith("attention/query")]
    assert len(at_query) == 2  # one a layer: the sum that tanh reads
    for want, got in zip(
        jax.tree.leaves(jax.grad(loss)(variables, X)),
        jax.tree.leaves(jax.grad(bound)(variables, X)),
        strict=True,
    ):
        assert (want == got).all()


def test_bind_tells_a_policy_all_it_knows():
    seen = []

    class Spy:
        def decide(self, value):
            seen.append(value)
            return Decision.RECOMPUTE

    def fn(x, w):
        return checkpoint_name(jnp.sin(x @ w), "h") @ w

    bind(Spy(), region_jaxpr(fn, X, W), region_path="block", layer=3, n_layers=9)
    product, sine, second = seen
    assert (product.primitive, product.ordinal, product.bytes) == ("dot_general", 0, 64)
    assert (sine.aliases, sine.layer, sine.n_layers) == (("h",), 3, 9)
    assert (second.ordinal, second.region_path) == (1, "block")


def test_regions_inside_shard_map_can_be_kept_from():
    mesh = Mesh(jax.devices()[:2], ("x",))
    region = jax.checkpoint(lambda x, w: jnp.sin(jax.lax.psum(jnp.tanh(x @ w), "x")))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(
        region, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec()
    )

    def loss(x, w):
        return mapped(x, w).sum()

    kept = keeping_table(loss, {"tanh": Decision.SAVE})
    assert len(saved_residuals(kept, X, W)) > len(saved_residuals(loss, X, W))
    assert jnp.allclose(jax.grad(kept)(X, W), jax.grad(loss)(X, W))


# --- residuals


def test_residuals_without_regions():
    found = residuals(lambda x, w: jnp.sin(x @ w).sum(), X, W)
    cosine = next(r for r in found if not r.is_argument)
    assert (cosine.primitive, cosine.bytes, cosine.times) == ("cos", 64, 1)
    assert cosine.why.startswith("read by mul")
    assert {r.label for r in found} == {"argument: args[0]", "argument: args[1]", "cos"}


def test_residuals_name_pytree_arguments():
    found = residuals(lambda p, x: jnp.sin(x @ p["w"]).sum(), {"w": W}, x=X)
    labels = {r.label for r in found}
    assert {"argument: args[0]['w']", "argument: kwargs['x']"} <= labels


def test_residuals_count_scan_steps():
    region = jax.checkpoint(lambda h, w: jnp.sin(h @ w))

    def loss(ws, h):
        return jax.lax.scan(lambda h, w: (region(h, w), None), h, ws)[0].sum()

    (carry,) = [r for r in residuals(loss, jnp.stack([W] * 5), X) if not r.is_argument]
    assert carry.label == "carry of a scan"
    assert (carry.shape, carry.times, carry.bytes) == ((4, 4), 5, 5 * 64)
    assert carry.why.startswith("read by the recomputed dot_general")


def test_residuals_follow_the_policy(model):
    loss, variables = model

    def kept(policy):
        return {
            r.label
            for r in residuals(with_policy(loss, policy), variables, X)
            if not r.is_argument and r.module_path
        }

    assert "Model/layer_1/attention/query: dot_general" in kept("save_dots")
    assert "Model/layer_1/attention/query: dot_general" not in kept("nothing")


def test_residuals_allocate_nothing():
    big = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    (sine, argument) = sorted(
        residuals(lambda x: (jnp.sin(x) * jnp.cos(x)).sum(), big),
        key=lambda r: r.label,
    )[-2:]
    assert {sine.bytes, argument.bytes} == {4 << 40}


# --- flash attention


@pytest.mark.slow
def test_a_flash_kernel_is_not_run_again():
    from jax.experimental.pallas.ops.tpu import flash_attention

    from remat import target

    v5e = target("v5e")
    if reason := v5e.why_not():
        pytest.skip(reason)
    heads, dim = 2, 128

    def block(w, x):
        q, k, v = ((x @ w[i]).reshape(1, 512, heads, dim) for i in range(3))
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        out = flash_attention.flash_attention(q, k, v, causal=True, sm_scale=0.1)
        return x + jnp.tanh(out.transpose(0, 2, 1, 3).reshape(x.shape) @ w[3])

    sharding = v5e.sharding()

    def shape(*s):
        return jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding)

    args = shape(4, 256, 256), shape(1, 512, 256)
    labels = name_region(region_jaxpr(block, *args))[1]
    kernel = {i: Decision.SAVE for i in labels if i.startswith("custom_vjp_call")}
    assert len(kernel) == 3  # the result and, of the softmax, maxima and sums

    def loss(*a):
        return jnp.sum(jax.checkpoint(block)(*a).astype(jnp.float32) ** 2)

    def n_kernels(loss):
        traced = jax.jit(jax.value_and_grad(loss)).trace(*args)
        lowered = traced.lower(lowering_platforms=("tpu",))
        return (lowered.compile().as_text() or "").count('"tpu_custom_call"')

    assert n_kernels(loss) == 4
    assert n_kernels(keeping_table(loss, kernel)) == 3
