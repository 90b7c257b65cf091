"""`remat.remat` on NNX classes, instances, methods and functions of modules."""

import copy
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat
from remat._wrap._hold import StaticArgumentError

X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)


class Block(nnx.Module):
    """Uses everything a region must not disturb."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x, mask=None, train=True):
        x = self.norm(self.linear(x), use_running_average=not train)
        x = self.dropout(x, deterministic=not train)
        self.sow(nnx.Intermediate, "h", x)
        self.calls[...] += 1
        x = checkpoint_name(jnp.sin(x), "h")
        return self.twice(x if mask is None else x * mask)

    def twice(self, x):
        return 2 * jnp.sin(x)

    def _private(self, x):
        return x


class Net(nnx.Module):
    def __init__(self, make, call=lambda block, x, train: block(x, train=train)):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([make(rngs) for _ in range(2)])
        self.call = call

    def __call__(self, x, train=True):
        for block in self.blocks:
            x = self.call(block, x, train)
        return x


def call_block(block, x, train):
    return block(x, None, train)


def call_bound(block, x, train):
    return remat.remat(block.__call__, static_argnames="train")(x, train=train)


FORMS = {
    "class": lambda: Net(remat.remat(Block)),
    "instance": lambda: Net(lambda rngs: remat.remat(Block(rngs))),
    "function": lambda: Net(Block, remat.remat(call_block)),
    "bound method": lambda: Net(Block, call_bound),
    "names kept": lambda: Net(remat.remat(Block, remat.policies.save_names("h"))),
}


def numbers(state):
    """The state's arrays by path, with random keys as their bits."""

    def bits(x):
        return (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )

    return jax.tree.map(bits, nnx.to_pure_dict(state))


def step(model):
    """Loss, gradients, and the state that the call left behind."""
    loss, grads = nnx.value_and_grad(lambda m: (m(X) ** 2).sum())(model)
    return loss, numbers(grads), numbers(nnx.state(model))


@pytest.fixture(scope="module")
def expected():
    return step(Net(Block))


@pytest.mark.parametrize("form", FORMS)
def test_state_gradients_and_updates_are_those_of_the_unwrapped(form, expected):
    model = FORMS[form]()
    chex.assert_trees_all_equal(
        numbers(nnx.state(model)), numbers(nnx.state(Net(Block)))
    )
    chex.assert_trees_all_close(step(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_each_block_is_one_region_without_constants(form):
    regions = remat.find_regions(lambda model: model(X), FORMS[form]())
    assert len(regions) == 2
    assert not any(region.jaxpr.constvars for region in regions)


def test_saved_state_loads_with_regions_on():
    plain, wrapped = Net(Block), FORMS["class"]()
    nnx.update(wrapped, jax.tree.map(lambda x: x * 0, nnx.state(plain, nnx.Param)))
    assert not wrapped.blocks[0].linear.kernel[...].any()


def test_class_is_left_as_it_was_and_two_models_are_independent():
    before = dict(vars(Block))
    wrapped = remat.remat(Block)
    assert dict(vars(Block)) == before
    assert issubclass(wrapped, Block)
    assert (wrapped.__name__, wrapped.__doc__) == ("Block", Block.__doc__)
    one, other = wrapped(nnx.Rngs(0)), Block(nnx.Rngs(0))
    assert len(remat.find_regions(lambda m: m(X), one)) == 1
    assert not remat.find_regions(lambda m: m(X), other)
    one(X)
    assert (one.calls[...], other.calls[...]) == (1, 0)


def test_instance_shares_its_variables():
    block = Block(nnx.Rngs(0))
    wrapped = remat.remat(block)
    assert type(block) is Block
    assert wrapped.linear is block.linear
    wrapped(X)
    assert block.calls[...] == 1


@pytest.mark.parametrize("method", ["__call__", "twice"])
def test_every_public_method_is_one_region_of_its_own(method):
    policy = remat.policies.save_names("h")  # which `twice` does not emit
    block = remat.remat(Block, policy)(nnx.Rngs(0))
    regions = remat.find_regions(lambda m: getattr(m, method)(X), block)
    assert len(regions) == 1
    assert not remat.find_regions(lambda m: m._private(X), block)


def test_decorated_method():
    class Decorated(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        @functools.partial(remat.remat, static_argnames="train")
        def __call__(self, x, train=False):
            return self.linear(x) if train else x

    model = Decorated()
    chex.assert_trees_all_equal(model(X, train=True), model.linear(X))
    chex.assert_trees_all_equal(model(X), X)
    assert len(remat.find_regions(lambda m: m(X, True), model)) == 1


@pytest.mark.parametrize("static", [(), ("train",)])
@pytest.mark.parametrize("form", ["class", "function", "method"])
def test_traced_flag_is_named(static, form):
    block = Block(nnx.Rngs(0))
    target = {"class": block, "function": call_block, "method": block.__call__}[form]
    wrapped = remat.remat(target, static_argnames=static)
    args = (block,) if form == "function" else ()
    with pytest.raises(StaticArgumentError, match="'train'"):
        nnx.jit(lambda train: wrapped(*args, X, train=train))(True)


def test_shared_and_returned_modules():
    def swap(pair, x):
        pair[0].calls[...] += 5
        return pair[1], x

    shared = Block(nnx.Rngs(0))
    back, _ = remat.remat(swap)((shared, shared), X)
    assert back is shared
    assert shared.calls[...] == 5


@pytest.mark.parametrize("loop", ["while", "fori", "jit"])
def test_in_loops(loop):
    def run(make):
        model = Net(make)
        if loop == "while":
            return nnx.while_loop(
                lambda c: c[1] < 2,
                lambda c: (c[0], c[1] + 1, c[0](c[2])),
                (model, 0, X),
            )[2]
        if loop == "fori":
            return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (model, X))[1]
        return nnx.jit(lambda m: m(X))(model)

    class Loopable(Block):  # a loop's carry must not grow, so nothing is sown
        def __call__(self, x, mask=None, train=True):
            return self.twice(self.linear(x))

    chex.assert_trees_all_close(run(remat.remat(Loopable)), run(Loopable), rtol=1e-6)


@pytest.mark.parametrize("unroll", [1, 2])
def test_barrier_in_a_scan_follows_whether_it_stays_a_loop(unroll):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.linear(x))

    wrapped = remat.remat(Layer)

    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def make(rngs):
        return wrapped(rngs)

    @functools.partial(
        nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=unroll
    )
    def forward(layer, x):
        return layer(x)

    (region,) = remat.find_regions(forward, make(nnx.Rngs(0)), X)
    assert region.times == 4
    assert region.prevent_cse is (unroll != 1)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.sin(self.linear(x)))


class NoPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.sizes = [1, 2]

    def __call__(self, x):
        return x + jnp.sin(self.linear(x))


class Above(remat.remat(Plain)):
    def __call__(self, x):
        return 2 * super().__call__(x)


def wrapped_instance():
    return remat.remat(Plain(nnx.Rngs(0)))


USES = {
    "sequential": (lambda: nnx.Sequential(wrapped_instance(), wrapped_instance()), 2),
    "split and merge": (lambda: nnx.merge(*nnx.split(wrapped_instance())), 1),
    "clone": (lambda: nnx.clone(wrapped_instance()), 1),
    "deepcopy": (lambda: copy.deepcopy(wrapped_instance()), 1),
    "super": (lambda: Above(nnx.Rngs(0)), 1),
    "no pytree": (lambda: remat.remat(NoPytree)(nnx.Rngs(0)), 1),
    "no pytree instance": (lambda: remat.remat(NoPytree(nnx.Rngs(0))), 1),
}


@pytest.mark.parametrize("use", USES)
def test_in_nnx_own_ways_of_composing(use):
    make, n_regions = USES[use]
    assert len(remat.find_regions(lambda model: model(X), make())) == n_regions


def test_train_and_eval_reach_the_instance():
    model = wrapped_instance()
    model.eval()
    chex.assert_trees_all_equal(model(X), model(X))
    model.train()
    assert (model(X) != model(X)).any()


def test_attributes_set_in_a_call_stay():
    class Remembers(nnx.Module):
        def __call__(self, x):
            self.last = nnx.Variable(2 * x)
            return x

    model = remat.remat(Remembers)()
    model(X)
    chex.assert_trees_all_equal(model.last[...], 2 * X)
