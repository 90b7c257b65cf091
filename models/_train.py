"""Training the reference models, from nothing or from where a run was left.

The policy is not part of a run's state or settings: a run may go on under another one,
and its numbers are the same.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remat._plan._plan_file import Plan
from remat._regions._with_policy import with_policy
from remat.models._checkpoints import Checkpoints
from remat.models._checks import positive
from remat.models._data import Data, open_digits, open_text
from remat.models._errors import TrainError
from remat.models._mesh import MeshLike, n_batch_shards
from remat.models._presets import Built, build
from remat.models._run_directory import open_run
from remat.models._sampling import accuracy, held_out_loss, write_text
from remat.models._sharding import shardings, with_shardings
from remat.models._train_loop import Loop, State, Step, StepMetrics, make_step
from remat.models._train_settings import Settings, absolute, settle

Loss = Callable[..., jax.Array]
_log = logging.getLogger("remat.models")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run ended with."""

    step: int
    """Steps done."""
    started_at: int
    """Step of the checkpoint this call went on from; 0 for none."""
    params: Any
    """The model's parameters."""
    held_out_loss: float
    """On data never trained on, nats."""
    accuracy: float | None
    """Share of held-out images told right; None for text."""
    sample: str | None
    """What the model writes; None for images."""


def train(
    model: str,
    *,
    out: str | os.PathLike[str],
    steps: int = 200,
    policy: Any = "nothing",
    data: str | os.PathLike[str] | None = None,
    batch: int | None = None,
    seq: int | None = None,
    mesh: MeshLike | None = None,
    accumulate: int | None = None,
    learning_rate: float | None = None,
    warmup: int | None = None,
    horizon: int | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    dropout: float | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    log_every: int = 1,
    n_sample: int = 120,
    on_step: Callable[[StepMetrics], None] | None = None,
    say: Callable[[str], None] = _log.warning,
) -> Trained:
    """Trains a preset, or goes on with a run where its last checkpoint is.

    Trains on the default device, or on a mesh of this process's devices (for several
    hosts see `docs/sharding.md`). Options left at None are those the run was started
    with; a new run takes the defaults of `Settings`.

    Args:
        model: a preset of `presets()`.
        out: the run's directory: `run.json`, `metrics.jsonl` and `checkpoints/`.
        steps: the run's last step, counted from its start.
        policy: what `remat.with_policy` takes, a `remat.Plan`, or a plan's file. It
            changes memory alone, and may be another one when a run goes on.
        data: a text file, its bytes the words; by default the help topics that Python
            ships. A ViT is trained on scikit-learn's digits.
        batch: sequences or images in one pass.
        seq: tokens a sequence.
        mesh: devices to train on, such as `"fsdp=4,tensor=2"`. Like the policy it is
            no part of the run, which may go on with another: sums are then taken in
            another order, so its numbers agree to rounding and not to the bit.
        accumulate: passes whose gradients are averaged into one step.
        learning_rate: at its highest.
        warmup: steps up to it.
        horizon: step at which the cosine has come down to a tenth of it. Not `steps`:
            a run stopped early and taken up again has one schedule.
        weight_decay: AdamW's, of all but biases and norm scales.
        clip_norm: greatest global gradient norm.
        dropout: share of activations dropped.
        dtype: "bfloat16" or "float32"; by default fp32 on a CPU, else bf16.
        seed: of initial values, the data's order and dropout.
        options: more fields of the model's configuration.
        checkpoint_every: steps between checkpoints; the last step has one always.
        keep: checkpoints kept.
        log_every: steps between rows of the metrics; the last step has one always.
        n_sample: bytes of text to write at the end.
        on_step: called with each row.
        say: told of what was passed over, such as a broken checkpoint.

    Returns:
        The trained parameters, and how the model does on held-out data.

    Raises:
        PolicyError, PlanError: a policy or a plan that cannot be used.
        TrainError: an option that differs from the run's, data or directory that
            cannot be used, another run in the directory, a disk that is full.
        PresetError: an unknown preset or option, or a batch the mesh does not divide.
        TargetError: a mesh of more devices than there are.

    Example:
        >>> import remat.models
        >>> remat.models.train("gpt2-tiny", out="run", steps=300)  # doctest: +SKIP
    """
    given = {
        "model": model,
        "data": absolute(data),
        "batch": batch,
        "seq": seq,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "horizon": horizon,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "dropout": dropout,
        "dtype": dtype,
        "seed": seed,
        "options": None if options is None else dict(options),
    }
    for name, size in {
        "steps": steps,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "log_every": log_every,
    }.items():
        positive(name, size)
    _refuse_several_hosts()
    with open_run(out) as run:
        settings, built, source = _prepare(settle(run, given, _default_dtype()), mesh)
        devices = built.config.mesh
        step = make_step(_under(policy, built.loss), settings, devices)
        run.start(dataclasses.asdict(settings))
        with Checkpoints(run.checkpoints, keep=keep) as checkpoints:
            first, state = _restored_or_new(checkpoints, step, built, settings, say)
            if first > steps:
                raise TrainError(
                    f"the run in {run.path} has done {first} steps; ask for more than "
                    f"that, given {steps}"
                )
            run.rewind_metrics(first)
            loop = Loop(
                step=step,
                data=source,
                settings=settings,
                mesh=devices,
                run=run,
                checkpoints=checkpoints,
                checkpoint_every=checkpoint_every,
                log_every=log_every,
                on_step=on_step or (lambda metrics: None),
            )
            state = loop.go(state, first, steps)
        return _judged(built, source, settings, state, steps, first, n_sample)


def _default_dtype() -> str:
    # A CPU computes bf16 by way of fp32: slower, and less exact.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _refuse_several_hosts() -> None:
    if (n_processes := jax.process_count()) > 1:
        raise TrainError(
            f"a run is one process's, and here are {n_processes}: take build(mesh=...) "
            "and train_step, as docs/sharding.md shows"
        )


def _under(policy: Any, loss: Loss) -> Loss:
    """The loss under a policy or a plan."""
    if isinstance(policy, os.PathLike):
        policy = os.fspath(policy)
    if isinstance(policy, str) and policy.endswith(".json"):
        policy = Plan.load(policy)
    return policy.apply(loss) if isinstance(policy, Plan) else with_policy(loss, policy)


def _prepare(settings: Settings, mesh: MeshLike | None) -> tuple[Settings, Built, Data]:
    """The model and the data of a run, and its settings with no size left open."""
    if settings.dtype not in ("bfloat16", "float32"):
        raise TrainError(
            f'dtype must be "bfloat16" or "float32", given {settings.dtype!r}'
        )
    built = build(
        settings.model,
        batch=settings.batch,
        seq=settings.seq,
        mesh=mesh,
        dtype=jnp.dtype(settings.dtype).type,
        dropout=settings.dropout,
        **settings.options,
    )
    data = _open_data(settings, built)
    if settings.fingerprint not in (None, data.fingerprint):
        raise TrainError(
            f"the data is not what the run was started with (fingerprint "
            f"{settings.fingerprint}, now {data.fingerprint}); give the same text, or "
            "train into another directory"
        )
    sizes = {
        "batch": settings.batch or _at_least(8, built),
        "seq": built.describe["seq"],
    }
    settings = dataclasses.replace(settings, fingerprint=data.fingerprint, **sizes)
    return settings, built, data


def _at_least(n: int, built: Built) -> int:
    """The preset's batch; where that is less than n, the next its mesh can cut."""
    n_shards = 1 if built.config.mesh is None else n_batch_shards(built.config.mesh)
    return max(built.describe["batch"], -(-n // n_shards) * n_shards)


def _open_data(settings: Settings, built: Built) -> Data:
    if built.describe["family"] != "vit":
        if built.config.vocab_size < 256:
            raise TrainError(
                f"bytes are 256 words, the model has {built.config.vocab_size}"
            )
        return open_text(settings.data, built.describe["seq"])
    if settings.data is not None:
        raise TrainError(
            f"{settings.model} is trained on scikit-learn's digits and takes no text, "
            f"given {settings.data}"
        )
    return open_digits(built.config)


def _restored_or_new(
    checkpoints: Checkpoints,
    step: Step,
    built: Built,
    settings: Settings,
    say: Callable[[str], None],
) -> tuple[int, State]:
    key, mesh = jax.random.key(settings.seed), built.config.mesh

    def new() -> State:
        return step.start(built.init(key))

    shapes, placed = jax.eval_shape(new), None
    if mesh is not None:
        placed = shardings(shapes, mesh)
        shapes = with_shardings(shapes, placed)
    found = checkpoints.restore(shapes, say)
    if found is None:
        return 0, jax.jit(new, out_shardings=placed)()
    done, state = found
    return done, _owned(state, placed)


def _owned(state: State, placed: Any) -> State:
    """A state in XLA's own buffers, as an uninterrupted run has it.

    What was read is NumPy's memory. A CPU would use it in place where it happens to be
    aligned and copy it where not, and donate neither.
    """

    def copied(state: State) -> State:
        return jax.tree.map(jnp.copy, state)

    return jax.jit(copied, donate_argnums=0, out_shardings=placed)(state)


def _judged(
    built: Built,
    data: Data,
    settings: Settings,
    state: State,
    steps: int,
    first: int,
    n_sample: int,
) -> Trained:
    params, n_examples = state["params"], settings.batch or 1
    of_images = built.describe["family"] == "vit"
    share = sample = None
    if of_images:
        share = accuracy(built.logits, params, data, n_examples)
    elif n_sample:
        window = min(built.describe["seq"], 64)
        sample = write_text(
            built.logits, params, start=b"The ", n_bytes=n_sample, window=window
        )
    return Trained(
        step=steps,
        started_at=first,
        params=params,
        held_out_loss=held_out_loss(built.loss, params, data, n_examples),
        accuracy=share,
        sample=sample,
    )
