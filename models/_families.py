"""Families of presets: how each kind of model is made, and what it is fed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from remat.models import gpt2, llama, llama_nnx, mixtral, vit
from remat.models._errors import PresetError

Batch = Mapping[str, Any]
Params = Mapping[str, Any]
Init = Callable[[jax.Array], Params]
Loss = Callable[[Params, Batch], jax.Array]
Logits = Callable[[Params, Any], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A model as functions of its parameters."""

    model: Any
    """The Linen module; of an NNX model its graph definition."""
    init: Init
    """`init(key)`: real parameters."""
    loss: Loss
    """`loss(params, batch)`: a scalar."""
    logits: Logits
    """`logits(params, inputs)`: without dropout, fp32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How presets of one kind of model are built and fed."""

    name: str
    """As `describe` says it."""
    configs: Mapping[str, Any]
    """Preset name to configuration."""
    make: Callable[[Any], Made]
    """The model of a configuration."""
    sizes: Mapping[str, tuple[int, int | None]]
    """Preset name to default (batch, seq); seq is None for images."""
    batch: Callable[[Any, int, int | None], tuple[Any, Batch]]
    """(config, batch, seq) to the configuration that takes them, and their shapes."""


def _words(config: Any, batch: int, seq: int | None) -> tuple[Any, Batch]:
    assert seq is not None
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return config, {"tokens": tokens, "targets": tokens}


def _words_in_table(config: Any, batch: int, seq: int | None) -> tuple[Any, Batch]:
    assert seq is not None
    # GPT-2 has a row of parameters per position: longer sequences need more rows.
    rows = max(config.n_positions, seq)
    return _words(dataclasses.replace(config, n_positions=rows), batch, seq)


def _images(config: Any, batch: int, seq: int | None) -> tuple[Any, Batch]:
    if seq is not None:
        raise PresetError(
            f"images have no seq, given {seq}; give image_size= in pixels, "
            f"a multiple of {config.patch_size}"
        )
    shape = (batch, config.image_size, config.image_size, config.n_channels)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return config, {"images": images, "labels": labels}


def _linen_words(module: Callable[[Any], nn.Module], config: Any) -> Made:
    # Parameters do not depend on the batch or the length of a sequence.
    return _linen(module, config, (1, 1), jnp.int32, "tokens", "targets")


def _linen_images(config: vit.ViTConfig) -> Made:
    side = config.patch_size
    shape = (1, side, side, config.n_channels)
    return _linen(vit.ViT, config, shape, jnp.float32, "images", "labels")


def _linen(
    module: Callable[[Any], nn.Module],
    config: Any,
    shape: tuple[int, ...],
    dtype: Any,
    given: str,
    wanted: str,
) -> Made:
    model = module(config)
    # Flash kernels take whole blocks of places, and a mesh whole batches; an example
    # has one of each.
    maker = module(dataclasses.replace(config, attention="xla", mesh=None))

    def init(key: jax.Array) -> Params:
        return maker.init(key, jnp.zeros(shape, dtype))["params"]

    def logits(params: Params, inputs: Any) -> jax.Array:
        return cast(jax.Array, model.apply({"params": params}, inputs))

    def loss(params: Params, batch: Batch) -> jax.Array:
        key = batch.get("dropout_key")
        value = model.apply(
            {"params": params},
            batch[given],
            batch[wanted],
            deterministic=key is None,
            rngs={} if key is None else {"dropout": key},
            method="loss",
        )
        return cast(jax.Array, value)

    return Made(model=model, init=init, loss=loss, logits=logits)


def _nnx_words(config: llama.LlamaConfig) -> Made:
    def make(key: jax.Array) -> llama_nnx.Llama:
        return llama_nnx.Llama(config, nnx.Rngs(params=key))

    def init(key: jax.Array) -> Params:
        return llama_nnx.to_params(make(key))

    def loss(params: Params, batch: Batch) -> jax.Array:
        model = llama_nnx.from_params(config, params)
        key = batch.get("dropout_key")
        return model.loss(batch["tokens"], batch["targets"], dropout_key=key)

    def logits(params: Params, inputs: Any) -> jax.Array:
        return llama_nnx.from_params(config, params)(inputs)

    graph = nnx.graphdef(nnx.eval_shape(make, jax.random.key(0)))
    return Made(model=graph, init=init, loss=loss, logits=logits)


_LLAMA_SIZES = {
    "llama-3.2-1b": (4, 4096),
    "llama-3.2-3b": (2, 4096),
    "llama-3.1-8b": (1, 4096),
    "llama-3.1-70b": (1, 4096),
    "llama-tiny": (2, 128),
}

FAMILIES = (
    Family(
        name="gpt2",
        configs=gpt2.PRESETS,
        make=functools.partial(_linen_words, gpt2.GPT2),
        sizes={
            "gpt2": (8, 1024),
            "gpt2-medium": (8, 1024),
            "gpt2-large": (8, 1024),
            "gpt2-xl": (8, 1024),
            "gpt2-tiny": (2, 128),
        },
        batch=_words_in_table,
    ),
    Family(
        name="llama",
        configs=llama.PRESETS,
        make=functools.partial(_linen_words, llama.Llama),
        sizes=_LLAMA_SIZES,
        batch=_words,
    ),
    Family(
        name="llama-nnx",
        configs={f"{name}-nnx": config for name, config in llama.PRESETS.items()},
        make=_nnx_words,
        sizes={f"{name}-nnx": size for name, size in _LLAMA_SIZES.items()},
        batch=_words,
    ),
    Family(
        name="mixtral",
        configs=mixtral.PRESETS,
        make=functools.partial(_linen_words, mixtral.Mixtral),
        sizes={"mixtral-8x7b": (1, 4096), "mixtral-tiny": (2, 128)},
        batch=_words,
    ),
    Family(
        name="vit",
        configs=vit.PRESETS,
        make=_linen_images,
        sizes={
            "vit-b16": (64, None),
            "vit-l16": (64, None),
            "vit-b16-1024": (8, None),
            "vit-l16-1024": (8, None),
            "vit-tiny": (2, None),
        },
        batch=_images,
    ),
)
