"""Losses that the tests of lint rules look at."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat import policies
from remat._lint._lint import lint

W, X = jnp.zeros((8, 8)), jnp.zeros((4, 8))
JAX = jax.checkpoint_policies
H = policies.save_names("h")


def found(code, fn, policy, *args, **kwargs):
    """The findings of one rule."""
    return [f for f in lint(fn, policy, *args, **kwargs) if f.code == code]


def unrolled(block, n=2, **kwargs):
    def loss(w, x):
        for _ in range(n):
            x = jax.checkpoint(block, **kwargs)(w, x)
        return x.sum()

    return loss


def scanned(block, unroll=1, **kwargs):
    def loss(w, x):
        layer = jax.checkpoint(block, **kwargs)
        body = lambda x, _: (layer(w, x), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=4, unroll=unroll)[0].sum()

    return loss


def mlp(w, x, name="h"):
    return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w) * 2.0, name) @ w)


def plain(w, x):
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


def experts(w, x):
    up = jnp.einsum("ecd,edf->ecf", x, w)
    return x + jnp.sin(jnp.einsum("ecf,efd->ecd", jax.nn.silu(up), w))


EXPERTS, TOKENS = jnp.zeros((2, 8, 8)), jnp.zeros((2, 4, 8))


def attention(w, x):
    q, k = x @ w, jnp.sin(x) @ w
    heads = lambda y: y.reshape(-1, 2, 4)  # noqa: E731
    scores = jax.nn.softmax(jnp.einsum("shd,thd->hst", heads(q), heads(k)))
    return x + jnp.einsum("hst,thd->shd", scores, heads(jnp.cos(x) @ w)).reshape(
        x.shape
    )


def report(x):
    """A callback."""
