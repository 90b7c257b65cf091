"""Presets: a published model by name, ready to be traced, with nothing allocated."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from remat.models import gpt2, llama, mixtral, vit

Batch = Mapping[str, Any]
Params = Mapping[str, Any]
Init = Callable[[jax.Array], Params]


class PresetError(ValueError):
    """A preset, a size or an option that does not exist or cannot be."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model with its loss and the shapes to trace it with."""

    name: str
    """The preset."""
    config: Any
    """The model's frozen configuration, overrides applied."""
    model: nn.Module
    """The Flax Linen module."""
    loss: Callable[[Params, Batch], jax.Array]
    """`loss(params, batch)`: mean cross-entropy in nats, an fp32 scalar."""
    args: tuple[Any, Batch]
    """`(params, batch)` as `jax.ShapeDtypeStruct`s."""
    init: Init
    """`init(key)`: real parameters."""
    describe: dict[str, Any]
    """What was built: preset, family, n_params, batch, seq and the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How presets of one kind of model are built and fed."""

    name: str
    """As `describe` says it."""
    configs: Mapping[str, Any]
    """Preset name to configuration."""
    make_model: Callable[[Any], nn.Module]
    """Module of a configuration."""
    sizes: Mapping[str, tuple[int, int | None]]
    """Preset name to default (batch, seq); seq is None for images."""
    batch: Callable[[Any, int, int | None], tuple[Any, Batch]]
    """(config, batch, seq) to the configuration that takes them, and their shapes."""
    inputs: tuple[str, str]
    """Keys of a batch: what the model sees, and what it should answer."""


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


FAMILIES = (
    Family(
        name="gpt2",
        configs=gpt2.PRESETS,
        make_model=gpt2.GPT2,
        sizes={
            "gpt2": (8, 1024),
            "gpt2-medium": (8, 1024),
            "gpt2-large": (8, 1024),
            "gpt2-xl": (8, 1024),
            "gpt2-tiny": (2, 128),
        },
        batch=_words_in_table,
        inputs=("tokens", "targets"),
    ),
    Family(
        name="llama",
        configs=llama.PRESETS,
        make_model=llama.Llama,
        sizes={
            "llama-3.2-1b": (4, 4096),
            "llama-3.2-3b": (2, 4096),
            "llama-3.1-8b": (1, 4096),
            "llama-3.1-70b": (1, 4096),
            "llama-tiny": (2, 128),
        },
        batch=_words,
        inputs=("tokens", "targets"),
    ),
    Family(
        name="mixtral",
        configs=mixtral.PRESETS,
        make_model=mixtral.Mixtral,
        sizes={"mixtral-8x7b": (1, 4096), "mixtral-tiny": (2, 128)},
        batch=_words,
        inputs=("tokens", "targets"),
    ),
    Family(
        name="vit",
        configs=vit.PRESETS,
        make_model=vit.ViT,
        sizes={
            "vit-b16": (64, None),
            "vit-l16": (64, None),
            "vit-b16-1024": (8, None),
            "vit-l16-1024": (8, None),
            "vit-tiny": (2, None),
        },
        batch=_images,
        inputs=("images", "labels"),
    ),
)


def presets() -> tuple[str, ...]:
    """Returns every preset's name, family by family.

    Example:
        >>> import remat.models
        >>> "gpt2-xl" in remat.models.presets()
        True
    """
    return tuple(name for family in FAMILIES for name in family.configs)


def build(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    scan_layers: bool = True,
    **overrides: Any,
) -> Built:
    """Builds a preset: its loss, and its arguments as shapes.

    Args:
        name: one of `presets()`.
        batch: sequences or images a step; the default is the preset's.
        seq: tokens a sequence; the default is the preset's. A GPT-2 sequence beyond
            the position table makes the table longer, which `describe` shows in
            `n_positions` and `n_params`. Images take `image_size=` in place of it.
        scan_layers: one traced layer in a loop, or every layer written out.
        **overrides: fields of the model's configuration, such as `dropout=0.1`,
            `policy="save_dots"`, `dtype=jnp.float32`, `loss_chunks=8`.

    Returns:
        The loss, its arguments and the model. Every layer is a region.

    Raises:
        PresetError: an unknown preset or option, or a size below 1.

    Example:
        >>> import remat.models
        >>> built = remat.models.build("gpt2", batch=4)
        >>> built.describe["n_params"]
        124439808
        >>> built.args[1]["tokens"].shape
        (4, 1024)
    """
    family = _family_of(name)
    config = _configured(family.configs[name], scan_layers, overrides)
    default_batch, default_seq = family.sizes[name]
    batch = _positive("batch", default_batch if batch is None else batch)
    seq = default_seq if seq is None else _positive("seq", seq)
    config, shapes = family.batch(config, batch, seq)
    if config.dropout > 0:
        shapes = {**shapes, "dropout_key": _key_shape()}
    model = family.make_model(config)
    init = make_init(model, shapes[family.inputs[0]])
    params = jax.eval_shape(init, _key_shape())
    return Built(
        name=name,
        config=config,
        model=model,
        loss=make_loss(model, family.inputs),
        args=(params, shapes),
        init=init,
        describe={
            "preset": name,
            "family": family.name,
            "n_params": n_params(params),
            "batch": batch,
            "seq": seq,
            **_plain(config),
        },
    )


def make_loss(
    model: nn.Module, inputs: tuple[str, str] = ("tokens", "targets")
) -> Callable[[Params, Batch], jax.Array]:
    """Returns `loss(params, batch)` of a model.

    `batch` holds the two inputs and, where there is to be dropout, a `dropout_key`.
    """
    given, wanted = inputs

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

    return loss


def make_init(model: nn.Module, shape: jax.ShapeDtypeStruct) -> Init:
    """Returns `init(key)`, a model's parameters from one example of this shape."""
    # Parameters do not depend on the batch or the length of a sequence.
    least = (1, *shape.shape[1:]) if len(shape.shape) > 2 else (1, 1)

    def init(key: jax.Array) -> Params:
        return model.init(key, jnp.zeros(least, shape.dtype))["params"]

    return init


def n_params(params: Any) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _family_of(name: str) -> Family:
    for family in FAMILIES:
        if name in family.configs:
            return family
    raise PresetError(
        f"no preset is called {name!r}{_near(name, presets())}; "
        f"the presets are {', '.join(presets())}"
    )


def _configured(config: Any, scan_layers: bool, overrides: Mapping[str, Any]) -> Any:
    fields = [field.name for field in dataclasses.fields(config)]
    for option in overrides:
        if option not in fields:
            raise PresetError(
                f"{type(config).__name__} has no option {option!r}"
                f"{_near(option, fields)}; its options are {', '.join(fields)}"
            )
    return dataclasses.replace(config, scan_layers=scan_layers, **overrides)


def _near(wanted: str, names: tuple[str, ...] | list[str]) -> str:
    matches = difflib.get_close_matches(wanted, names, n=3)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""


def _positive(what: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PresetError(f"{what} must be a whole number from 1, given {size!r}")
    return size


def _key_shape() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def _plain(config: Any) -> dict[str, Any]:
    """Returns a configuration's fields as what JSON can hold."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["dtype"] = jnp.dtype(fields["dtype"]).name
    if not isinstance(fields["policy"], str):
        fields["policy"] = repr(fields["policy"])
    return fields
