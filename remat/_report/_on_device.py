"""What a program was predicted to use, against what the attached device measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from remat._compile._compile import compile_lowered, lower
from remat._regions._flatten import is_traceable
from remat._report._build import report_from_program
from remat._report._report import MemoryReport
from remat._sizes import format_bytes
from remat._targets._target import Target, TargetError
from remat._targets._target import target as find_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of a program on the attached device."""

    report: MemoryReport = field(repr=False)
    """What was predicted from the compiled program."""
    peak_bytes: int | None
    """The most device memory the program took, its arguments included; None where
    that could not be told."""
    why: str | None
    """Why it could not."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; the prediction has constants and code in it too."""
        report = self.report
        predicted = report.peak_bytes + report.constant_bytes
        return None if self.peak_bytes is None else self.peak_bytes / max(1, predicted)

    def __str__(self) -> str:
        predicted = f"predicted {format_bytes(self.report.peak_bytes)}"
        if self.peak_bytes is None:
            return f"{predicted}, not measured: {self.why}"
        return (
            f"{predicted}, measured {format_bytes(self.peak_bytes)} ({self.ratio:.3f})"
        )


def measure(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Measured:
    """Runs a function once on the attached device and says what memory it took.

    Device memory is read before and after from the device's own `memory_stats()`,
    whose peak is that of the whole process: do it first, before anything larger ran.

    Args:
        fn: The function, jitted or not.
        *args: Its arguments: arrays, on the device already or not.
        donate_argnums: Arguments whose memory its outputs may take; they are gone.
        compiler_options: XLA options for the compile.
        **kwargs: Its keyword arguments.

    Returns:
        The peak, predicted and measured. Not measured where the backend keeps no
        statistics (CPU), or something larger ran in the process before.

    Raises:
        TargetError: An argument has a shape and no values.
        CompileError: XLA failed.

    Example:
        >>> import jax.numpy as jnp
        >>> print(measure(lambda x: x @ x, jnp.ones((64, 64))))
        predicted 32.0 KiB, not measured: the cpu backend keeps no memory statistics
    """
    device = find_target(None)
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TargetError(
            "measure runs the function, so it wants arrays; for shapes use analyze"
        )
    lowered = lower(fn, args, kwargs, device, donate_argnums=donate_argnums)
    program = compile_lowered(lowered, device, compiler_options=compiler_options)
    report = report_from_program(program)
    if program.executable is None:
        return Measured(report=report, peak_bytes=None, why="it does not fit")
    if _stats(device) is None:
        why = f"the {device.kind} backend keeps no memory statistics"
        return Measured(report=report, peak_bytes=None, why=why)
    arrays, named = jax.block_until_ready(jax.device_put(_arrays((args, kwargs))))
    before = _stats(device) or {}
    jax.block_until_ready(program.executable(*arrays, **named))
    return _measured(report, before, _stats(device) or {})


def _arrays(tree: Any) -> Any:
    """What the compiled program takes: leaves that are no arrays are held in it."""
    return jax.tree.map(lambda leaf: leaf if is_traceable(leaf) else None, tree)


def _measured(
    report: MemoryReport, before: Mapping[str, int], after: Mapping[str, int]
) -> Measured:
    """What the run took: the new peak, less what was there that is no argument."""
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        why = "something larger ran in this process before"
        return Measured(report=report, peak_bytes=None, why=why)
    others = before["bytes_in_use"] - report.argument_bytes
    peak = after["peak_bytes_in_use"] - max(0, others)
    return Measured(report=report, peak_bytes=peak, why=None)


def _stats(target: Target) -> Mapping[str, int] | None:
    """The first device's own figures; None where the backend keeps none."""
    stats = target.devices()[0].memory_stats()
    return stats if stats and "peak_bytes_in_use" in stats else None
