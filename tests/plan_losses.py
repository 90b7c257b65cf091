"""Small losses for the tests of plans."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYERS, WIDTH, BATCH = 6, 32, 512
WS = jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)

BIG_WS = jax.ShapeDtypeStruct((LAYERS, 2, 256, 256), jnp.float32)
BIG_X = jax.ShapeDtypeStruct((16384, 256), jnp.float32)
"""Large enough that a GPU's schedule does not undo the remat of unrolled layers."""


def layer(x, w):
    hidden = checkpoint_name(jnp.sin(x @ w[0]), "mlpwi")
    return x + jnp.tanh(hidden @ w[1])


def unrolled(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return (x**2).mean()


def scanned(ws, x):
    body = jax.checkpoint(layer, prevent_cse=False)
    x, _ = jax.lax.scan(lambda h, w: (body(h, w), None), x, ws)
    return (x**2).mean()


def two_kinds(ws, x):
    """Every second layer is of another kind."""
    other = jax.checkpoint(lambda x, w: x + jax.nn.softmax(x @ w[0]) @ w[1])
    for i, w in enumerate(ws):
        x = other(x, w) if i % 2 else jax.checkpoint(layer)(x, w)
    return (x**2).mean()


def numbers():
    """Values for `WS` and `X`."""
    keys = jax.random.split(jax.random.key(0))
    return (
        0.2 * jax.random.normal(keys[0], WS.shape),
        jax.random.normal(keys[1], X.shape),
    )
