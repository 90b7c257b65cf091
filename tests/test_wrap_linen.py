"""`remat.remat` on Linen classes, instances, methods and functions of modules."""

import functools
import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import remat
from remat._naming._residuals import residuals
from remat._wrap._hold import StaticArgumentError

X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Block(nn.Module):
    """Uses everything a region must not disturb."""

    features: int = 8

    @nn.compact
    def __call__(self, x, mask=None, train=True):
        x = nn.Dense(self.features)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "h", x)
        count = self.variable("cache", "n", lambda: jnp.zeros((), jnp.int32))
        count.value = count.value + 1
        x = checkpoint_name(jnp.sin(x), "h")
        return nn.Dense(self.features)(x if mask is None else x * mask)


class Net(nn.Module):
    """Blocks by automatic names, by given names, and from instances."""

    block: Any
    form: str = "auto"

    @nn.compact
    def __call__(self, x, train=True):
        for i in range(2):
            if self.form == "auto":
                x = self.block()(x, train=train)
            elif self.form == "named":
                x = self.block(name=f"b{i}")(x, None, train)
            elif self.form == "instance":
                x = remat.remat(Block())(x, train=train)
        return x


class SetupNet(nn.Module):
    wrap: Any

    def setup(self):
        self.a = self.wrap(Block)()
        self.b = [self.wrap(Block)(), self.wrap(Block)()]

    def __call__(self, x, train=True):
        for block in (self.a, *self.b):
            x = block(x, train=train)
        return x


class SetupInstances(SetupNet):
    def setup(self):
        self.a = self.wrap(Block())
        self.b = [self.wrap(Block()), self.wrap(Block())]


def same(x):
    return x


PAIRS = {
    "auto": (Net(Block), Net(remat.remat(Block))),
    "named": (Net(Block, "named"), Net(remat.remat(Block), "named")),
    "instance": (Net(Block), Net(Block, "instance")),
    "setup": (SetupNet(same), SetupNet(remat.remat)),
    "setup instance": (SetupInstances(same), SetupInstances(remat.remat)),
    "top instance": (Block(), remat.remat(Block())),
    "partial": (
        Net(functools.partial(Block, features=8)),
        Net(remat.remat(functools.partial(Block, features=8))),
    ),
    "names kept": (Net(Block), Net(remat.remat(Block, remat.policies.save_names("h")))),
}


def step(model, variables):
    """Loss, gradients and all mutated collections of a training step."""

    def loss(params):
        y, updates = model.apply(
            {**variables, "params": params},
            X,
            train=True,
            rngs={"dropout": jax.random.key(7)},
            mutable=["batch_stats", "cache", "intermediates"],
        )
        return (y**2).sum(), updates

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.mark.parametrize("pair", PAIRS)
def test_variables_gradients_and_updates_are_those_of_the_unwrapped(pair):
    plain, wrapped = PAIRS[pair]
    variables = plain.init(RNGS, X)
    chex.assert_trees_all_equal(wrapped.init(RNGS, X), variables)
    expected = step(plain, variables)
    assert set(expected[0][1]) == {"batch_stats", "cache", "intermediates"}
    chex.assert_trees_all_close(
        step(wrapped, variables), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_each_block_is_one_region(pair):
    plain, wrapped = PAIRS[pair]
    variables = jax.eval_shape(plain.init, RNGS, X)
    regions = remat.find_regions(functools.partial(step, wrapped), variables)
    n_blocks = {"setup": 3, "setup instance": 3, "top instance": 1}.get(pair, 2)
    assert len(regions) == n_blocks
    assert not remat.find_regions(functools.partial(step, plain), variables)


def test_class_is_left_as_it_was_and_the_new_one_looks_like_it():
    def contents():  # Flax itself rewrites the fields when a class is subclassed
        return {k: v for k, v in vars(Block).items() if k != "__dataclass_fields__"}

    before = contents()
    wrapped = remat.remat(Block)
    assert contents() == before
    assert wrapped is not Block
    assert issubclass(wrapped, Block)
    assert (wrapped.__name__, wrapped.__doc__) == ("Block", Block.__doc__)
    assert repr(wrapped()) == repr(Block())
    assert wrapped(features=4).clone().features == 4


def test_instance_is_left_as_it_was():
    block = Block()
    assert type(remat.remat(block)) is not Block
    assert type(block) is Block
    assert not remat.find_regions(lambda: block.init_with_output(RNGS, X)[0])


def test_wrapped_module_pickles_when_it_stands_in_for_its_class(monkeypatch):
    wrapped = remat.remat(Block)
    monkeypatch.setattr(f"{__name__}.Block", wrapped)
    assert pickle.loads(pickle.dumps(wrapped)) is wrapped


# --- methods


class Embedder(nn.Module):
    activation: Any = nn.tanh

    def setup(self):
        self.embedding = self.param("embedding", nn.initializers.normal(), (5, 8))

    def encode(self, x, scale=1.0):
        return self.activation(x @ self.embedding) * scale

    def decode(self, x):
        return self.activation(x @ self.embedding.T)

    def both(self, x):
        return self.decode(self._twice(self.encode(x)))

    def _twice(self, x):
        return 2 * x

    @nn.nowrap
    def describe(self):
        return f"{self.activation.__name__} of 5"

    @property
    def width(self):
        return 8

    @staticmethod
    def double(x):
        return 2 * x

    def __call__(self, x):
        return self.both(x)


EMBED_X = jnp.ones((2, 5))


@pytest.mark.parametrize(
    ("method", "x"),
    [
        ("__call__", EMBED_X),
        ("encode", EMBED_X),
        ("decode", jnp.ones((2, 8))),
        ("both", EMBED_X),
    ],
)
def test_every_public_method_is_one_region_of_its_own(method, x):
    plain, wrapped = Embedder(), remat.remat(Embedder)()
    variables = plain.init(jax.random.key(0), EMBED_X)

    def run(model, x):
        return model.apply(variables, x, method=method)

    chex.assert_trees_all_equal(run(wrapped, x), run(plain, x))
    assert len(remat.find_regions(functools.partial(run, wrapped), x)) == 1


def test_what_is_no_method_of_the_module_is_left_alone():
    wrapped = remat.remat(Embedder)()
    assert wrapped.describe() == "tanh of 5"
    assert wrapped.width == 8
    assert wrapped.double(2) == 4
    assert wrapped.activation is nn.tanh


def test_bound_method_and_function_of_a_module():
    class Outer(nn.Module):
        wrap: Any

        def setup(self):
            self.embedder = Embedder()

        def __call__(self, x):
            h = self.wrap(self.embedder.encode)(x, scale=2.0)
            return self.wrap(lambda module, h: module.decode(h))(self.embedder, h)

    plain, wrapped = Outer(same), Outer(remat.remat)
    variables = plain.init(jax.random.key(0), EMBED_X)
    chex.assert_trees_all_equal(wrapped.init(jax.random.key(0), EMBED_X), variables)
    chex.assert_trees_all_equal(
        wrapped.apply(variables, EMBED_X), plain.apply(variables, EMBED_X)
    )
    assert len(remat.find_regions(wrapped.apply, variables, EMBED_X)) == 2


@pytest.mark.parametrize("compact", [True, False])
def test_decorated_method(compact):
    def decorated(wrap):
        class Decorated(nn.Module):
            if compact:

                @wrap
                @nn.compact
                def __call__(self, x, train=False):
                    return nn.Dense(8)(x) if train else nn.Dense(8)(x) * 2

            else:

                def setup(self):
                    self.dense = nn.Dense(8)

                @wrap
                def __call__(self, x, train=False):
                    return self.dense(x) if train else self.dense(x) * 2

        return Decorated()

    plain, wrapped = decorated(same), decorated(remat.remat)
    variables = plain.init(RNGS, X)
    chex.assert_trees_all_equal(wrapped.init(RNGS, X), variables)
    for train in (True, False):
        chex.assert_trees_all_equal(
            wrapped.apply(variables, X, train=train),
            plain.apply(variables, X, train=train),
        )
    assert len(remat.find_regions(wrapped.apply, variables, X)) == 1


def test_bound_apply_of_a_model_is_a_function_of_its_variables():
    model = Embedder()
    variables = model.init(jax.random.key(0), EMBED_X)
    (region,) = remat.find_regions(remat.remat(model.apply), variables, EMBED_X)
    assert len(region.eqn.invars) == 2


def test_modules_and_variables_as_arguments():
    class Reader(nn.Module):
        @nn.compact
        def __call__(self, x, dense):
            return jnp.sin(dense(x))

    class Outer(nn.Module):
        reader: Any

        @nn.compact
        def __call__(self, x):
            return self.reader()(x, nn.Dense(4, name="shared"))

    plain, wrapped = Outer(Reader), Outer(remat.remat(Reader))
    variables = plain.init(RNGS, X)
    chex.assert_trees_all_equal(wrapped.init(RNGS, X), variables)
    chex.assert_trees_all_equal(wrapped.apply(variables, X), plain.apply(variables, X))


def test_decode_cache_is_written_by_each_call():
    attention = functools.partial(nn.MultiHeadDotProductAttention, 2, decode=True)
    x = jnp.ones((1, 3, 8))

    def decode(cls):
        model = cls()
        variables = jax.jit(model.init)(jax.random.key(0), x)
        apply = jax.jit(functools.partial(model.apply, mutable=["cache"]))
        outs, cache = [], variables["cache"]
        for i in range(3):
            token = x[:, i : i + 1]
            y, new = apply({**variables, "cache": cache}, token, token)
            outs, cache = [*outs, y], new["cache"]
        return outs, cache

    chex.assert_trees_all_equal(decode(remat.remat(attention)), decode(attention))


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(jnp.sin(x))


class Field(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x):
        return self.block(self.block(x))


class Shared(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, x):
        block = self.wrap(Residual)()
        nn.share_scope(self, block)
        return block(x)


class Tied(nn.Module):
    wrap: Any

    def setup(self):
        self.embed = self.wrap(nn.Embed)(5, 8)
        self.block = self.wrap(Residual)()

    def __call__(self, x):
        return self.embed.attend(self.block(self.embed(jnp.int32(x[0]))))


class Doubled(Residual):
    def extra(self, x):
        return 2 * self(x)


class Getter(nn.Module):
    def setup(self):
        self.block = Residual()

    def get(self):
        return self.block

    def __call__(self, x):
        return self.get()(x)


class UsesGetter(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, x):
        return self.wrap(Getter)().get()(x)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
        return jnp.sin(x @ self.param("w", init, (8, 8)))


def mapped(cls):
    return nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True})()


USES = {
    "field": (lambda wrap: Field(wrap(Residual())), 2),
    "sequential": (lambda wrap: nn.Sequential([wrap(Residual()), wrap(Residual())]), 2),
    "around sequential": (lambda wrap: wrap(nn.Sequential([Residual(), nn.tanh])), 1),
    "vmap": (lambda wrap: mapped(wrap(Residual)), 1),
    "shared scope": (Shared, 1),
    "tied embedding": (Tied, 3),
    "inherited": (lambda wrap: wrap(Doubled)(), 1),
    "returns a module inside": (lambda wrap: wrap(Getter)(), 1),
    "returns a module": (UsesGetter, 0),
    "metadata": (lambda wrap: wrap(Partitioned)(), 1),
}


@pytest.mark.parametrize("use", USES)
def test_in_flax_own_ways_of_composing(use):
    make, n_regions = USES[use]
    plain, wrapped = make(same), make(remat.remat)
    variables = jax.eval_shape(plain.init, RNGS, X)
    assert jax.eval_shape(wrapped.init, RNGS, X) == variables
    out = jax.eval_shape(plain.apply, variables, X)
    assert jax.eval_shape(wrapped.apply, variables, X) == out
    assert len(remat.find_regions(wrapped.apply, variables, X)) == n_regions


def test_recurrent_cell_keeps_its_carry_initializer():
    rnn = nn.RNN(remat.remat(nn.SimpleCell)(8))
    sequence = jnp.ones((2, 3, 8))
    variables = jax.eval_shape(nn.RNN(nn.SimpleCell(8)).init, RNGS, sequence)
    assert jax.eval_shape(rnn.init, RNGS, sequence) == variables
    (region,) = remat.find_regions(rnn.apply, variables, sequence)
    assert region.times == 3


def test_captured_intermediates_are_those_of_the_unwrapped():
    variables = Field(Residual()).init(RNGS, X)

    def captured(wrap):
        model = Field(wrap(Residual()))
        return model.apply(variables, X, capture_intermediates=True)

    chex.assert_trees_all_equal(captured(remat.remat), captured(same))


# --- flags


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, mask, train):
        x = nn.Dense(8)(x)
        return x + mask if train else x


@pytest.mark.parametrize("static", [(), ("train",), "train"])
def test_flag_by_position_or_keyword_with_an_optional_array(static):
    plain, wrapped = Flagged(), remat.remat(Flagged, static_argnames=static)()
    variables = plain.init(RNGS, X, X, True)
    for mask, train in ((X, True), (None, False)):
        expected = plain.apply(variables, X, mask, train)
        chex.assert_trees_all_equal(wrapped.apply(variables, X, mask, train), expected)
        chex.assert_trees_all_equal(
            wrapped.apply(variables, X, train=train, mask=mask), expected
        )


@pytest.mark.parametrize("static", [(), ("train",)])
def test_traced_flag_is_named_with_its_module(static):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            block = remat.remat(Flagged, static_argnames=static)
            return block(name="first")(x, x, train)

    with pytest.raises(
        StaticArgumentError, match=r"Flagged\.__call__ \(module 'first'\).*'train'"
    ):
        jax.jit(Outer().init)(RNGS, X, True)


def test_unknown_static_name_raises_for_a_class():
    with pytest.raises(ValueError, match="Flagged has no argument 'trian'"):
        remat.remat(Flagged, static_argnames="trian")


def test_policy_that_names_what_a_block_does_not_emit_raises():
    with pytest.raises(ValueError, match="'h'"):
        remat.remat(Block, remat.policies.save_names("hh"))().init(RNGS, X)


def test_policy_by_module_path():
    policy = remat.policies.save(remat.policies.in_module("Dense_0"))
    model = Net(remat.remat(Block, policy))
    variables = jax.eval_shape(model.init, RNGS, X)
    run = functools.partial(model.apply, train=False, mutable=True)
    kept = residuals(run, variables, X)
    assert [r.label for r in kept if not r.is_argument] == [
        "Net/Block_0/Dense_0: add",
        "Net/Block_0/Dense_1: add",  # the input of the second block
        "Net/Block_1/Dense_0: add",
    ]


# --- loops


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.sin(nn.Dense(8)(x)), None


def scanned(layer, **kwargs):
    return nn.scan(
        layer, variable_axes={"params": 0}, split_rngs={"params": True}, **kwargs
    )()


@pytest.mark.parametrize(
    ("length", "unroll", "expected"),
    [(4, 1, False), (4, 2, True), (4, 4, True), (1, 1, True)],
)
def test_barrier_in_a_scan_follows_whether_it_stays_a_loop(length, unroll, expected):
    plain = scanned(Layer, length=length, unroll=unroll)
    wrapped = scanned(remat.remat(Layer), length=length, unroll=unroll)
    variables = jax.eval_shape(plain.init, RNGS, X, None)
    assert jax.eval_shape(wrapped.init, RNGS, X, None) == variables
    (region,) = remat.find_regions(wrapped.apply, variables, X, None)
    assert region.prevent_cse is expected
    assert region.times == length


def test_barrier_stays_where_jit_keeps_the_trace():
    class Jitted(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.jit(remat.remat(Layer))()(x, None)

    wrapped = scanned(Jitted, length=4)
    variables = jax.eval_shape(wrapped.init, RNGS, X, None)
    (region,) = remat.find_regions(wrapped.apply, variables, X, None)
    assert region.prevent_cse


def test_barrier_stays_in_a_straight_line():
    model = Net(remat.remat(Block))
    variables = jax.eval_shape(model.init, RNGS, X)
    regions = remat.find_regions(functools.partial(step, model), variables)
    assert [region.prevent_cse for region in regions] == [True, True]


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(jnp.sin(nn.Dense(64)(x))), None


class WideStack(nn.Module):
    """Eight layers, in a Python loop or a scan."""

    layer: Any
    unroll: int | None = None

    @nn.compact
    def __call__(self, x):
        if self.unroll is not None:
            stack = nn.scan(
                self.layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=8,
                unroll=self.unroll,
            )
            return stack()(x, None)[0]
        for _ in range(8):
            x, _ = self.layer()(x, None)
        return x


@pytest.mark.parametrize("unroll", [None, 1, 8])
def test_compiled_program_is_that_of_the_right_choice_by_hand(unroll):
    def temp_bytes(layer):
        model: Any = WideStack(layer, unroll)
        x = jax.ShapeDtypeStruct((2048, 8), jnp.float32)
        variables = jax.eval_shape(model.init, RNGS, x)
        grad = jax.grad(lambda v, x: (model.apply(v, x) ** 2).mean())
        compiled: Any = jax.jit(grad).lower(variables, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    by_hand = nn.remat(Wide, prevent_cse=unroll != 1)
    assert temp_bytes(remat.remat(Wide)) == temp_bytes(by_hand)
