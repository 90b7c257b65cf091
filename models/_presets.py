"""Presets: a published model by name, ready to be traced, with nothing allocated."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remat.models import gpt2

Batch = Mapping[str, Any]
Params = Mapping[str, Any]


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
    """The Flax module."""
    loss: Callable[[Params, Batch], jax.Array]
    """`loss(params, batch)`: the mean cross-entropy in nats, an fp32 scalar."""
    args: tuple[Any, Batch]
    """`(params, batch)` as `jax.ShapeDtypeStruct`s."""
    init: Callable[[jax.Array], Params]
    """`init(key)`: real parameters."""
    describe: dict[str, Any]
    """What was built: preset, family, n_params, batch, seq and the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How presets of one kind of model are sized, built and fed."""

    name: str
    """As `describe` says it."""
    configs: Mapping[str, Any]
    """Preset name to configuration."""
    make_model: Callable[[Any], nn.Module]
    """Module of a configuration."""
    batch: Mapping[str, int]
    """Default sequences a step, by preset."""
    seq: Callable[[Any], int]
    """Default sequence length in tokens."""
    resize: Callable[[Any, int], Any]
    """Configuration that takes sequences of this length."""


def _resize_gpt2(config: gpt2.GPT2Config, seq: int) -> gpt2.GPT2Config:
    # GPT-2 has a row of parameters per position: longer sequences need more rows.
    return dataclasses.replace(config, n_positions=max(config.n_positions, seq))


FAMILIES = (
    Family(
        name="gpt2",
        configs=gpt2.PRESETS,
        make_model=gpt2.GPT2,
        batch={"gpt2-tiny": 2},
        seq=lambda config: config.n_positions,
        resize=_resize_gpt2,
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
        batch: sequences a step; by default 8, in tiny presets 2.
        seq: tokens a sequence; by default what the model was published with. A
            GPT-2 sequence beyond the position table makes the table longer, which
            `describe` shows in `n_positions` and `n_params`.
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
    batch = _positive("batch", family.batch.get(name, 8) if batch is None else batch)
    seq = _positive("seq", family.seq(config) if seq is None else seq)
    config = family.resize(config, seq)
    model = family.make_model(config)
    args = _arguments(model, config, batch, seq)
    return Built(
        name=name,
        config=config,
        model=model,
        loss=make_loss(model),
        args=args,
        init=lambda key: _init(model, key),
        describe={
            "preset": name,
            "family": family.name,
            "n_params": n_params(args[0]),
            "batch": batch,
            "seq": seq,
            **_plain(config),
        },
    )


def make_loss(model: nn.Module) -> Callable[[Params, Batch], jax.Array]:
    """Returns `loss(params, batch)` of a language model.

    `batch` holds `tokens` and `targets`, int32 (B, T), and where there is to be
    dropout a `dropout_key`.
    """

    def loss(params: Params, batch: Batch) -> jax.Array:
        key = batch.get("dropout_key")
        return model.apply(
            {"params": params},
            batch["tokens"],
            batch["targets"],
            deterministic=key is None,
            rngs={} if key is None else {"dropout": key},
            method="loss",
        )

    return loss


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


def _init(model: nn.Module, key: jax.Array) -> Params:
    # Parameters do not depend on batch or sequence length: the least will do.
    tokens = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, tokens)["params"]


def _arguments(
    model: nn.Module, config: Any, batch: int, seq: int
) -> tuple[Any, dict[str, Any]]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    shapes = {"tokens": tokens, "targets": tokens}
    if config.dropout > 0:
        shapes["dropout_key"] = key
    return jax.eval_shape(lambda key: _init(model, key), key), shapes


def _plain(config: Any) -> dict[str, Any]:
    """Returns a configuration's fields as what JSON can hold."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["dtype"] = jnp.dtype(fields["dtype"]).name
    if not isinstance(fields["policy"], str):
        fields["policy"] = repr(fields["policy"])
    return fields
