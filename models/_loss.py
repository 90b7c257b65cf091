"""The vocabulary loss: whole, or in chunks that never hold all logits at once.

At 50 k words the logits of a batch outweigh everything else in a small model:
8 x 1024 tokens are 1.5 GiB in fp32. The chunked loss computes the gradient of each
chunk's logits while it has them (as Liger's fused linear cross-entropy does), so
nothing is recomputed and no region is involved: re-policing a model leaves it alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from remat.models._sharding import constrain


def token_losses(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Returns each token's cross-entropy in nats, fp32, all logits at once."""
    logits = unembed(hidden, embedding)  # (B, T, V) fp32
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - at_target


def unembed(
    hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]
) -> Float[Array, "B T V"]:
    """Returns logits: compute-dtype operands, fp32 sums."""
    return jnp.einsum(
        "btd,vd->btv",
        hidden,
        embedding.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    n_chunks: int = 1,
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy in nats of a tied or untied vocabulary.

    Args:
        hidden: final hidden states in the compute dtype.
        embedding: one row per word; its gradient comes back in its own dtype.
        targets: the words to predict.
        n_chunks: pieces the sequence is cut into. 1 holds all logits; more hold
            1/n of them. The last piece is padded where T does not divide.
        mesh: devices that share the work, by batch and vocabulary.

    Raises:
        ValueError: `n_chunks` is below 1.
    """
    if n_chunks < 1:
        raise ValueError(
            f"loss_chunks must be a whole number from 1, given {n_chunks}; "
            "1 computes all logits at once, 8 an eighth at a time"
        )
    if n_chunks == 1:
        return token_losses(hidden, embedding, targets).mean()
    return chunked_cross_entropy(n_chunks, mesh, hidden, embedding, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_cross_entropy(n_chunks: int, mesh: Mesh | None, hidden, embedding, targets):
    """Mean cross-entropy, one chunk's logits at a time."""

    def one_chunk(chunk):
        hidden, targets, _ = chunk
        return token_losses(hidden, embedding, targets)

    losses = jax.lax.map(one_chunk, _split(n_chunks, mesh, hidden, targets))
    return _merge(losses, targets.shape[1]).mean()


def _chunked_forward(n_chunks, mesh, hidden, embedding, targets):
    weight = 1.0 / targets.size

    def one_chunk(embedding_gradient, chunk):
        hidden, targets, valid = chunk
        losses, vjp = jax.vjp(
            lambda h, e: token_losses(h, e, targets), hidden, embedding
        )
        hidden_gradient, delta = vjp(jnp.where(valid, weight, 0.0))
        # fp32 sums over chunks, whatever the parameters' dtype.
        total = embedding_gradient + delta.astype(jnp.float32)
        total = constrain(total, mesh, "vocab", "embed")
        return total, (losses, hidden_gradient)

    start = constrain(jnp.zeros(embedding.shape, jnp.float32), mesh, "vocab", "embed")
    embedding_gradient, (losses, hidden_gradient) = jax.lax.scan(
        one_chunk, start, _split(n_chunks, mesh, hidden, targets)
    )
    n_tokens = targets.shape[1]
    loss = _merge(losses, n_tokens).mean()
    return loss, (
        _merge(hidden_gradient, n_tokens),
        embedding_gradient.astype(embedding.dtype),
    )


def _chunked_backward(n_chunks, mesh, residuals, cotangent):
    del n_chunks, mesh
    hidden_gradient, embedding_gradient = residuals
    return (
        hidden_gradient * cotangent.astype(hidden_gradient.dtype),
        embedding_gradient * cotangent.astype(embedding_gradient.dtype),
        None,
    )


chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


def _split(n_chunks, mesh, hidden, targets):
    """Cuts (B, T, ...) into (n, B, T/n, ...), padded; says which tokens are real."""
    size = -(-targets.shape[1] // n_chunks)
    valid = jnp.ones(targets.shape, bool)

    def cut(x):
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, n_chunks * size - x.shape[1])
        x = jnp.pad(x, padding)
        x = x.reshape(x.shape[0], n_chunks, size, *x.shape[2:])
        return constrain(jnp.moveaxis(x, 1, 0), mesh, None, "batch")

    return cut(hidden), cut(targets), cut(valid)


def _merge(x, n_tokens):
    """Undoes `_split` on one array: (n, B, T/n, ...) to (B, T, ...)."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :n_tokens]
