"""`remat train`: its options, and the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat._cli._frame import command, one_policy, show
from remat._cli._options import Batch, Debug, MeshAxes, Seq

Accumulate = Annotated[
    int | None, typer.Option("--accumulate", help="Passes averaged into a step.")
]
Horizon = Annotated[
    int | None, typer.Option("--horizon", help="Last step of the schedule.")
]
LearningRate = Annotated[
    float | None, typer.Option("--learning-rate", help="At its highest.")
]
Warmup = Annotated[int | None, typer.Option("--warmup", help="Steps up to it.")]
ClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", help="Greatest gradient norm.")
]
Dropout = Annotated[
    float | None, typer.Option("--dropout", help="Share dropped, as 0.1.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Of values, order and dropout.")
]
CheckpointEvery = Annotated[
    int, typer.Option("--checkpoint-every", help="Steps between checkpoints.")
]
Keep = Annotated[int, typer.Option("--keep", help="Checkpoints kept.")]


def train(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="Such as gpt2-tiny.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The run's directory.")
    ],
    steps: Annotated[
        int, typer.Option("--steps", help="The run's last step, from its start.")
    ] = 200,
    policy: Annotated[
        str, typer.Option("--policy", help="A policy, or a plan's file.")
    ] = "nothing",
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Text; default: Python's help."),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    mesh: MeshAxes = None,
    accumulate: Accumulate = None,
    horizon: Horizon = None,
    learning_rate: LearningRate = None,
    warmup: Warmup = None,
    clip_norm: ClipNorm = None,
    dropout: Dropout = None,
    dtype: Dtype = None,
    seed: Seed = None,
    checkpoint_every: CheckpointEvery = 100,
    keep: Keep = 3,
    debug: Debug = False,
) -> None:
    """Train a preset, or go on with a run where its last checkpoint is."""
    with command(None, debug):
        from remat import models

        with models.progress_bar(steps) as on_step:
            done = models.train(
                model,
                out=out,
                steps=steps,
                policy=policy if policy.endswith(".json") else one_policy(policy),
                data=data,
                batch=batch,
                seq=seq,
                mesh=mesh,
                accumulate=accumulate,
                horizon=horizon,
                learning_rate=learning_rate,
                warmup=warmup,
                clip_norm=clip_norm,
                dropout=dropout,
                dtype=dtype,
                seed=seed,
                checkpoint_every=checkpoint_every,
                keep=keep,
                on_step=on_step,
                say=show,
            )
        show(f"step {done.step}: held-out loss {done.held_out_loss:.3f} nats")
        if done.accuracy is not None:
            show(f"accuracy {done.accuracy:.1%}")
        if done.sample:
            typer.echo(f"sample: {done.sample!r}")
