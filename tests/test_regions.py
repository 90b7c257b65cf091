"""`find_regions`: which regions, where, and what they are called."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import _jax_compat as compat
from remat._regions._fingerprint import fingerprint
from remat._regions._rewrite import rewrite_equations
from remat._regions._with_policy import rewrite_regions
from tests.region_programs import (
    WS,
    D,
    LinenNet,
    X,
    block,
    branched,
    equinox,
    fori,
    haiku,
    jitted_inside,
    layer,
    linen_scanned,
    linen_unrolled,
    nested,
    nnx_functional,
    ruled,
    scanned,
    sharded,
    unrolled,
)


def regions_of(program):
    loss, args = program()
    return remat.find_regions(loss, *args)


# --- which, and where


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (unrolled, [("block", 1, "straight line", 0)] * 3),
        (scanned, [("block", 3, "scan", 0)]),
        (fori, [("block", 3, "scan", 0)]),
        (branched, [("block", 1, "straight line", 0)] * 2),
        (jitted_inside, [("block", 1, "straight line", 0)] * 3),
        (sharded, [("block", 1, "straight line", 0)] * 2),
        (
            nested,
            [
                ("pair", 1, "straight line", 0),
                ("pair/block", 1, "straight line", 1),
                ("pair/block", 1, "straight line", 1),
            ],
        ),
        (linen_scanned, [("LinenNet/layers", 2, "scan", 0)]),
        (
            linen_unrolled,
            [
                ("LinenNet/h_0", 1, "straight line", 0),
                ("LinenNet/h_1", 1, "straight line", 0),
            ],
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_places(program, expected):
    regions = regions_of(program)
    assert [(r.path, r.times, r.context, r.depth) for r in regions] == expected
    assert [r.index for r in regions] == list(range(len(regions)))
    assert all(r.reachable for r in regions)


@pytest.mark.parametrize("program", [nnx_functional, equinox, haiku])
def test_every_framework_has_its_regions(program):
    regions = regions_of(program)
    assert len(regions) == 2
    assert all("region_programs.py:" in str(r.source) for r in regions)


def test_a_region_without_names_is_called_by_its_line():
    assert {r.path for r in regions_of(nnx_functional)} == {
        r.source for r in regions_of(nnx_functional)
    }


def test_scopes_name_a_region():
    def fn(w, x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            x = layer(w, x)

        @jax.checkpoint
        def _anonymous(x):
            with jax.named_scope("attention"):
                return jnp.sin(jnp.sin(x))

        return _anonymous(x)

    paths = [r.path for r in remat.find_regions(fn, WS[0], X)]
    assert paths == ["outer/inner/block", "attention"]


def test_linen_methods_do_not_show():
    class Net(nn.Module):
        def setup(self):
            self.inner = nn.remat(nn.Dense, methods=["__call__"])(D)

        def hidden(self, x):
            return self.inner(x)

        def __call__(self, x):
            return self.hidden(x)

    net = Net()
    params = net.init(jax.random.key(0), X)
    (region,) = remat.find_regions(net.apply, params, X)
    assert region.path == "Net/inner"


# --- contexts


def scan_of(length, **kwargs):
    def fn(w, x):
        def body(h, _):
            return layer(w, h), None

        return jax.lax.scan(body, x, None, length=length, **kwargs)[0]

    return fn


def while_of(fn):
    def looped(w, x):
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: fn(w, h), x)

    return looped


def scan_in_scan(w, x):
    return jax.lax.scan(lambda h, _: (scan_of(3)(w, h), None), x, None, length=2)[0]


def cond_in_scan(w, x):
    def body(h, _):
        return jax.lax.cond(h.sum() > 0, layer, lambda w, h: h, w, h), None

    return jax.lax.scan(body, x, None, length=2)[0]


@pytest.mark.parametrize(
    ("fn", "context", "times"),
    [
        (layer, "straight line", 1),
        (scan_of(4), "scan", 4),
        (scan_of(4, unroll=2), "unrolled scan", 4),
        (scan_of(4, unroll=True), "unrolled scan", 4),
        (scan_of(1), "straight line", 1),
        (while_of(layer), "loop", 1),
        (while_of(scan_of(2)), "scan", 2),
        (scan_in_scan, "scan", 6),
        (cond_in_scan, "scan", 2),
        (jax.jit(scan_of(4)), "scan", 4),
    ],
)
def test_contexts(fn, context, times):
    (region,) = remat.find_regions(fn, WS[0], X)
    assert (region.context, region.times) == (context, times)


# --- what a region says of itself


def test_fields():
    policy = jax.checkpoint_policies.dots_saveable
    fn = jax.checkpoint(block, policy=policy, prevent_cse=False)
    (region,) = remat.find_regions(fn, WS[0], X)
    assert region.policy is policy
    assert region.prevent_cse is False
    assert region.emitted_names == ("mid",)
    assert region.n_equations == 6  # 2 products, sin, name, tanh, add
    assert len(region.jaxpr.eqns) == 6
    assert regions_of(unrolled)[0].policy is None
    assert regions_of(unrolled)[0].prevent_cse is True


def test_names_in_nested_programs_and_rules_are_found():
    @jax.custom_vjp
    def attention(x):
        return checkpoint_name(x, "only_without_gradient")

    attention.defvjp(
        lambda x: (checkpoint_name(jnp.sin(x), "in_rule"), x), lambda x, g: (g,)
    )

    @jax.checkpoint
    def fn(x):
        x = jax.jit(lambda x: checkpoint_name(x * 2, "in_jit"))(x)
        return attention(jax.nn.silu(checkpoint_name(x, "outside")))

    (region,) = remat.find_regions(fn, X)
    assert region.emitted_names == ("in_jit", "outside", "in_rule")


def test_shapes_are_enough_and_nothing_runs():
    def loss(ws, x):
        jax.debug.callback(lambda: pytest.fail("was run"))
        return scanned()[0](ws, x)

    huge = jax.ShapeDtypeStruct((3, 2**20, 2**20), jnp.float32)
    x = jax.ShapeDtypeStruct((2, 2**20), jnp.float32)
    (region,) = remat.find_regions(loss, huge, x)
    assert "f32[1048576,1048576]" in str(region.jaxpr)


def test_no_regions_is_an_empty_tuple():
    assert remat.find_regions(block, WS[0], X) == ()


def test_static_and_keyword_arguments():
    net = LinenNet(scan=False)
    params = net.init(jax.random.key(0), X, False)
    assert len(remat.find_regions(net.apply, params, X, train=False)) == 2


# --- what a rewrite cannot change


@jax.custom_vjp
def fused(w, x):
    return layer(w, x)


def fused_forward(w, x):
    return layer(w, x), (w, x)


def fused_backward(operands, g):
    return jax.vjp(layer, *operands)[1](g)


fused.defvjp(fused_forward, fused_backward)


def test_regions_in_custom_vjp_rules_are_listed_last_as_unreachable():
    def loss(ws, x):
        return layer(ws[1], fused(ws[0], x)).sum()

    regions = remat.find_regions(loss, WS, X)
    assert [(r.path, r.reachable) for r in regions] == [
        ("block", True),
        ("fused/block", False),  # of the forward rule
        ("fused/block", False),  # of the backward rule
    ]
    assert [r.index for r in regions] == [0, 1, 2]
    changed = remat.with_policy(loss, "save_dots")
    policies = [r.policy for r in remat.find_regions(changed, WS, X)]
    assert policies == [remat.policies.save_dots, None, None]


def test_rules_that_cannot_be_traced_are_read_as_the_function():
    @jax.custom_vjp
    def stubborn(w, x):
        return layer(w, x)

    def forward(w, x):
        raise NotImplementedError

    stubborn.defvjp(forward, lambda operands, g: g)
    (region,) = remat.find_regions(stubborn, WS[0], X)
    assert (region.path, region.reachable) == ("stubborn/block", False)


def test_regions_of_a_custom_jvp_are_reachable():
    (region,) = remat.find_regions(ruled, WS[0], X)
    assert region.reachable


def test_differentiated_regions_are_unreachable():
    loss, args = unrolled()
    regions = remat.find_regions(jax.grad(loss), *args)
    assert regions
    assert not any(r.reachable for r in regions)


# --- fingerprints


def softmax_layer(w, x):
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    scores = jnp.einsum("bd,ed->be", x @ w, x)
    return jax.nn.softmax(scores) @ x + jax.nn.silu(x)


def looped_layer(w, x):
    x = jax.lax.scan(lambda h, _: (jnp.sin(h @ w), h), x, None, length=3)[0]
    return jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x)


FINGERPRINTS = {
    block: "682b9338c88e57c0",
    softmax_layer: "3b964c06fe067bdf",
    looped_layer: "e65b28ded8c647dc",
}
"""The same in every supported version of JAX."""


@pytest.mark.parametrize("fn", FINGERPRINTS, ids=lambda fn: fn.__name__)
def test_fingerprints_do_not_depend_on_the_version(fn):
    (region,) = remat.find_regions(jax.checkpoint(fn), WS[0], X)
    assert region.fingerprint == FINGERPRINTS[fn]


def digest(fn, *args):
    return fingerprint(jax.make_jaxpr(fn)(*args).jaxpr)


def test_fingerprints_tell_programs_apart():
    different = [
        (lambda x: jnp.sin(x), X),
        (lambda x: jnp.sin(x), X.T),
        (lambda x: jnp.sin(x), X.astype(jnp.bfloat16)),
        (lambda x: jnp.cos(x), X),
        (lambda x: jnp.sin(jnp.cos(x)), X),
        (lambda x: checkpoint_name(jnp.sin(x), "a"), X),
        (lambda x: checkpoint_name(jnp.sin(x), "b"), X),
        (lambda x: jnp.sin(x) - jnp.cos(x), X),
        (lambda x: jnp.cos(x) - jnp.sin(x), X),
    ]
    assert len({digest(fn, x) for fn, x in different}) == len(different)


def test_fingerprints_see_through_calls():
    assert digest(jax.jit(block), WS[0], X) == digest(block, WS[0], X)


def test_equal_layers_have_equal_fingerprints():
    first, second = regions_of(linen_unrolled)
    assert first.fingerprint == second.fingerprint
    assert len({r.fingerprint for r in regions_of(unrolled)}) == 1


# --- rewriting


def test_rewrite_regions_sees_inner_regions_first_and_edited():
    loss, args = nested()
    order = []

    def edit(region, eqn):
        order.append((region.index, "checkpoint" in str(eqn.params["jaxpr"])))
        return None

    changed = rewrite_regions(loss, edit)
    assert changed(*args) == loss(*args)
    assert [index for index, _ in order] == [1, 2, 0]


def test_rewrite_equations_edits_any_equation():
    loss, args = scanned()

    def unroll(site, eqn, decision):
        assert site.source.startswith("region_programs.py:")
        return eqn.replace(params={**eqn.params, "unroll": decision})

    changed = rewrite_equations(
        loss,
        select=lambda eqn: eqn.primitive.name == "scan",
        decide=lambda sites, program: [3] * len(sites),
        edit=unroll,
    )
    assert [r.context for r in remat.find_regions(changed, *args)] == ["unrolled scan"]


def test_several_equations_can_take_the_place_of_one():
    def edit(site, eqn, _):
        twice = eqn.replace(outvars=[type(eqn.outvars[0])(eqn.outvars[0].aval)])
        return [twice, eqn.replace(invars=twice.outvars)]

    changed = rewrite_equations(
        jnp.sin,
        select=lambda eqn: eqn.primitive.name == "sin",
        decide=lambda sites, program: [None] * len(sites),
        edit=edit,
    )
    assert jnp.array_equal(changed(X), jnp.sin(jnp.sin(X)))


def test_each_distinct_jaxpr_is_edited_once():
    loss, args = jitted_inside()
    edited = []

    def edit(region, eqn, _):
        edited.append(region)
        return eqn

    changed = rewrite_equations(
        loss,
        select=lambda eqn: eqn.primitive.name == "remat2",
        decide=lambda sites, program: [None] * len(sites),
        edit=edit,
    )
    for _ in range(2):
        changed(*args)
    assert len(edited) == 1


def test_many_layers_are_listed_once_each():
    def deep(w, x):
        for _ in range(80):
            x = layer(w, x)
        return x

    assert len(remat.find_regions(jax.jit(deep), WS[0], X)) == 80


def test_where_a_value_lies_is_no_part_of_a_fingerprint():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    with jax.set_mesh(mesh):
        moved = jax.make_jaxpr(lambda x: jnp.sin(jax.sharding.reshard(x, placed)) * x)(
            jnp.ones(4)
        )
    plain = jax.make_jaxpr(lambda x: jnp.sin(x) * x)(jnp.ones(4))
    primitives = [eqn.primitive.name for eqn in compat.open_jaxpr(moved).eqns]
    assert "reshard" in primitives
    assert fingerprint(compat.open_jaxpr(moved)) == fingerprint(
        compat.open_jaxpr(plain)
    )
