"""What a trained model has learned: text it writes, digits it tells apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat.models._data import Data

Logits = Callable[[Any, Any], jax.Array]


def held_out_loss(
    loss: Callable[..., jax.Array], params: Any, data: Data, n_examples: int
) -> float:
    """Returns the mean loss over the held-out batches."""
    judge = jax.jit(loss)
    losses = [judge(params, batch) for batch in data.held_out(n_examples)]
    return float(np.mean(losses))


def accuracy(logits: Logits, params: Any, data: Data, n_examples: int) -> float:
    """Returns the share of held-out images whose label is found."""
    best = jax.jit(lambda params, images: logits(params, images).argmax(-1))
    right = [
        np.mean(best(params, batch["images"]) == batch["labels"])
        for batch in data.held_out(n_examples)
    ]
    return float(np.mean(right))


def write_text(
    logits: Logits,
    params: Any,
    *,
    start: bytes,
    n_bytes: int,
    window: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Returns what a model of bytes writes after `start`.

    Args:
        logits: `logits(params, tokens)`.
        params: its parameters.
        start: at least one byte.
        n_bytes: how many to write.
        window: most bytes the model sees at once. Everything is computed anew for each
            byte: fit for a look at a small model, not for serving one.
        temperature: below 1 for likelier bytes.
        seed: of the choices.
    """

    @jax.jit
    def choose(params: Any, tokens: jax.Array, last: jax.Array, key: jax.Array):
        found = logits(params, tokens)[0, last, :256]
        return jax.random.categorical(key, found / temperature)

    text = list(start)
    keys = jax.random.split(jax.random.key(seed), n_bytes)
    for key in keys:
        seen = text[-window:]
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : len(seen)] = seen
        last = jnp.asarray(len(seen) - 1)
        text.append(int(choose(params, tokens, last, key)))
    return bytes(text).decode(errors="replace")
