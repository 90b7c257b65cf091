"""The vocabulary loss in chunks is the loss."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import models
from remat.models._loss import cross_entropy


def problem(n_tokens, dtype=jnp.float32):
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(2, n_tokens, 8)), dtype)
    embedding = jnp.asarray(random.normal(size=(11, 8)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 11, (2, n_tokens)))
    return hidden, embedding, targets


def test_is_the_mean_of_minus_log_probabilities():
    hidden, embedding, targets = problem(5)
    logits = np.einsum("btd,vd->btv", hidden, embedding).astype(np.float64)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    at_target = np.take_along_axis(weights, np.asarray(targets)[..., None], -1)
    wanted = -np.log(at_target).mean()
    assert cross_entropy(hidden, embedding, targets) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("n_tokens", "n_chunks"), [(8, 2), (7, 3), (3, 8)])
def test_chunks_change_neither_loss_nor_gradients(n_tokens, n_chunks):
    hidden, embedding, targets = problem(n_tokens)

    def loss(hidden, embedding, n_chunks):
        return 3 * cross_entropy(hidden, embedding, targets, n_chunks=n_chunks)

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    chex.assert_trees_all_close(
        both(hidden, embedding, n_chunks),
        both(hidden, embedding, 1),
        rtol=1e-5,
        atol=1e-6,
    )
    # Evaluation takes another path than differentiation, and agrees with it.
    given = jax.jit(loss, static_argnums=2)(hidden, embedding, n_chunks)
    wanted = both(hidden, embedding, n_chunks)[0]
    chex.assert_trees_all_close(given, wanted, rtol=1e-6)


def test_chunks_in_bf16_keep_the_parameters_type():
    hidden, embedding, targets = problem(6, jnp.bfloat16)
    grad = jax.jit(jax.grad(cross_entropy, argnums=(0, 1)), static_argnames="n_chunks")
    given = grad(hidden, embedding, targets, n_chunks=3)
    wanted = grad(hidden, embedding, targets)
    assert [g.dtype for g in given] == [jnp.bfloat16, jnp.float32]
    chex.assert_trees_all_close(given, wanted, rtol=2e-2, atol=1e-3)


def test_no_chunk_holds_all_logits():
    built = models.build("gpt2", batch=4, seq=512, loss_chunks=8)
    text = str(jax.make_jaxpr(jax.value_and_grad(built.loss))(*built.args))
    assert "f32[4,64,50257]" in text
    assert "[4,512,50257]" not in text
    whole = models.build("gpt2", batch=4, seq=512)
    text = str(jax.make_jaxpr(jax.value_and_grad(whole.loss))(*whole.args))
    assert "f32[4,512,50257]" in text
