"""A progress bar for a training run, on a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from remat.models._train_loop import StepMetrics


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Shows a run's progress; gives what `train(on_step=)` takes.

    Example:
        >>> from remat import models
        >>> with models.progress_bar(20) as on_step:  # doctest: +SKIP
        ...     models.train("gpt2-tiny", out="run", steps=20, on_step=on_step)
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("compiling", total=steps)

        def on_step(metrics: StepMetrics) -> None:
            progress.update(task, completed=metrics.step, description=_line(metrics))

        yield on_step


def _line(metrics: StepMetrics) -> str:
    line = f"loss {metrics.loss:.4f}  {metrics.examples_per_s:,.0f} {metrics.unit}/s"
    if metrics.peak_bytes is None:
        return line
    return f"{line}  peak {metrics.peak_bytes / 2**30:.2f} GiB"
