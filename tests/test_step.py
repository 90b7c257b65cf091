from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from remat._compare._step import StepError, build_step

SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def loss(w, x):
    return jnp.sum((x @ w["a"]) ** 2) + w["b"] * 0


PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.float32(1.0)}
X = jnp.arange(8.0).reshape(2, 4)


def test_gradients_are_the_losses_own():
    step = build_step(loss, (PARAMS, X))
    value, grads = step.fn(*step.args)
    expected_value, expected = jax.value_and_grad(loss)(PARAMS, X)
    assert value == expected_value
    assert jnp.array_equal(grads[0]["a"], expected["a"])
    assert step.donate_argnums == () and step.roles is not None
    assert step.roles.arguments == (
        ("parameters", "a"),
        ("parameters", "b"),
        ("batch", "argument 1"),
    )
    assert [role for role, _ in step.roles.outputs] == ["outputs", *["gradients"] * 2]


def test_an_optimizer_is_part_of_the_step_and_donates():
    optimizer = optax.adam(0.1)
    step = build_step(loss, (PARAMS, X), optimizer=optimizer)
    state = optimizer.init((PARAMS,))
    params, _, value = step.fn(step.args[0], state, *step.args[2:])
    grads = jax.grad(loss)(PARAMS, X)
    updates, _ = optimizer.update((grads,), state, (PARAMS,))
    expected: Any = optax.apply_updates((PARAMS,), updates)
    assert jnp.array_equal(params[0]["a"], expected[0]["a"])
    assert value == loss(PARAMS, X)
    assert step.donate_argnums == (0, 1) and step.roles is not None
    categories = [category for category, _ in step.roles.arguments]
    assert categories.count("optimizer") == 5  # count, and two moments of two leaves
    names = [name for category, name in step.roles.arguments if category != "batch"]
    assert names == ["a", "b", "count", "mu/a", "mu/b", "nu/a", "nu/b"]


def test_several_differentiated_arguments_are_told_by_number():
    step = build_step(loss, (PARAMS, X), argnums=(0, 1), optimizer=optax.adam(0.1))
    assert step.roles is not None
    names = [name for _, name in step.roles.arguments]
    assert names[:3] == ["0/a", "0/b", "1"] and names[4] == "mu/0/a"


def test_shapes_are_enough():
    step = build_step(loss, ({"a": SHAPE, "b": 1.0}, SHAPE), optimizer=optax.adam(0.1))
    shapes = jax.eval_shape(step.fn, *step.args)
    assert shapes[0][0]["a"].shape == (4, 4)


def test_argnums_has_aux_and_keywords():
    def other(x, w, *, scale):
        return jnp.sum(x @ w) * scale, {"aux": x}

    step = build_step(
        other, (X, jnp.ones((4, 4))), argnums=1, has_aux=True, kwargs={"scale": 2.0}
    )
    value, grads, aux = step.fn(*step.args)
    assert jnp.array_equal(grads[0], jnp.tile(2 * X.sum(0)[:, None], (1, 4)))
    assert value == 2 * (X @ jnp.ones((4, 4))).sum() and "aux" in aux


def test_equinox_modules_train_their_arrays_only():
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    step = build_step(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2), (model, X))
    _, grads = step.fn(*step.args)
    expected = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(X) ** 2))(model)
    ours, theirs = jax.tree.leaves(grads), jax.tree.leaves(expected)
    assert all(jnp.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_nnx_modules_train_their_parameters_only():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    model = Net(nnx.Rngs(0))
    step = build_step(lambda m, x: jnp.sum(m(x) ** 2), (model, X))
    value, grads = step.fn(*step.args)
    assert len(jax.tree.leaves(grads)) == 4
    assert jnp.isfinite(value)


def test_a_users_own_step():
    step = build_step(loss, (PARAMS, X), step=lambda fn: jax.grad(fn))
    assert step.fn(*step.args)["a"].shape == (4, 4)
    assert step.forward(*step.forward_args) == loss(PARAMS, X)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"argnums": 3}, "argument 3, but the loss has 2"),
        ({"step": jax.grad, "optimizer": optax.sgd(1.0)}, "not both"),
        ({"step": lambda fn: 3}, "returned int"),
    ],
)
def test_says_what_is_wrong(options, match):
    with pytest.raises(StepError, match=match):
        build_step(loss, (PARAMS, X), **options)


def test_nothing_to_differentiate_is_an_error():
    with pytest.raises(StepError, match="no floating-point array"):
        build_step(loss, (jnp.arange(3), X))
