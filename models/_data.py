"""What the reference models are trained on, batch by batch.

A batch is a pure function of (seed, step): nothing about the data is state, so a run
that goes on after an interruption sees what it would have seen.
"""

import dataclasses
import hashlib
import importlib
import os
import pathlib
from typing import Any, Protocol

import numpy as np

from remat.models._errors import TrainError

Batch = dict[str, np.ndarray]


class Data(Protocol):
    """Batches to train on, and others to judge by."""

    @property
    def fingerprint(self) -> str:
        """Changes where the data does."""
        ...

    def batch(self, seed: int, step: int, n_examples: int) -> Batch:
        """Returns the examples of one step."""
        ...

    def held_out(self, n_examples: int) -> list[Batch]:
        """Returns batches that training never sees."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes as words: random windows of a text, the last tenth held out."""

    training: np.ndarray
    """uint8, (n_bytes,)."""
    judging: np.ndarray
    """uint8, (n_bytes,)."""
    n_tokens: int
    """Bytes in a window."""
    fingerprint: str
    """Of the whole text."""

    def batch(self, seed: int, step: int, n_examples: int) -> Batch:
        """Returns `tokens` and, one byte on, `targets`: int32 (n_examples, T)."""
        random = np.random.default_rng((seed, step))
        last = len(self.training) - self.n_tokens
        return self._windows(self.training, random.integers(0, last, n_examples))

    def held_out(self, n_examples: int) -> list[Batch]:
        """Returns up to 4 batches, spread over the held-out text."""
        last = len(self.judging) - self.n_tokens
        starts = np.linspace(0, last - 1, 4 * n_examples).astype(int)
        return [self._windows(self.judging, each) for each in np.split(starts, 4)]

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> Batch:
        windows = starts[:, None] + np.arange(self.n_tokens + 1)
        words = text[windows].astype(np.int32)
        return {"tokens": words[:, :-1], "targets": words[:, 1:]}


def open_text(path: str | os.PathLike[str] | None, n_tokens: int) -> Text:
    """Reads a text file, or without one the help topics that Python ships.

    Raises:
        TrainError: the file cannot be read, or is too short for `n_tokens`.
    """
    if path is None:
        name, raw = "Python's help topics", _help_topics()
    else:
        name, raw = str(path), _read(pathlib.Path(path))
    text = np.frombuffer(raw, np.uint8)
    training, judging = np.split(text, [len(text) * 9 // 10])
    if len(judging) < n_tokens + 2:
        raise TrainError(
            f"{name} has {len(text)} bytes; windows of {n_tokens} tokens need at "
            f"least {10 * (n_tokens + 2)}: give a longer text or a smaller seq"
        )
    return Text(
        training=training,
        judging=judging,
        n_tokens=n_tokens,
        fingerprint=_fingerprint(raw),
    )


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read the text {path}: {error.strerror}") from error


def _help_topics() -> bytes:
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items())).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """scikit-learn's handwritten digits at an image's size, the last fifth held out."""

    images: np.ndarray
    """fp32 in [-1, 1], (n, 8, 8)."""
    labels: np.ndarray
    """int32, (n,)."""
    image_size: int
    """Side to enlarge to, in pixels."""
    n_channels: int
    """Colours, all alike."""
    fingerprint: str
    """Of all digits."""

    def batch(self, seed: int, step: int, n_examples: int) -> Batch:
        """Returns `images`, fp32 (n_examples, Y, X, C), and `labels`, int32."""
        random = np.random.default_rng((seed, step))
        n_training = len(self.labels) * 4 // 5
        return self._examples(random.integers(0, n_training, n_examples))

    def held_out(self, n_examples: int) -> list[Batch]:
        """Returns every held-out digit that fills a batch."""
        n_training = len(self.labels) * 4 // 5
        chosen = np.arange(n_training, len(self.labels))
        n_batches = max(1, len(chosen) // n_examples)
        chosen = np.resize(chosen, n_batches * n_examples)
        return [self._examples(each) for each in np.split(chosen, n_batches)]

    def _examples(self, chosen: np.ndarray) -> Batch:
        # Nearest pixel: every image size is served, also one that 8 does not divide.
        pixel = np.arange(self.image_size) * 8 // self.image_size
        images = self.images[chosen][:, pixel][:, :, pixel, None]
        images = np.repeat(images, self.n_channels, axis=-1)
        return {"images": images, "labels": self.labels[chosen]}


def open_digits(config: Any) -> Digits:
    """Loads scikit-learn's digits for a ViT.

    Raises:
        TrainError: scikit-learn is missing, or the model has fewer than 10 classes.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise TrainError(
            "a ViT is trained on scikit-learn's digits; `pip install scikit-learn`"
        ) from error
    if config.n_classes < 10:
        raise TrainError(f"digits are 10 classes, the model has {config.n_classes}")
    digits = datasets.load_digits()
    images = digits.images.astype(np.float32) / 8 - 1
    return Digits(
        images=images,
        labels=digits.target.astype(np.int32),
        image_size=config.image_size,
        n_channels=config.n_channels,
        fingerprint=_fingerprint(images.tobytes()),
    )


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
