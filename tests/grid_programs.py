"""One small program of each kind that policies are proven on, in two dtypes.

Each entry of `PROGRAMS` takes a dtype and gives `(loss, args)`; the loss is a function
of parameters and input, whose layers are regions, and returns a float32 scalar.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from remat import models

B, T, D, E = 2, 4, 8, 2


def keyed(shapes, dtype):
    """Arrays of some shapes, by name."""
    keys = jr.split(jr.key(0), len(shapes))
    return {
        name: (0.4 * jr.normal(key, shape)).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def inputs(dtype, *shape):
    return jr.normal(jr.key(7), shape or (B, T, D)).astype(dtype)


def squared(y):
    return (y.astype(jnp.float32) ** 2).mean()


# --- GPT-2


def gpt2(dtype, scan_layers):
    built = models.build(
        "gpt2-tiny",
        batch=B,
        seq=T,
        scan_layers=scan_layers,
        dtype=dtype,
        n_layers=2,
        d_model=D,
        n_heads=2,
        vocab_size=16,
    )
    keys = iter(jr.split(jr.key(1), 99))

    def real(shape):
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jr.randint(next(keys), shape.shape, 0, 16, shape.dtype)
        return 0.4 * jr.normal(next(keys), shape.shape, shape.dtype)

    return built.loss, jax.tree.map(real, built.args)


def gpt2_scanned(dtype):
    return gpt2(dtype, True)


def gpt2_unrolled(dtype):
    return gpt2(dtype, False)


# --- an NNX block


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        make = functools.partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.wi, self.wo = make(D, 2 * D), make(2 * D, D)
        self.norm = nnx.LayerNorm(D, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = checkpoint_name(x, "decoder_layer_input")
        with jax.named_scope("mlp"):
            up = checkpoint_name(self.wi(self.norm(x)), "mlpwi")
            return x + checkpoint_name(self.wo(nnx.gelu(up)), "mlpwo")


def nnx_block(dtype):
    graph, params, rest = nnx.split(NnxBlock(dtype, nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, x):
        block = nnx.merge(graph, params, rest, copy=True)
        return squared(nnx.remat(NnxBlock.__call__)(block, x))

    return loss, (params, inputs(dtype))


# --- plain JAX


def attention(params, x):
    """A transformer block with MaxText's names; T x T scores are batched products."""
    x = checkpoint_name(x, "decoder_layer_input")
    with jax.named_scope("attention"):
        q, k, v = (
            checkpoint_name(x @ params[name], name)
            for name in ("query_proj", "key_proj", "value_proj")
        )
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
        context = checkpoint_name(jnp.einsum("bts,bsd->btd", scores, v), "context")
        with jax.named_scope("out"):
            h = x + checkpoint_name(context @ params["out"], "out_proj")
    with jax.named_scope("mlp"):
        up = checkpoint_name(h @ params["wi"], "mlpwi")
        return jnp.sin(h + checkpoint_name(jnp.tanh(up) @ params["wo"], "mlpwo"))


def plain_jax(dtype):
    names = ("query_proj", "key_proj", "value_proj", "out", "wi", "wo")
    params = keyed(dict.fromkeys(names, (D, D)), dtype)
    return lambda p, x: squared(jax.checkpoint(attention)(p, x)), (
        params,
        inputs(dtype),
    )


# --- a mixture of experts


def experts(params, x):
    """The router takes one of two experts a token; their products are batched."""
    with jax.named_scope("moe"):
        logits = (x @ params["router"]).astype(jnp.float32)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), 1)
        gates = checkpoint_name(gates.astype(x.dtype), "gate_weights")
        one_hot = jax.nn.one_hot(chosen[..., 0], E, dtype=x.dtype)
        taken = jnp.einsum("bte,btd->ebtd", one_hot, x).reshape(E, B * T, D)
        up = checkpoint_name(jnp.einsum("end,edf->enf", taken, params["wi"]), "mlpwi")
        down = jnp.einsum("enf,efd->end", jnp.tanh(up), params["wo"])
        down = checkpoint_name(down, "mlpwo").reshape(E, B, T, D)
        return x + jnp.sin(jnp.einsum("ebtd,bte->btd", down, one_hot) * gates)


def moe(dtype):
    shapes = {"router": (D, E), "wi": (E, D, 2 * D), "wo": (E, 2 * D, D)}
    return lambda p, x: squared(jax.checkpoint(experts)(p, x)), (
        keyed(shapes, dtype),
        inputs(dtype),
    )


# --- a conv net


def convolution(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv_block(params, x):
    h = checkpoint_name(convolution(x, params["conv_0"]), "conv_0")
    h = jnp.sin(h) * params["scale"]
    h = checkpoint_name(convolution(h, params["conv_1"]), "conv_1")
    h = convolution(jnp.tanh(h), params["conv_out"])
    return jnp.tanh(x + checkpoint_name(h, "conv_out"))


def conv_net(dtype):
    shapes = {n: (3, 3, 2, 2) for n in ("conv_0", "conv_1", "conv_out")}
    params = keyed({**shapes, "scale": (2,)}, dtype)
    return lambda p, x: squared(jax.checkpoint(conv_block)(p, x)), (
        params,
        inputs(dtype, 2, 4, 4, 2),
    )


# --- a flash attention kernel: a custom_vjp around Pallas, with residuals of its own


def kernel(q, k, v, out, total):
    scores = jnp.exp(q[...] @ k[...].T)
    total[...] = scores.sum(-1)
    out[...] = (scores @ v[...]) / total[...][:, None]


def run_kernel(q, k, v):
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:1], q.dtype),
    )
    return pl.pallas_call(kernel, shapes, interpret=True)(q, k, v)


@jax.custom_vjp
def flash(q, k, v):
    return run_kernel(q, k, v)[0]


def flash_forward(q, k, v):
    out, total = run_kernel(q, k, v)
    return out, (q, k, v, out, total)


def flash_backward(kept, g):
    q, k, v, out, total = kept
    weights = jnp.exp(q @ k.T) / total[:, None]
    d_weights = g @ v.T
    d_scores = weights * (d_weights - (g * out).sum(-1, keepdims=True))
    return d_scores @ k, d_scores.T @ q, weights.T @ g


flash.defvjp(flash_forward, flash_backward)


def flash_block(params, x):
    with jax.named_scope("attention"):
        q, k, v = (
            checkpoint_name(x @ params[name], name)
            for name in ("query_proj", "key_proj", "value_proj")
        )
        context = checkpoint_name(flash(q, k, v), "context")
    return x + checkpoint_name(jnp.sin(context) @ params["out"], "out_proj")


def flash_attention(dtype):
    names = ("query_proj", "key_proj", "value_proj", "out")
    params = keyed(dict.fromkeys(names, (D, D)), dtype)
    return lambda p, x: squared(jax.checkpoint(flash_block)(p, x)), (
        params,
        inputs(dtype, T, D),
    )


PROGRAMS = (
    gpt2_scanned,
    gpt2_unrolled,
    nnx_block,
    plain_jax,
    moe,
    conv_net,
    flash_attention,
)
