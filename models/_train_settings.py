"""What defines a training run: settled when it starts, kept when it goes on."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from remat.models._checks import positive
from remat.models._errors import TrainError
from remat.models._run_directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options that a run's numbers depend on. How it remats is not among them."""

    model: str
    """Preset."""
    dtype: str
    """What is computed in."""
    data: str | None = None
    """Text file; None for what Python ships, and for digits."""
    fingerprint: str | None = None
    """Of the data."""
    batch: int | None = None
    """Sequences or images in one pass; None for the preset's, at least 8."""
    seq: int | None = None
    """Tokens a sequence; None for the preset's."""
    accumulate: int = 1
    """Passes whose gradients are averaged into one step."""
    learning_rate: float = 1e-3
    """At its highest, after the warm-up."""
    warmup: int = 20
    """Steps from 0 to the highest learning rate."""
    horizon: int = 1000
    """Step at which the cosine has come down to a tenth."""
    weight_decay: float = 0.1
    """Of all but biases and norm scales."""
    clip_norm: float = 1.0
    """Greatest global gradient norm."""
    dropout: float = 0.0
    """Share of activations dropped."""
    seed: int = 0
    """Of initial values, of the data's order and of dropout."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More fields of the model's configuration."""

    def __post_init__(self):
        for field in ("accumulate", "warmup", "horizon"):
            positive(field, getattr(self, field))
        if self.warmup >= self.horizon:
            raise TrainError(
                f"warmup of {self.warmup} steps must end before the horizon of "
                f"{self.horizon}"
            )
        for field in ("learning_rate", "clip_norm"):
            if not getattr(self, field) > 0:
                raise TrainError(
                    f"{field} must be above 0, given {getattr(self, field)}"
                )
        _check_options(self.options)


def _check_options(options: Mapping[str, Any]) -> None:
    taken = sorted({"batch", "seq", "dtype", "dropout", "policy"} & set(options))
    if taken:
        raise TrainError(
            f"options hold {taken[0]!r}, which is an argument of its own: give it there"
        )
    try:
        json.dumps(options)
    except TypeError as error:
        raise TrainError(
            f"options are kept in a JSON file and must fit it: {error}"
        ) from error


def settle(run: RunDirectory, given: Mapping[str, Any], default_dtype: str) -> Settings:
    """Returns a run's settings: those it was started with, or new ones.

    Args:
        run: where it is.
        given: what was asked for this time; None for whatever the run has.
        default_dtype: for a new run that was asked for none.

    Raises:
        TrainError: what was asked for is not what the run was started with.
    """
    given = {name: value for name, value in given.items() if value is not None}
    stored = run.settings()
    if stored is None:
        return Settings(**{"dtype": default_dtype, **given})
    fields = {field.name for field in dataclasses.fields(Settings)}
    if set(stored) != fields:
        raise TrainError(f"{run.path} was started by another version of this library")
    for name, value in given.items():
        # The same text may stand elsewhere by now: its fingerprint decides.
        if name != "data" and stored[name] != value:
            raise TrainError(
                f"the run in {run.path} has {name} {stored[name]!r}, given {value!r}; "
                "leave the option out to go on, or train into another directory"
            )
    return Settings(**{**stored, **given})


def absolute(path: str | os.PathLike[str] | None) -> str | None:
    """Returns a path that stays right when the working directory changes."""
    return None if path is None else os.path.abspath(path)
