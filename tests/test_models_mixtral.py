"""The mixture of experts: dropless, balanced by a loss, its choices kept by name."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import policies
from remat.models import mixtral

CONFIG = dataclasses.replace(mixtral.PRESETS["mixtral-tiny"], dtype=jnp.float32)


def moe(x):
    module: Any = mixtral.MoE(CONFIG)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    random = np.random.default_rng(0)
    fill = lambda p: random.normal(0, 0.2, p.shape).astype(np.float32)  # noqa: E731
    return module, jax.tree.map(fill, shapes)


def test_equals_every_expert_on_every_token():
    x = np.random.default_rng(1).normal(size=(2, 9, CONFIG.d_model))
    x = x.astype(np.float32)
    module, params = moe(x)
    out, _ = jax.jit(module.apply)(params, x)

    def every_expert(params, x):
        experts = params["params"]["experts"]
        tokens = x.reshape(-1, CONFIG.d_model)
        logits = tokens @ params["params"]["router"]["kernel"]
        chosen, weights, _ = mixtral.route(logits, 2)
        gate = jnp.einsum("sd,edf->sef", tokens, experts["wi_0"])
        up = jnp.einsum("sd,edf->sef", tokens, experts["wi_1"])
        every = jnp.einsum("sef,efd->sed", jax.nn.silu(gate) * up, experts["wo"])
        both = jnp.take_along_axis(every, chosen[:, :, None], axis=1)
        return jnp.sum(weights[:, :, None] * both, axis=1)

    wanted = jax.jit(every_expert)(params, x)
    chex.assert_trees_all_close(out.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_drops_no_token_when_all_want_one_expert():
    x = jnp.ones((1, 7, CONFIG.d_model))
    module, params = moe(x)
    out, load_balance = jax.jit(module.apply)(params, x)
    chex.assert_trees_all_close(out, jnp.broadcast_to(out[:, :1], out.shape), rtol=1e-5)
    assert jnp.abs(out).min(-1).max() > 0
    assert load_balance > 2


def test_load_balance_is_least_where_the_load_is_even():
    even = jnp.array([[0, 1], [1, 2], [2, 3], [3, 0]])
    skewed = jnp.array([[0, 1]] * 4)
    flat = jnp.full((4, 4), 0.25)
    peaked = jnp.tile(jnp.array([0.4, 0.4, 0.1, 0.1]), (4, 1))
    assert mixtral.load_balance_loss(even, flat) == pytest.approx(2)
    # 4 experts * (2 * 1 * 0.4)
    assert mixtral.load_balance_loss(skewed, peaked) == pytest.approx(3.2)


def test_weights_sum_to_one_and_follow_the_best_two():
    logits = jnp.array([[0.0, 2.0, 1.0, -1.0]])
    experts, weights, _ = mixtral.route(logits, 2)
    np.testing.assert_array_equal(experts, [[1, 2]])
    chex.assert_trees_all_close(weights, jax.nn.softmax(jnp.array([[2.0, 1.0]])))


@pytest.mark.parametrize(
    ("policy", "n_top_k"), [("nothing", 2), (policies.save_names("routed_experts"), 1)]
)
def test_kept_choices_are_not_chosen_again(policy, n_top_k):
    model = mixtral.Mixtral(dataclasses.replace(CONFIG, policy=policy))
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params):
        return model.apply(params, tokens, tokens, method="loss")

    # One traced layer: once going forward, and again only where it is recomputed.
    assert str(jax.make_jaxpr(jax.grad(loss))(params)).count("top_k[") == n_top_k
