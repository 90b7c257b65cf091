"""Attention by name: XLA's, or the flash kernel of one kind of device.

The kind is chosen by whoever builds the model, never by looking at the default
backend: a program is often traced here for a device that is elsewhere.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

AttentionKind = Literal["xla", "pallas", "cudnn"]


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    kind: AttentionKind,
) -> Float[Array, "B T N H"]:
    """Returns softmax(query key^T / sqrt(H)) value; N / K queries share a key.

    Args:
        query: one vector a head and place.
        key: K divides N (grouped-query attention).
        value: as `key`.
        causal: whether places see only themselves and those before.
        kind: "xla" holds the scores, (B, N, T, S) in fp32; "pallas" (TPU) and
            "cudnn" (NVIDIA, fp16 or bf16) are fused and hold none.
    """
    if kind == "pallas":
        return _flash_tpu(query, key, value, causal)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation=kind
    )


def _flash_tpu(query, key, value, causal):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    # The kernel wants heads before places, and a key for every query head.
    n_shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, n_shared, axis=2) for x in (key, value))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1])
    out = flash_attention(query, key, value, causal=causal, sm_scale=scale)
    return jnp.swapaxes(out, 1, 2)
