"""Attention by name: XLA's, or the flash kernel of one kind of device.

The kind is chosen by whoever builds the model, never by looking at the default
backend: a program is often traced here for a device that is elsewhere.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from remat.models._errors import PresetError
from remat.models._sharding import spec_of

AttentionKind = Literal["xla", "pallas", "cudnn"]


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    kind: AttentionKind,
    mesh: Mesh | None = None,
) -> Float[Array, "B T N H"]:
    """Returns softmax(query key^T / sqrt(H)) value; N / K queries share a key.

    Args:
        query: one vector a head and place.
        key: K divides N (grouped-query attention).
        value: as `key`.
        causal: whether places see only themselves and those before.
        kind: "xla" holds the scores, (B, N, T, S) in fp32; "pallas" (TPU) and
            "cudnn" (NVIDIA, fp16 or bf16) are fused and hold none. cuDNN's is traced
            where a GPU and NVIDIA's libraries are, not for an absent one.
        mesh: devices that share the work, by batch and heads.

    Raises:
        PresetError: "cudnn" where there is no cuDNN.
    """
    if kind == "pallas":
        flash = functools.partial(_flash_tpu, causal=causal)
        if mesh is not None:
            flash = _on_each_device(flash, mesh, query.shape, key.shape)
        return flash(query, key, value)
    if kind == "cudnn":
        return _flash_gpu(query, key, value, causal)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation="xla"
    )


def _on_each_device(attention, mesh, query_shape, key_shape):
    """Attention over a device's own sequences and heads: XLA cannot cut a kernel."""
    of_query = spec_of(mesh, query_shape, "batch", None, "heads")
    of_key = spec_of(mesh, key_shape, "batch", None, "heads")
    if of_query != of_key:
        # Fewer key heads than devices: no device could tell which ones are its own.
        of_query = of_key = spec_of(mesh, query_shape, "batch")
    return jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(of_query, of_key, of_key),
        out_specs=of_query,
        check_vma=False,
    )


def _flash_gpu(query, key, value, causal):
    try:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation="cudnn"
        )
    except RuntimeError as error:
        raise PresetError(
            'attention="cudnn" needs an NVIDIA GPU that is here, and its libraries '
            f'({error}); attention="xla" also compiles for one that is elsewhere'
        ) from error


FLASH_BLOCK = 128
"""Places in a block of the TPU kernel, which takes whole blocks only."""


def _flash_tpu(query, key, value, *, causal):
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    # The kernel wants heads before places, and a key for every query head.
    n_places, n_shared = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, n_shared, axis=2) for x in (key, value))
    query, key, value = (
        _whole_blocks(jnp.swapaxes(x, 1, 2)) for x in (query, key, value)
    )
    segments = None
    if query.shape[2] > n_places and not causal:
        # What is padded is no place to look at; causal attention never does.
        is_place = jnp.arange(query.shape[2]) < n_places
        each = jnp.broadcast_to(is_place, (query.shape[0], query.shape[2]))
        segments = flash.SegmentIds(each.astype(jnp.int32), each.astype(jnp.int32))
    scale = 1 / math.sqrt(query.shape[-1])
    out = flash.flash_attention(
        query, key, value, segment_ids=segments, causal=causal, sm_scale=scale
    )
    return jnp.swapaxes(out[:, :, :n_places], 1, 2)


def _whole_blocks(x):
    """Zeros after the last place, up to the end of its block."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % FLASH_BLOCK), (0, 0)))
