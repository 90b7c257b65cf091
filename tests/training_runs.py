"""Small runs, and how two of them are told apart."""

import functools
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp

from remat import models
from remat.models._checkpoints import Checkpoints
from remat.models._data import Text, open_text
from remat.models._run_directory import open_run, read_rows
from remat.models._train_loop import Loop, State, Step, make_step
from remat.models._train_settings import Settings

SMALL: dict[str, Any] = {"n_layers": 1, "n_heads": 2, "d_model": 8}
RUN: dict[str, Any] = {
    "steps": 6,
    "batch": 2,
    "seq": 8,
    "dtype": "float32",
    "options": SMALL,
    "checkpoint_every": 2,
    "n_sample": 0,
}


class Stop(Exception):
    """What interrupts a run in these tests."""


def stop_at(step):
    """An `on_step` that interrupts a run."""

    def on_step(metrics):
        if metrics.step == step:
            raise Stop

    return on_step


def losses(out):
    """Step to loss, as a run logged them."""
    rows = read_rows(pathlib.Path(out) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def norms(out):
    """Step to gradient norm, as a run logged them."""
    rows = read_rows(pathlib.Path(out) / "metrics.jsonl")
    return [row["gradient_norm"] for row in rows]


def whole_run(factory):
    """A run from start to end, in one go: its directory, and what it ended with."""
    out = factory.mktemp("run") / "whole"
    return out, models.train("gpt2-tiny", out=out, **RUN)


def assert_same_run(out, done, uninterrupted):
    """A run's parameters and losses are those of the run in one go, to the bit."""
    whole, wanted = uninterrupted
    assert norms(out) == norms(whole)
    assert losses(out) == losses(whole)
    chex.assert_trees_all_equal(done.params, wanted.params)
    assert done.held_out_loss == wanted.held_out_loss


SETTINGS = Settings(model="cosines", dtype="float32", batch=2, seq=8, warmup=1)


@functools.cache
def cosines() -> tuple[Step, State, Text]:
    """A step that compiles at once, the state before the first, and its data."""

    def loss(params, batch):
        guess = jnp.cos(batch["tokens"] * params["kernel"]).sum(-1)
        return jnp.mean((guess - batch["targets"][:, 0]) ** 2)

    step = make_step(loss, SETTINGS)
    start = step.start({"kernel": jnp.linspace(0, 1, 8)})
    return step, jax.device_get(start), open_text(None, 8)


def train_cosines(out, steps=4, say=print, on_step=lambda metrics: None):
    """What `train` does around a model; returns the step it began at, and a state."""
    step, start, data = cosines()
    with open_run(out) as run:
        run.start({"model": SETTINGS.model})
        with Checkpoints(run.checkpoints, keep=2) as checkpoints:
            first, state = checkpoints.restore(start, say) or (0, start)
            run.rewind_metrics(first)
            loop = Loop(
                step=step,
                data=data,
                settings=SETTINGS,
                mesh=None,
                run=run,
                checkpoints=checkpoints,
                checkpoint_every=1,
                log_every=1,
                on_step=on_step,
            )
            return first, jax.device_get(loop.go(state, first, steps))
