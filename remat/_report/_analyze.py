"""From a function, a lowered or a compiled program to its memory report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat._compile._compile import Program, XlaStats, compile_lowered, lower
from remat._report._build import report_from_program
from remat._report._report import MemoryReport
from remat._report._roles import Roles
from remat._targets._target import Target
from remat._targets._target import target as find_target


def analyze(
    program: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    roles: Roles | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Reports what a program uses on a device that need not be there.

    Args:
        program: A function (jitted or not), what its `.lower()` gives, or what that
            gives when compiled. A compiled program tells its totals only.
        *args: The function's arguments: arrays, `jax.ShapeDtypeStruct`s (with
            shardings where it is sharded), or pytrees of them. Nothing is allocated.
        target: The device: a name such as "h100", a `Target`, or None for the one
            that is attached.
        donate_argnums: Arguments of the function whose memory its outputs may take.
        compiler_options: XLA options for the compile.
        roles: What arguments and outputs are, so that parameters, optimizer state and
            batch can be told apart.
        **kwargs: The function's keyword arguments.

    Returns:
        The report, also for a program that does not fit.

    Raises:
        TargetError: The target is not known, or cannot be compiled for here.
        CompileError: XLA failed for another reason than memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> report = analyze(lambda x: (x @ x).sum(), x)
        >>> report.argument_bytes
        262144
    """
    device = find_target(target)
    if isinstance(program, jax.stages.Compiled):
        return report_from_program(_compiled(program, device), roles=roles)
    if isinstance(program, jax.stages.Lowered):
        lowered = program
    else:
        lowered = lower(program, args, kwargs, device, donate_argnums=donate_argnums)
    compiled = compile_lowered(lowered, device, compiler_options=compiler_options)
    return report_from_program(compiled, roles=roles)


def _compiled(compiled: jax.stages.Compiled, target: Target) -> Program:
    stats = compiled.memory_analysis()
    assert stats is not None
    return Program(
        target=target,
        hlo_proto=None,
        codegen_proto=None,
        stats=XlaStats(
            argument_bytes=stats.argument_size_in_bytes,
            output_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
            host_temp_bytes=stats.host_temp_size_in_bytes,
            generated_code_bytes=stats.generated_code_size_in_bytes,
        ),
        oom=None,
        codegen_error=None,
        exact=True,
        compiler_options={},
        program_hash="",
        executable=compiled,
    )
