"""Hugging Face checkpoints of GPT-2, Llama, Mixtral and ViT as parameters of ours."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from remat.models._errors import CheckpointError
from remat.models._families import FAMILIES, Family, Logits, Loss
from remat.models._hf_layouts import LAYOUTS
from remat.models._presets import configured
from remat.models._safetensors import open_tensors, read_json


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A model with parameters read from a checkpoint."""

    config: Any
    """The model's frozen configuration, overrides applied."""
    model: Any
    """The Flax Linen module."""
    params: Mapping[str, Any]
    """fp32 arrays in the host's memory."""
    loss: Loss
    """`loss(params, batch)`, as `build` gives it."""
    logits: Logits
    """`logits(params, tokens or images)`: those of `transformers`."""


def load_hf(
    directory: str | os.PathLike[str], *, scan_layers: bool = True, **overrides: Any
) -> Pretrained:
    """Reads a checkpoint that `transformers` saved.

    Args:
        directory: has `config.json` and `model.safetensors`, whole or in shards.
        scan_layers: one traced layer in a loop, or every layer written out.
        **overrides: fields of the model's configuration, as in `build`.

    Returns:
        The model and its parameters; logits are those of `transformers`.

    Raises:
        CheckpointError: files are missing or broken, or the model is of another kind
            or has features that are not here.
        PresetError: an override that the model does not have.

    Example:
        >>> import remat.models
        >>> loaded = remat.models.load_hf("tests/fixtures/hf/llama")
        >>> loaded.config.n_kv_heads
        2
    """
    directory = pathlib.Path(directory)
    settings = read_json(directory / "config.json")
    kind = settings.get("model_type")
    if kind not in LAYOUTS:
        raise CheckpointError(
            f"{directory} holds a model of type {kind!r}; what can be loaded is "
            f"{', '.join(LAYOUTS)}"
        )
    layout = LAYOUTS[kind]
    config = configured(layout.config(settings), scan_layers, overrides)
    tensors = open_tensors(directory)
    made = _family(kind).make(config)
    return Pretrained(
        config=config,
        model=made.model,
        params=layout.read(tensors, config),
        loss=made.loss,
        logits=made.logits,
    )


def _family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
