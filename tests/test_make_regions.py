"""`with_regions`: regions on code that has none."""

import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import _jax_compat as compat
from remat._naming._op_name import parse_op_name
from tests.helpers import saved_residuals
from tests.region_programs import WS, D, X, block


def assert_near(actual, expected):
    np.testing.assert_allclose(
        actual, expected, 0, 1e-6 * float(jnp.abs(expected).max())
    )


# --- layer scans


def step(h, w):
    return block(w, h), h.sum()


def scanned(ws, x, **options):
    h, ys = lax.scan(step, x, ws, **options)
    return (h**2).sum() + ys.sum()


def microbatches(ws, x):
    def one(total, x):
        return total + scanned(ws, x[None]), None

    return lax.scan(one, 0.0, x)[0]


def chunked_loss(ws, x):
    def chunk(total, x):
        return total + jnp.sin(x @ ws[0]).sum(), None

    return lax.scan(chunk, 0.0, x)[0]


def time_in_layers(ws, x):
    def rnn(h, w):
        return lax.scan(lambda h, _: (jnp.sin(h @ w), None), h, None, 5)[0], None

    return lax.scan(rnn, x, ws)[0].sum()


def in_cond_and_jit(ws, x):
    inner = jax.jit(scanned)
    return lax.cond(x.sum() > -9, inner, lambda ws, x: ws.sum() * x.sum(), ws, x)


def many_kinds(ws, x):
    """Integers, keys, literals, constants, what is passed on, and no result."""
    table = jnp.arange(6.0)

    def body(carry, inputs):
        h, n, key, kept = carry
        w, flag = inputs
        key, draw = jr.split(key)
        h = jnp.where(flag, block(w, h), h) + jr.normal(draw, h.shape) * table[n]
        return (h, n + 1, key, kept), (h.sum(), 3.0, n, kept)

    init = (x, jnp.int32(0), jr.key(0), x * 2)
    flags = jnp.array([True, False, True])
    (h, n, _, kept), ys = lax.scan(body, init, (ws, flags))
    return (h**2).sum() * n + kept.sum() + sum(jnp.sum(y) for y in ys)


SCANS = (
    scanned,
    microbatches,
    chunked_loss,
    time_in_layers,
    in_cond_and_jit,
    many_kinds,
)
SLOW = (time_in_layers, in_cond_and_jit)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else [], id=p.__name__)
        for p in SCANS
    ],
)
def test_layers_of_a_scan_are_regions_and_gradients_equal(loss):
    changed = remat.with_regions(loss, "scan")
    (region,) = remat.find_regions(changed, WS, X)
    length = 2 if loss is chunked_loss else 6 if loss is microbatches else 3
    assert (region.times, region.context, region.prevent_cse) == (length, "scan", False)
    expected = jax.value_and_grad(loss, (0, 1))(WS, X)
    actual = jax.value_and_grad(changed, (0, 1))(WS, X)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_regions_of_a_scan_take_policies():
    def kept(policy):
        changed = remat.with_policy(scanned, policy, regions="scan")
        return [r for r in saved_residuals(changed, WS, X) if "dot_general" in r]

    assert saved_residuals(scanned, WS, X) != saved_residuals(
        remat.with_policy(scanned, "nothing", regions="scan"), WS, X
    )
    assert kept("nothing") == []


def test_path_is_the_functions_name_and_source_the_users():
    (region,) = remat.find_regions(remat.with_regions(scanned, "scan"), WS, X)
    assert region.path == "step"
    assert region.source is None or region.source.startswith("region_programs.py")


def test_unrolled_scan_keeps_its_barrier():
    def loss(ws, x):
        return scanned(ws, x, unroll=3)

    (region,) = remat.find_regions(remat.with_regions(loss, "scan"), WS, X)
    assert (region.context, region.prevent_cse) == ("unrolled scan", True)


def test_reverse_scan():
    def loss(ws, x):
        return scanned(ws, x, reverse=True)

    expected = jax.grad(loss)(WS, X)
    actual = jax.grad(remat.with_regions(loss, "scan"))(WS, X)
    np.testing.assert_array_equal(actual, expected)


def test_layers_that_are_regions_stay():
    def loss(ws, x):
        layer = jax.checkpoint(block, policy=remat.policies.save_dots)
        return lax.scan(lambda h, w: (layer(w, h * 2), None), x, ws)[0].sum()

    (region,) = remat.find_regions(remat.with_regions(loss, "scan"), WS, X)
    assert region.policy == remat.policies.save_dots


def test_regions_inside_a_new_one_stay_nested():
    def loss(ws, x):
        def layer(h, w):
            return jax.checkpoint(jnp.sin)(h @ w), None

        return lax.scan(layer, x, ws)[0].sum()

    changed = remat.with_regions(loss, "scan")
    assert [r.depth for r in remat.find_regions(changed, WS, X)] == [0, 1]
    np.testing.assert_array_equal(jax.grad(changed)(WS, X), jax.grad(loss)(WS, X))


@pytest.mark.parametrize(
    "loss",
    [
        lambda ws, x: scanned(ws[:1], x),
        lambda ws, x: lax.map(lambda w: (x @ w).sum(), ws).sum(),
        lambda ws, x: jax.checkpoint(scanned)(ws, x),
        lambda ws, x: block(ws[0], x).sum(),
    ],
    ids=["one step", "map", "in a region", "no scan"],
)
def test_no_layer_scan_is_an_error(loss):
    with pytest.raises(remat.RegionError, match=r"Its scans are none|It has none"):
        remat.with_regions(loss, "scan")(WS, X)


@pytest.mark.slow
def test_a_segmented_scan_gets_regions_in_its_segments():
    def loss(ws, x):
        return remat.scan(step, x, ws, segments=2, policy="none")[0].sum()

    changed = remat.with_regions(loss, "scan")
    regions = remat.find_regions(changed, WS, X)
    assert regions
    np.testing.assert_array_equal(jax.grad(changed)(WS, X), jax.grad(loss)(WS, X))


# --- modules


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, train: bool):
        y = checkpoint_name(jnp.sin(nn.Dense(2 * D, name="wi")(x)), "mlpwi")
        y = nn.Dropout(0.3, deterministic=not train)(y) * mask[0].astype(y.dtype)
        self.sow("intermediates", "sum", y.sum())
        return x + nn.Dense(D, name="wo")(y), 3, mask


class Net(nn.Module):
    shared: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        mask = jnp.array([1, 0]) > 0
        one = Block(name="shared") if self.shared else None
        for _ in range(3):
            x, _, mask = (one or Block())(x, mask, train)
        return nn.Dense(1, name="head")(x)


def net_loss(shared=False):
    net = Net(shared)
    params = net.init(jr.key(0), X, False)

    def loss(params, x):
        rngs = {"dropout": jr.key(3, impl="rbg")}
        y, state = net.apply(params, x, True, rngs=rngs, mutable=["intermediates"])
        return (y**2).sum() + sum(jax.tree.leaves(state))

    return loss, params


@pytest.mark.parametrize(
    ("shared", "pattern", "paths"),
    [
        (False, "Block_*", ["Net/Block_0", "Net/Block_1", "Net/Block_2"]),
        pytest.param(*(False, "Net/Block_1", ["Net/Block_1"]), marks=pytest.mark.slow),
        (
            False,
            ["*/wi", "head"],
            [f"Net/Block_{i}/wi" for i in range(3)] + ["Net/head"],
        ),
        pytest.param(*(False, "Net", ["Net"]), marks=pytest.mark.slow),
        pytest.param(*(True, "shared", ["Net/shared"] * 3), marks=pytest.mark.slow),
    ],
    ids=["blocks", "one", "list", "all", "shared"],
)
def test_module_calls_become_regions(shared, pattern, paths):
    loss, params = net_loss(shared)
    changed = remat.with_regions(loss, pattern)
    regions = remat.find_regions(changed, params, X)
    assert [r.path for r in regions] == paths
    assert all(r.prevent_cse for r in regions)
    expected = jax.value_and_grad(loss)(params, X)
    actual = jax.value_and_grad(changed)(params, X)
    # Cotangents are added up in another order.
    jax.tree.map(assert_near, actual, expected)


def test_module_regions_take_policies():
    loss, params = net_loss()
    policy = remat.policies.save_names("mlpwi")
    kept = remat.with_policy(loss, policy, regions="Block_*")
    assert saved_residuals(kept, params, X).count("named 'mlpwi'") == 3


def test_modules_of_a_regions_backward_pass_are_named_once():
    loss, params = net_loss()
    changed = remat.with_policy(loss, "nothing", regions="Block_*")
    lowered = jax.jit(jax.grad(changed)).lower(params, X)
    names = re.findall(r'loc\("(jit[^"]+)"', lowered.as_text(debug_info=True))
    found = [parse_op_name(name) for name in names]
    again = {one.module_path or "" for one in found if one.phase == "recompute"}
    assert {"Net/Block_0/wi", "Net/Block_2/wi"} <= again
    paths = {one.module_path or "" for one in found}
    assert not [path for path in paths if path.count("Net") > 1]


def test_module_that_is_a_region_already_stays():
    class Wrapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.remat(Block, static_argnums=(3,))(name=f"h_{i}")(x, x[0], False)[
                    0
                ]
            return x

    net = Wrapped()
    params = jax.eval_shape(net.init, jr.key(0), X)
    changed = remat.with_regions(lambda p, x: jnp.asarray(net.apply(p, x)).sum(), "h_*")
    regions = remat.find_regions(changed, params, X)
    assert [r.depth for r in regions] == [0, 0]


def test_pattern_that_fits_no_module_shows_near_ones():
    loss, params = net_loss()
    with pytest.raises(remat.RegionError, match=r"'Net/Block_0'.*mean 'Block_"):
        remat.with_regions(loss, "Blok_*")(params, X)


def test_no_module_paths_says_what_to_do():
    with pytest.raises(remat.RegionError, match=r"jax\.named_scope"):
        remat.with_regions(scanned, "layers/*")(WS, X)


@pytest.mark.slow
def test_named_scopes_are_modules_in_jit_and_scan():
    @jax.jit
    def two(ws, x):
        for i in range(2):
            with jax.named_scope(f"layers/{i}"):
                x = block(ws[i], x)
        return x

    def loss(ws, x):
        h = lax.scan(lambda h, _: (two(ws, h), None), x, None, 3)[0]
        return two(ws, h).sum()

    changed = remat.with_regions(loss, "layers/*")
    regions = remat.find_regions(changed, WS, X)
    assert [(r.path[-8:], r.times, r.prevent_cse) for r in regions] == [
        ("layers/0", 3, False),
        ("layers/1", 3, False),
        ("layers/0", 1, True),
        ("layers/1", 1, True),
    ]
    np.testing.assert_array_equal(jax.grad(changed)(WS, X), jax.grad(loss)(WS, X))


def test_equations_that_need_others_between_them_are_several_regions():
    # What a trace cannot write by hand: one call of `a` around, and after, one of `b`.
    closed = jax.make_jaxpr(
        lambda ws, x: jnp.sin(jnp.cos(jnp.sin(x @ ws[0]) @ ws[1]) @ ws[2]).sum()
    )(WS, X)
    info = jax.make_jaxpr(jax.named_scope("a")(jnp.sin))(1.0).eqns[0].source_info
    opened = compat.open_jaxpr(closed)
    dots = [i for i, e in enumerate(opened.eqns) if e.primitive.name == "dot_general"]
    in_a = {dots[0], dots[1]}
    eqns = [
        e.replace(source_info=info) if i in in_a else e
        for i, e in enumerate(opened.eqns)
    ]
    marked = compat.with_open(closed, opened.replace(eqns=eqns))

    def loss(ws, x):
        return compat.evaluate(marked, [ws, x])[0]

    changed = remat.with_regions(loss, "a")
    assert len(remat.find_regions(changed, WS, X)) == 2
    np.testing.assert_array_equal(jax.grad(changed)(WS, X), jax.grad(loss)(WS, X))


def test_effects_stay_in_order_and_happen_as_often():
    seen = []

    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                jax.debug.callback(seen.append, i, ordered=True)
                x = jnp.sin(x @ w)
                jax.debug.callback(seen.append, 10 + i, ordered=True)
        return x.sum()

    jax.block_until_ready(jax.jit(remat.with_regions(loss, "layer_*"))(WS, X))
    jax.effects_barrier()
    assert [int(n) for n in seen] == [0, 10, 1, 11, 2, 12]


def test_references():
    def loss(w, x):
        total = jax.new_ref(jnp.zeros(()))
        with jax.named_scope("layer"):
            local = jax.new_ref(x)
            local[...] = jnp.sin(local[...] @ w)
            total[...] += local[...].sum()
            y = local[...]
        return y.sum() + total[...]

    changed = remat.with_regions(loss, "layer")
    assert len(remat.find_regions(changed, WS[0], X)) == 1
    np.testing.assert_array_equal(changed(WS[0], X), loss(WS[0], X))


# --- what takes `regions=`


def test_lint_sees_the_regions():
    wrong = remat.policies.save_names("mit")
    found = remat.lint(scanned, wrong, WS, X, regions="scan")
    assert "unemitted-name" in {finding.code for finding in found}


@pytest.mark.slow
def test_compare_sees_the_regions():
    table = remat.compare(
        scanned,
        WS,
        X,
        policies=["save_dots", "first_layers(1, save_dots, rest=nothing)"],
        regions="scan",
        target="cpu",
    )
    assert table.rows[0].policy == "save_dots"
    assert len(table.rows) == 2
    assert table.options["regions"] == ["scan"]
    assert table.rows[0].recompute_flops < table.rows[1].recompute_flops


@pytest.mark.slow
def test_explain_sees_the_regions():
    found = remat.explain(
        scanned, WS, X, policy="nothing", regions="scan", target="cpu"
    )
    assert found.report.recompute_flops > 0
