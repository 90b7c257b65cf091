"""`segment_scans`: scans in functions that are already written."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat
from remat._jax_compat import REGION_PRIMITIVES
from remat._regions import _boundary
from remat._regions._sites import survey_jaxpr
from tests.scan_programs import assert_same

WIDTH, DEPTH = 4, 16
X = jnp.linspace(-1.0, 1.0, 2 * WIDTH).reshape(2, WIDTH)
WS = jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH)) / 2


def layer(h, w):
    return h + jnp.tanh(h @ w), h.sum()


def plain(ws, x):
    last, ys = lax.scan(layer, x, ws)
    return (last**2).sum() + ys.sum()


def regions(ws, x):
    return (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).sum()


def time_in_layers(ws, x):
    def rnn(h, w):
        return lax.scan(lambda h, _: (jnp.sin(h @ w), None), h, None, 20)[0], None

    return lax.scan(rnn, x, ws)[0].sum()


def in_cond(ws, x):
    return lax.cond(x.sum() > 0, plain, regions, ws, x)


def in_shard_map(ws, x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    def mapped(ws, x):
        def body(h, w):
            return h + jnp.tanh(h @ w * lax.psum(h.mean(), "d")), None

        return lax.psum((lax.scan(body, x, ws)[0] ** 2).sum(), "d")

    return mapped(ws, x)


def n_segments(fn, *args):
    """Segments that a function runs, at all levels."""

    def is_segment(eqn):
        is_region = eqn.primitive.name in REGION_PRIMITIVES
        return is_region and _boundary.is_segment(eqn.params["policy"])

    sites = survey_jaxpr(jax.make_jaxpr(fn)(*args), is_segment).sites
    return sum(site.times for site in sites)


PROGRAMS = {
    "plain": (plain, 4),
    "jit": (jax.jit(plain), 4),
    "regions": (regions, 4),
    "in a region": (jax.checkpoint(plain), 4),
    "scan in scan": (time_in_layers, 4 + DEPTH * 7),
    "cond": (in_cond, 8),
    "shard_map": (in_shard_map, 4),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_scans_are_cut_wherever_they_stand(program):
    fn, wanted = PROGRAMS[program]
    cut = remat.segment_scans(fn)
    assert n_segments(cut, WS, X) == wanted
    got = jax.jit(jax.value_and_grad(cut, (0, 1)))(WS, X)
    assert_same(got, jax.jit(jax.value_and_grad(fn, (0, 1)))(WS, X), 1e-4)


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (plain, {"min_length": DEPTH + 1}),
        (plain, {"segments": None, "policy": "none"}),
        (
            lambda ws, x: lax.while_loop(
                lambda s: s < 3, lambda s: s + plain(ws, x), 0.0
            ),
            {},
        ),
    ],
)
def test_other_scans_stay_as_they_are(fn, options):
    assert n_segments(remat.segment_scans(fn, **options), WS, X) == 0


def test_what_remat_scan_has_cut_is_not_cut_again():
    def fn(ws, x):
        return remat.scan(layer, x, ws, segments=(2, 8))[0].sum()

    assert n_segments(remat.segment_scans(fn), WS, X) == 2


def test_a_scan_that_keeps_next_to_nothing_is_left_alone():
    def chunked_loss(ws, x):
        def chunk(total, w):
            logits = jnp.tile(x @ w, (8, 64))
            return total + jax.nn.logsumexp(logits), None

        return lax.scan(jax.checkpoint(chunk), 0.0, ws)[0]

    assert n_segments(remat.segment_scans(chunked_loss), WS, X) == 0


def test_a_scan_whose_body_has_no_derivative_is_told():
    def on_the_host(ws, x):
        def body(h, w):
            return jax.pure_callback(np.tanh, jax.typeof(h), h @ w), None

        return lax.scan(body, x, ws)[0].sum()

    with pytest.warns(remat.SegmentsWarning, match=r"steps at .*py:\d+ is left"):
        assert n_segments(remat.segment_scans(on_the_host), WS, X) == 0


def test_options_are_those_of_scan():
    assert n_segments(remat.segment_scans(plain, 2), WS, X) == 2
    assert n_segments(remat.segment_scans(plain, (4, 2, 2)), WS, X) == 4 + 4 * 2
    assert n_segments(remat.segment_scans(plain, max_saved=8), WS, X) == 4
    with pytest.raises(remat.SegmentsError, match="holds 4 steps"):
        remat.segment_scans(plain, (2, 2))(WS, X)


# --- with policies


def test_with_policy_changes_bodies_and_leaves_segments():
    for fn in (
        remat.with_policy(remat.segment_scans(regions, 4), "save_dots"),
        remat.segment_scans(remat.with_policy(regions, "save_dots"), 4),
    ):
        (region,) = remat.find_regions(fn, WS, X)
        assert region.policy == remat.policies.save_dots
        assert region.times == DEPTH
        assert n_segments(fn, WS, X) == 4
        got = jax.jit(jax.grad(fn))(WS, X)
        assert_same(got, jax.jit(jax.grad(regions))(WS, X), 1e-5)


def test_without_regions_the_segments_stay():
    fn = remat.with_policy(remat.segment_scans(regions), "none")
    assert remat.find_regions(fn, WS, X) == ()
    assert n_segments(fn, WS, X) == 4


# --- Flax


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))
        return nn.Dropout(0.1, deterministic=False)(h), h.mean()


class Stack(nn.Module):
    """The usual Linen stack: parameters stacked over layers."""

    is_region: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.is_region else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=DEPTH,
        )
        h, means = layers(name="layers")(x, None)
        return (h**2).mean() + means.sum()


@pytest.mark.parametrize("is_region", [False, True])
def test_a_linen_scan_keeps_its_parameters_and_dropout(is_region):
    model = Stack(is_region)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(rngs, X)

    def fn(variables, x):
        return model.apply(variables, x, rngs={"dropout": jax.random.key(2)})

    cut = remat.segment_scans(fn)
    assert n_segments(cut, variables, X) == 4
    got = jax.jit(jax.value_and_grad(cut))(variables, X)
    assert_same(got, jax.jit(jax.value_and_grad(fn))(variables, X), 1e-5)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.dense(x)))


class NnxStack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(axis_size=DEPTH)
        def make(rngs):
            return NnxBlock(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


def test_an_nnx_scan_keeps_up_its_state():
    def fn(model, x):
        return (model(x) ** 2).mean()

    outcomes = []
    for loss in (fn, remat.segment_scans(fn)):
        model = NnxStack(nnx.Rngs(0))
        value, gradient = nnx.value_and_grad(loss)(model, X)
        outcomes.append((value, nnx.to_pure_dict(gradient), nnx.state(model)))
    (v, g, s), (v_cut, g_cut, s_cut) = outcomes
    assert_same((v_cut, g_cut), (v, g), 1e-5)
    assert_same(
        nnx.to_pure_dict(s_cut.filter(nnx.BatchStat)),
        nnx.to_pure_dict(s.filter(nnx.BatchStat)),
        1e-5,
    )
    graph, state = nnx.split(NnxStack(nnx.Rngs(0)))
    cut = remat.segment_scans(lambda state, x: fn(nnx.merge(graph, state), x))
    assert n_segments(cut, state, X) == 4
