"""The loop of a training run: it can be killed at any step.

A step is a pure function of (state, step number): the data's order and dropout come
from the seed and the number, so a run that goes on from a checkpoint repeats, to the
bit, what an uninterrupted run does.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from remat.models._checkpoints import Checkpoints
from remat.models._data import Data
from remat.models._errors import TrainError
from remat.models._run_directory import RunDirectory
from remat.models._sharding import batch_shardings, hold
from remat.models._train_settings import Settings
from remat.models._training_step import make_optimizer

State = dict[str, Any]
Loss = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What is logged of a step; a row of `metrics.jsonl`."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Of the step's batch before its update, nats."""
    gradient_norm: float
    """Global, before clipping."""
    learning_rate: float
    """Of the step's update."""
    examples_per_s: float
    """Tokens or images trained on a second, since the last row."""
    unit: str
    """"tokens" or "images"."""
    peak_bytes: int | None
    """Most memory in use so far, where the device tells."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of training, compiled when first taken."""

    start: Callable[[Any], State]
    """`start(params)`: the state before the first step."""
    take: Callable[[State, Mapping[str, Any], Any], tuple[State, dict[str, jax.Array]]]
    """`take(state, batch, number)`: the state after, and figures. Donates the state."""
    learning_rate: Callable[[int], Any]
    """Of the step that follows this many."""


def make_step(loss: Loss, settings: Settings, mesh: Mesh | None = None) -> Step:
    """Returns the step of a run: AdamW with warm-up, cosine, clipping, accumulation."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        settings.warmup,
        settings.horizon,
        end_value=settings.learning_rate / 10,
    )
    optimizer = make_optimizer(
        schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
    )

    def start(params: Any) -> State:
        return {"params": params, "optimizer": optimizer.init(params)}

    def take(state: State, batch: Mapping[str, Any], number: Any):
        key = jax.random.fold_in(jax.random.key(settings.seed), number)
        params = state["params"]
        value, gradients = _averaged(loss, params, batch, key, settings)
        updates, moments = optimizer.update(gradients, state["optimizer"], params)
        figures = {"loss": value, "gradient_norm": _norm(gradients)}
        params = optax.apply_updates(params, updates)
        # The state stays where it is: a step is compiled once, and donates.
        return hold({"params": params, "optimizer": moments}, mesh), figures

    return Step(
        start=start, take=jax.jit(take, donate_argnums=0), learning_rate=schedule
    )


def _averaged(
    loss: Loss,
    params: Any,
    batch: Mapping[str, Any],
    key: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, Any]:
    """Loss and gradients, the mean over the passes of one step."""

    def one_pass(i: Any, part: Mapping[str, Any]) -> tuple[jax.Array, Any]:
        if settings.dropout > 0:
            part = {**part, "dropout_key": jax.random.fold_in(key, i)}
        return jax.value_and_grad(loss)(params, part)

    n_passes = settings.accumulate
    if n_passes == 1:
        return one_pass(0, batch)

    def add(total: Any, i_and_part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one_pass(*i_and_part)), None

    parts = {k: v.reshape(n_passes, -1, *v.shape[1:]) for k, v in batch.items()}
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(n_passes), parts))
    return jax.tree.map(lambda x: x / n_passes, total)


def _norm(gradients: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Takes steps, and writes down what a run should not lose."""

    step: Step
    """What is repeated."""
    data: Data
    """Where batches come from."""
    settings: Settings
    """What the run's numbers depend on."""
    mesh: Mesh | None
    """Where batches are spread to; None for one device."""
    run: RunDirectory
    """Where metrics go."""
    checkpoints: Checkpoints
    """Where states go."""
    checkpoint_every: int
    """Steps between checkpoints."""
    log_every: int
    """Steps between rows of the metrics."""
    on_step: Callable[[StepMetrics], None]
    """Called with each row."""

    def go(self, state: State, first: int, last: int) -> State:
        """Returns the state after step `last`, from that after step `first`.

        Raises:
            TrainError: the loss is no number, or something cannot be written.
        """
        started, logged = time.monotonic(), first
        for number in range(first, last):
            state, figures = self.step.take(state, self._batch(number), number)
            done = number + 1
            if done % self.log_every == 0 or done == last:
                loss, norm = (float(figures[k]) for k in ("loss", "gradient_norm"))
                speed = (done - logged) / (time.monotonic() - started)
                self._log(done, loss, norm, speed)
                started, logged = time.monotonic(), done
            if done % self.checkpoint_every == 0 or done == last:
                self.checkpoints.save(done, state)
        self.checkpoints.wait()
        return state

    def _batch(self, number: int) -> Mapping[str, Any]:
        settings = self.settings
        assert settings.batch is not None
        n_examples = settings.batch * settings.accumulate
        batch = self.data.batch(settings.seed, number, n_examples)
        if self.mesh is None:
            return batch
        return jax.device_put(batch, batch_shardings(batch, self.mesh))

    def _log(self, done: int, loss: float, norm: float, steps_per_s: float) -> None:
        settings = self.settings
        if not math.isfinite(loss):
            raise TrainError(
                f"the loss is {loss} at step {done}; start again with a learning_rate "
                f"below {settings.learning_rate}"
            )
        per_step = (settings.batch or 1) * settings.accumulate * (settings.seq or 1)
        metrics = StepMetrics(
            step=done,
            loss=loss,
            gradient_norm=norm,
            learning_rate=float(self.step.learning_rate(done - 1)),
            examples_per_s=per_step * steps_per_s,
            unit="tokens" if settings.seq else "images",
            peak_bytes=_peak_bytes(),
        )
        self.run.log(dataclasses.asdict(metrics))
        self.on_step(metrics)


def _peak_bytes() -> int | None:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
