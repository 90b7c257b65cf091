"""Lower a function for a target and compile it, keeping what XLA decided on memory."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from remat import _jax_compat as compat
from remat._compile._dump import dump
from remat._compile._errors import CompileError as CompileError
from remat._compile._lower import lower as lower
from remat._compile._lower import lower_traced as lower_traced
from remat._compile._lower import trace as trace
from remat._compile._oom import OutOfMemory as OutOfMemory
from remat._compile._oom import parse_out_of_memory
from remat._targets import _plugins
from remat._targets._target import Target, TargetError

TPU_LIMIT_OPTION = "xla_tpu_max_hbm_size_mib"
"""Compiler option: the memory that the TPU compiler may use."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class XlaStats:
    """What XLA itself says a compiled program uses, per device, in bytes."""

    argument_bytes: int
    """Arguments in device memory."""
    output_bytes: int
    """Outputs in device memory, aliased ones included."""
    alias_bytes: int
    """Of the outputs, those that share memory with arguments."""
    temp_bytes: int
    """Temporaries in device memory; on TPU with an estimate of the gaps on top."""
    host_temp_bytes: int
    """Temporaries in host memory; not in `temp_bytes`."""
    generated_code_bytes: int
    """The program's own code."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program compiled for a target, or as far as it could be."""

    target: Target
    hlo_proto: bytes | None
    """Serialized `HloProto` with module, schedule and buffer assignment."""
    codegen_proto: bytes | None
    """Serialized `HloProto` with the TPU compiler's cycle estimates."""
    stats: XlaStats | None
    """XLA's own totals; None where the compile did not end."""
    oom: OutOfMemory | None
    """Set where the program does not fit; there is an `hlo_proto` all the same."""
    codegen_error: str | None
    """Set where XLA failed after it had assigned buffers."""
    exact: bool
    """Whether the buffers are those of a run: assigned under the device's own limit,
    and they fit."""
    compiler_options: dict[str, Any]
    """The options it was compiled with that change the program: the caller's, and
    the memory limit."""
    program_hash: str
    """Of program, target, options and versions: equal ones compile the same."""
    executable: jax.stages.Compiled | None = dataclasses.field(repr=False)
    """What JAX returned; can be run only where the target is attached."""


def compile_lowered(
    lowered: jax.stages.Lowered,
    target: Target,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    probe: bool = False,
    limit_bytes: int | None = None,
) -> Program:
    """Compile a lowered function, keeping XLA's buffer assignment.

    Args:
        lowered: What `lower` returned, or `jax.jit(fn).lower` with shardings on the
            target's devices.
        target: The device it was lowered for.
        compiler_options: XLA's options, as `jax.stages.Lowered.compile` takes them.
        probe: Stop after buffer assignment, in a fraction of a second: the least
            memory the compiler can do with. TPU only.
        limit_bytes: Let the compiler use this much memory and not all that the
            device has. TPU only.

    Raises:
        CompileError: XLA failed before it had assigned buffers.
        TargetError: The program was lowered for another platform; or a probe or a
            limit was asked for, and the target is no TPU.
    """
    _check_platform(lowered, target)
    options = dict(compiler_options or {})
    options |= _limit_option(target, probe, limit_bytes)
    with dump() as folder:
        ours = {} if target.attached else _plugins.compiler_options(target.kind)
        executable, error = _compile(lowered, {**ours, **options, **folder.options})
        hlo_proto, codegen_proto = folder.program(), folder.after_codegen()
    oom = parse_out_of_memory(error) if error else None
    if error and hlo_proto is None:
        raise CompileError(_what_to_do(error, target))
    return Program(
        target=target,
        hlo_proto=hlo_proto,
        codegen_proto=codegen_proto,
        stats=_stats(executable) if executable is not None else None,
        oom=None if probe else oom,
        codegen_error=error if oom is None else None,
        exact=oom is None and TPU_LIMIT_OPTION not in options,
        compiler_options=options,
        program_hash=program_hash(lowered, target, options),
        executable=executable,
    )


def program_hash(
    lowered: jax.stages.Lowered, target: Target, options: Mapping[str, Any]
) -> str:
    """A name for what a compile gives: equal programs, targets and versions share it.

    Source locations do not count.
    """
    parts = [
        lowered.as_text(),
        f"{target.name} {target.device_kind} attached={target.attached}",
        repr(sorted(options.items())),
        _plugins.versions(target.kind),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _limit_option(target: Target, probe: bool, limit_bytes: int | None) -> dict:
    if not probe and limit_bytes is None:
        return {}
    if target.kind != "tpu":
        raise TargetError(
            f"only the TPU compiler takes a memory limit; the target is {target.name}."
        )
    return {TPU_LIMIT_OPTION: 1 if probe or not limit_bytes else limit_bytes >> 20}


def _compile(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled | None, str | None]:
    """The executable, or what XLA said instead of making one."""
    # A program from the persistent cache would leave nothing in the folder.
    with compat.without_compilation_cache():
        try:
            return lowered.compile(compiler_options=dict(options)), None
        except jax.errors.JaxRuntimeError as error:
            return None, str(error)


def _check_platform(lowered: jax.stages.Lowered, target: Target) -> None:
    """Catch what was lowered without the target's shardings, for what is here."""
    found = compat.lowered_platform(lowered)
    if found != target.kind:
        raise TargetError(
            f"the program was lowered for {found}, not for {target.name}; lower it "
            f'with shardings on remat.target("{target.name}").mesh(...), or pass the '
            "function itself."
        )


def _stats(executable: jax.stages.Compiled) -> XlaStats | None:
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    return XlaStats(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        host_temp_bytes=analysis.host_temp_size_in_bytes,
        generated_code_bytes=analysis.generated_code_size_in_bytes,
    )


def _what_to_do(error: str, target: Target) -> str:
    hint = next((hint for said, hint in _HINTS.items() if said in error), "")
    return (
        f"XLA could not compile the program for {target.name}. {hint}It said:\n{error}"
    )


_OPTIONS = "Look at compiler_options: one is unknown, or has a value of another type. "
_HINTS = {
    "compile option": _OPTIONS,
    "setting option": _OPTIONS,
    "into flag": _OPTIONS,
    # An offloaded value's layout, S(5), against one in device memory: 0.12.0.1.
    "S(5)": "XLA cannot offload out of a scan inside a scan like this: save these "
    "values, recompute them, or make one scan of the two. ",
    "libdevice": 'Parts of CUDA are missing; run: pip install "remat[targets]". ',
    "cuDNN": "cuDNN kernels need NVIDIA's libraries, and cannot be compiled for an "
    "absent GPU without them; take another implementation. ",
}
