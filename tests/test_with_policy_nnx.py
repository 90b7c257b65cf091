"""`with_policy` on NNX: modules in the arguments keep their state updates."""

import chex
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from flax import nnx

import remat
from remat._regions._with_policy import CapturedModuleError
from tests.region_programs import D, NnxBlock, X


class SowingNet(nnx.Module):
    """Dropout, batch statistics and sown values, a region a block."""

    def __init__(self, rngs):
        self.block = NnxBlock(rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        y = nnx.remat(NnxBlock.__call__)(self.block, x)
        self.calls[...] += 1
        self.sown = nnx.Intermediate(y)  # a variable the caller's module has not
        return y


def loss(net, x):
    return (net(x) ** 2).mean()


def eager(fn):
    return fn


def grad(fn):
    return nnx.value_and_grad(fn)


def jitted(fn):
    return nnx.jit(fn)


def jitted_grad(fn):
    return nnx.jit(nnx.value_and_grad(fn))


def data(tree):
    """Arrays only, keys as their data, to compare."""
    return jax.tree.map(
        lambda x: jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        jax.tree.map(jnp.asarray, tree),
    )


def two_steps(fn, transform):
    net = SowingNet(nnx.Rngs(0))
    step = transform(fn)
    return [data(step(net, X)) for _ in range(2)], data(nnx.state(net))


@pytest.mark.parametrize("policy", ["none", "save_dots"])
@pytest.mark.parametrize("transform", [eager, grad], ids=lambda t: t.__name__)
def test_two_steps_are_as_unwrapped(transform, policy):
    expected = two_steps(loss, transform)
    actual = two_steps(remat.with_policy(loss, policy), transform)
    chex.assert_trees_all_equal(actual, expected)
    assert actual[1]["calls"][...] == 2


@pytest.mark.parametrize("transform", [jitted, jitted_grad], ids=lambda t: t.__name__)
def test_two_jitted_steps_are_as_unwrapped(transform):
    expected = two_steps(loss, transform)
    actual = two_steps(remat.with_policy(loss, "save_dots"), transform)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_randomness_moves_on():
    net = SowingNet(nnx.Rngs(0))
    changed = remat.with_policy(loss, "nothing")
    assert changed(net, X) != changed(net, X)


def test_modules_anywhere_in_the_arguments():
    def fn(nets, *, more):
        return nets["a"](X).sum() + more[0](X).sum(), nets["a"]

    def call(fn):
        net, other = SowingNet(nnx.Rngs(0)), SowingNet(nnx.Rngs(1))
        value, returned = fn({"a": net}, more=(other, "text"))
        return value, returned is net, data((nnx.state(net), nnx.state(other)))

    expected, actual = call(fn), call(remat.with_policy(fn, "save_dots"))
    chex.assert_trees_all_equal(actual, expected)
    assert actual[1] is True


def test_one_module_passed_twice_stays_one():
    def fn(net, same):
        assert net is same
        return net(X).sum() + same(X).sum()

    def call(fn):
        net = SowingNet(nnx.Rngs(0))
        return fn(net, net), data(nnx.state(net))

    chex.assert_trees_all_equal(call(remat.with_policy(fn, "none")), call(fn))


def test_a_whole_training_step():
    def step(net, optimizer, x):
        value, grads = nnx.value_and_grad(remat.with_policy(loss, "save_dots"))(net, x)
        optimizer.update(net, grads)
        return value

    def plain_step(net, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(net, x)
        optimizer.update(net, grads)
        return value

    def train(step):
        net = SowingNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
        step = nnx.jit(step)
        return [step(net, optimizer, X) for _ in range(2)], data(nnx.state(net))

    chex.assert_trees_all_close(train(step), train(plain_step), rtol=1e-5, atol=1e-6)


def test_find_regions_of_abstract_modules():
    net = nnx.eval_shape(lambda: SowingNet(nnx.Rngs(0)))
    (region,) = remat.find_regions(loss, net, jax.ShapeDtypeStruct((2, D), jnp.float32))
    assert "test_with_policy_nnx.py:" in str(region.source)


def test_a_failing_function_leaves_no_trace():
    def fails(net, x):
        net(x)
        raise KeyError("no")

    net = SowingNet(nnx.Rngs(0))
    with pytest.raises(KeyError):
        remat.with_policy(fails, "none")(net, X)
    assert net.calls[...] == 0
    remat.with_policy(loss, "none")(net, X)
    assert net.calls[...] == 1


# --- captured modules


def frozen_net():
    """A net whose state no call changes."""
    net = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    return net, lambda x: jax.checkpoint(lambda x: jnp.sin(net(x)).sum())(x)


def test_captured_module_that_would_change_is_refused():
    net = SowingNet(nnx.Rngs(0))
    with pytest.raises(CapturedModuleError, match="Pass it as an argument"):
        remat.with_policy(lambda x: net(x).sum(), "none")(X)


def test_captured_module_that_is_read_is_refused():
    net, fn = frozen_net()

    class Trainer:
        def __init__(self):
            self.net = net

        def loss(self, x):
            return apply(x, net=self.net)

    def apply(x, *, net=net):
        return jax.checkpoint(lambda x: jnp.sin(net(x)).sum())(x)

    for captures in (fn, jax.jit(fn), lambda x: fn(x), apply, Trainer().loss):
        with pytest.raises(CapturedModuleError, match=r"Linear.*Pass it"):
            remat.with_policy(captures, "none")(X)


def test_module_inside_an_opaque_argument_is_refused():
    class Holder:
        def __init__(self):
            self.net = frozen_net()[0]

    def fn(holder, x):
        return jax.checkpoint(lambda x: jnp.sin(holder.net(x)).sum())(x)

    with pytest.raises(CapturedModuleError, match="Linear"):
        remat.with_policy(fn, "none")(Holder(), X)


def test_captured_variable_is_refused():
    scale = nnx.Param(jnp.ones(D))

    def fn(x):
        return jax.checkpoint(lambda x: jnp.sin(x * scale).sum())(x)

    with pytest.raises(CapturedModuleError, match="Param"):
        remat.with_policy(fn, "none")(X)


GLOBAL_NET = nnx.Linear(D, D, rngs=nnx.Rngs(0))


def test_global_module_is_refused():
    def fn(x):
        return jax.checkpoint(lambda x: jnp.sin(GLOBAL_NET(x)).sum())(x)

    with pytest.raises(CapturedModuleError, match="Linear"):
        remat.with_policy(fn, "none")(X)


def test_a_module_as_the_function_is_refused():
    net = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    for fn in (net, net.__call__):
        with pytest.raises(CapturedModuleError, match="Linear"):
            remat.with_policy(fn, "none")(X)


def test_captured_module_whose_fields_are_read_is_fine():
    other, _ = frozen_net()

    def fn(net, x):
        return net(x)[:, : other.in_features].sum()

    remat.with_policy(fn, "none")(SowingNet(nnx.Rngs(0)), X)
