"""Trace, lower and compile one step for one target, or find the answer on disk.

What `compare`, `fit` and `plan` have in common. Tracing gives the exact FLOPs;
compiling gives the memory. Compiles may run side by side in threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from remat._compare._cache import load, store
from remat._compare._step import Step, build_step
from remat._compile._compile import compile_lowered, lower_traced, program_hash, trace
from remat._cost._cost import jaxpr_cost
from remat._regions._with_policy import MissingNamesWarning
from remat._report._build import report_from_program
from remat._report._report import MemoryReport
from remat._targets._target import Target, usable_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a step is compiled for, and how it is made from a loss."""

    target: Target
    """The device."""
    make_step: Callable[[Callable[..., Any]], Step]
    """Builds the training step of a loss."""
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    """XLA options for every compile."""

    @classmethod
    def of(
        cls,
        target: Target | str | None,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        compiler_options: Mapping[str, Any] | None = None,
        **step_options: Any,
    ) -> Setup:
        """The setup of a loss that is called with `args` and `kwargs`.

        Args:
            target: As in `compare`.
            args: The loss's arguments.
            kwargs: Its keyword arguments.
            compiler_options: XLA options for every compile.
            **step_options: Those of `build_step` (`optimizer`, `step`, ...).

        Returns:
            The setup, for a target that this machine can compile for.

        Raises:
            TargetError: The target is unknown, or this machine cannot compile for it.
        """
        return cls(
            target=usable_target(target),
            compiler_options=dict(compiler_options or {}),
            make_step=lambda fn: build_step(fn, args, kwargs=kwargs, **step_options),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step that is traced and lowered but not yet compiled."""

    lowered: Any
    """The `jax.stages.Lowered` step."""
    key: str
    """Hash of the program, target, options and versions: equal keys, equal answers."""
    roles: Any
    """What each array argument and output is."""
    flops: int
    """FLOPs of one device's share of the step, from its jaxpr, trip counts included."""
    warnings: tuple[str, ...]
    """What tracing warned about, deprecations apart."""
    missing_names: tuple[str, ...]
    """Checkpoint names the policy spells out and the program does not emit."""


def prepare(
    loss: Callable[..., Any],
    setup: Setup,
    *,
    on_trace: Callable[[Any], None] = lambda jaxpr: None,
) -> Prepared:
    """Traces and lowers the training step of a loss. Holds the interpreter lock.

    Args:
        loss: The loss, under the policy in question.
        setup: How its step is made, and for which target.
        on_trace: Called with the step's jaxpr.

    Returns:
        The step, ready to be compiled.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = setup.make_step(loss)
        traced = trace(
            step.fn, step.args, {}, setup.target, donate_argnums=step.donate_argnums
        )
        lowered = lower_traced(traced, setup.target)
    on_trace(traced.jaxpr)
    missing = [
        name
        for warned in caught
        if isinstance(warned.message, MissingNamesWarning)
        for name in warned.message.missing
    ]
    others = [
        first_line(warned.message)
        for warned in caught
        if not issubclass(warned.category, _NOT_OF_MEMORY)
    ]
    return Prepared(
        lowered=lowered,
        key=program_hash(lowered, setup.target, setup.compiler_options),
        roles=step.roles,
        flops=_flops(traced.jaxpr, step.args),
        warnings=tuple(dict.fromkeys(others)),
        missing_names=tuple(dict.fromkeys(missing)),
    )


_NOT_OF_MEMORY = (
    MissingNamesWarning,  # has a field of its own
    DeprecationWarning,  # for whoever maintains the model
    PendingDeprecationWarning,
    FutureWarning,
)
"""Warnings of tracing that say nothing of what a step costs."""


def forward_flops(loss: Callable[..., Any], setup: Setup) -> int:
    """FLOPs of one device's share of the forward pass alone, from its jaxpr."""
    step = setup.make_step(loss)
    traced = trace(step.forward, step.forward_args, {}, setup.target)
    return _flops(traced.jaxpr, step.forward_args)


def _flops(jaxpr: Any, args: Any) -> int:
    """A device's part of a program's FLOPs: a jaxpr is of all devices together."""
    return int(jaxpr_cost(jaxpr).flops) // n_devices(args)


def n_devices(args: Any) -> int:
    """How many devices arguments are placed on, by their shardings."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return max((len(s.device_set) for s in shardings if s is not None), default=1)


def compiled_report(
    prepared: Prepared,
    setup: Setup,
    *,
    probe: bool = False,
    limit_bytes: int | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> MemoryReport:
    """The report of a prepared step, compiled now or earlier.

    Args:
        prepared: The step.
        setup: What it is compiled for.
        probe: Only the floor, in a fraction of a second (TPU).
        limit_bytes: Memory that the compiler may use; None for the device's (TPU).
        on_compile: Called before a compile, not where the answer was on disk.

    Returns:
        The report.

    Raises:
        CompileError: If the compiler failed for another reason than memory.
    """
    key = f"{prepared.key}-{'floor' if probe else 'full'}"
    if limit_bytes is not None:
        key += f"-{limit_bytes >> 20}MiB"
    program = load(key, setup.target)
    if program is None:
        on_compile()
        program = compile_lowered(
            prepared.lowered,
            setup.target,
            compiler_options=dict(setup.compiler_options),
            probe=probe,
            limit_bytes=limit_bytes,
        )
        store(key, program)
    return report_from_program(program, roles=prepared.roles)


def first_line(message: object) -> str:
    """The first line of an error or warning."""
    return str(message).strip().partition("\n")[0]
