"""`remat.sequential`: segments of blocks called in turn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat
from remat._jax_compat import REGION_PRIMITIVES
from remat._regions import _boundary
from remat._regions._sites import survey_jaxpr
from tests.scan_programs import assert_same

OPTIONS = [
    {},
    {"policy": "none"},
    {"policy": "save_dots"},
    {"segments": 4},
    {"segments": (2, 2, 3)},
    {"segments": None},
    {"max_saved": 7},
]


def n_segments(fn, *args):
    def is_segment(eqn):
        is_region = eqn.primitive.name in REGION_PRIMITIVES
        return is_region and _boundary.is_segment(eqn.params["policy"])

    return len(survey_jaxpr(jax.make_jaxpr(fn)(*args), is_segment).sites)


# --- functions


def widths(n):
    """Weights of n layers, no two neighbours of equal width."""
    shapes = [(3 + i % 3, 3 + (i + 1) % 3) for i in range(n)]
    keys = jax.random.split(jax.random.key(0), n)
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def in_turn(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def in_segments(ws, x, **options):
    blocks = [lambda x, w=w: jnp.tanh(x @ w) for w in ws]
    return (remat.sequential(blocks, x, **options) ** 2).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_functions_of_unlike_shapes_that_close_over_weights(options):
    ws, x = widths(11), jnp.ones((2, 3))
    gradient = jax.grad(lambda ws, x: in_segments(ws, x, **options), (0, 1))
    assert_same(
        jax.jit(gradient)(ws, x), jax.jit(jax.grad(in_turn, (0, 1)))(ws, x), 1e-6
    )


@pytest.mark.parametrize("n", range(8))
def test_any_number_of_blocks(n):
    ws, x = widths(n), jnp.ones((2, 3))
    assert_same(jax.grad(in_segments, 1)(ws, x), jax.grad(in_turn, 1)(ws, x), 1e-6)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, 3), ({"segments": 2}, 2), ({"segments": (3, 3)}, 3), ({"segments": None}, 0)],
)
def test_how_many_segments(options, wanted):
    ws, x = widths(9), jnp.ones((2, 3))
    assert n_segments(lambda ws, x: in_segments(ws, x, **options), ws, x) == wanted


def test_blocks_are_regions_that_with_policy_changes():
    ws, x = widths(9), jnp.ones((2, 3))
    fn = remat.with_policy(in_segments, "save_dots")
    regions = remat.find_regions(fn, ws, x)
    assert len(regions) == 9
    assert {region.policy for region in regions} == {remat.policies.save_dots}
    assert n_segments(fn, ws, x) == 3


def test_pytrees_between_blocks():
    def split(x):
        return {"a": x[:2], "b": x[2:]}

    def join(tree):
        return jnp.concatenate([tree["b"], jnp.sin(tree["a"])])

    blocks = [split, join] * 5
    gradient = jax.grad(lambda x: remat.sequential(blocks, x).sum())(jnp.arange(4.0))
    plain = jax.grad(
        lambda x: remat.sequential(blocks, x, segments=None, policy="none").sum()
    )(jnp.arange(4.0))
    assert_same(gradient, plain, 1e-6)


def test_what_is_no_block_is_refused():
    with pytest.raises(TypeError, match=r"got int as blocks\[1\]"):
        remat.sequential([jnp.sin, 3], 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(remat.SegmentsError, match="holds 1 steps"):
        remat.sequential([jnp.sin, jnp.cos], 1.0, segments=(1,))


def test_temporaries_are_inputs_of_segments_on_h100():
    def temp_carries(options):
        blocks = [lambda x: x + jnp.sin(x * jnp.cos(x)) for _ in range(25)]
        x = jax.ShapeDtypeStruct((2**18,), jnp.float32)
        gradient = jax.grad(lambda x: remat.sequential(blocks, x, **options).sum())
        return remat.analyze(gradient, x, target="h100").temp_bytes / 2**20

    assert temp_carries({}) <= 5 + 5 + 3
    assert temp_carries({"segments": None}) >= 24


# --- Linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("seen", "mean", x.mean())
        calls = self.variable("calls", "n", lambda: jnp.zeros(()))
        calls.value += 1
        x = x + nn.gelu(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


class Stack(nn.Module):
    segments: str | None
    is_set_up: bool = False

    def setup(self):
        self.layers = [Block() for _ in range(9)] if self.is_set_up else []

    @nn.compact
    def __call__(self, x):
        blocks = self.layers or [Block(name=f"block_{i}") for i in range(9)]
        blocks = [*blocks, jnp.sin]
        if self.segments is not None:
            return remat.sequential(blocks, x, self.segments)
        for block in blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_set_up", [False, True])
def test_linen_modules_keep_parameters_rngs_and_collections(is_set_up):
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)

    def outcome(model):
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = model.init(rngs, x)

        def loss(params):
            rngs, mutable = {"dropout": jax.random.key(2)}, ["seen", "calls"]
            given = {**variables, "params": params}
            out, state = model.apply(given, x, rngs=rngs, mutable=mutable)
            return (out**2).sum(), state

        gradient = jax.value_and_grad(loss, has_aux=True)
        return variables, jax.jit(gradient)(variables["params"])

    got = outcome(Stack("sqrt", is_set_up))
    assert_same(got, outcome(Stack(None, is_set_up)), 1e-5)


# --- NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.drop(self.norm(self.dense(x))))


def test_nnx_modules_update_their_state():
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)

    def outcome(run):
        rngs = nnx.Rngs(0)
        blocks = nnx.List([NnxBlock(rngs) for _ in range(7)])
        values = [
            nnx.value_and_grad(lambda blocks: (run(blocks, x) ** 2).mean())(blocks)
            for _ in range(2)  # the second sees other dropout keys and statistics
        ]
        return jax.tree.leaves((values, nnx.state(blocks)))

    def in_turn(blocks, x):
        for block in blocks:
            x = block(x)
        return x

    got = outcome(lambda blocks, x: remat.sequential(list(blocks), x))
    assert_same(got, outcome(in_turn), 1e-4)
