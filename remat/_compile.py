"""Lower a function for a target and compile it, keeping what XLA decided on memory."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
from jax.sharding import NamedSharding

from remat import _jax_compat as compat
from remat import _plugins
from remat._dump import Dump, dump
from remat._flatten import is_traceable
from remat._oom import OutOfMemory as OutOfMemory
from remat._oom import parse_out_of_memory
from remat._targets import Target, TargetError

TPU_LIMIT_OPTION = "xla_tpu_max_hbm_size_mib"
"""Compiler option: the memory that the TPU compiler may use."""


class CompileError(RuntimeError):
    """XLA could not compile a program, for another reason than its size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class XlaStats:
    """What XLA itself says a compiled program uses, per device, in bytes."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, those that share memory with arguments."""
    temp_bytes: int
    host_temp_bytes: int
    """Temporaries in host memory; not in `temp_bytes`."""
    generated_code_bytes: int


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
    """Whether this is what would run: compiled in full, under the device's limit."""
    compiler_options: dict[str, Any]
    """The options it was compiled with, besides those for the dump."""
    program_hash: str
    """Of program, target, options and versions: equal ones compile the same."""
    executable: jax.stages.Compiled | None = dataclasses.field(repr=False)
    """What JAX returned; can be run only where the target is attached."""


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Lowered:
    """Lower `fn(*args, **kwargs)` for a target, which need not be there.

    Args:
        fn: Function that JAX can trace, jitted or not.
        args: Positional arguments: pytrees of arrays and `jax.ShapeDtypeStruct`s,
            of which only shapes are used; other leaves are held static. Shardings
            are kept; where there are none, everything lies on the first device.
        kwargs: Keyword arguments, likewise.
        target: Device to lower for.
        donate_argnums: Positional arguments whose memory the outputs may take.

    Raises:
        TargetError: This machine cannot compile for the target, or an argument is
            sharded over other devices.
    """
    traced = trace(fn, args, kwargs, target, donate_argnums=donate_argnums)
    return lower_traced(traced, target)


def lower_traced(traced: Any, target: Target) -> jax.stages.Lowered:
    """Lower what `trace` returned, for the target it was traced for."""
    return traced.lower(lowering_platforms=(target.lowering_platform,))


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """Trace as `lower` does; the result (`jax.stages.Traced`) also has the `jaxpr`."""
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [is_traceable(leaf) for leaf in leaves]
    placed = _place(leaves, is_array, target)

    @functools.wraps(fn)
    def over_arrays(*args: Any, **kwargs: Any) -> Any:
        given = treedef.flatten_up_to((args, kwargs))
        merged = [
            new if yes else old
            for new, old, yes in zip(given, leaves, is_array, strict=True)
        ]
        inner_args, inner_kwargs = treedef.unflatten(merged)
        return _arrays_only(fn(*inner_args, **inner_kwargs))

    options: dict[str, Any] = {"donate_argnums": donate_argnums}
    if not any(is_array):  # nothing else says which devices
        options["out_shardings"] = target.sharding()
    args, kwargs = treedef.unflatten(placed)
    return jax.jit(over_arrays, **options).trace(*args, **kwargs)


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
    options = dict(compiler_options or {})
    options |= _limit_option(target, probe, limit_bytes)
    with dump() as folder:
        executable, error = _compile(lowered, options, folder)
        hlo_proto, codegen_proto = folder.program(), folder.after_codegen()
    if executable is not None:
        _check_platform(executable, target)
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
        exact=error is None and TPU_LIMIT_OPTION not in options,
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
        f"{target.name} {target.device_kind} {target.available_bytes}",
        repr(sorted(options.items())),
        f"jax {jax.__version__} jaxlib {jaxlib.__version__}",
        _plugins.version(target.kind),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# Arguments


def _place(leaves: Sequence[Any], is_array: Sequence[bool], target: Target) -> list:
    """Shapes in place of arrays, on the target's devices; None in place of the rest."""
    shardings = [
        _moved(leaf, target) if yes else None
        for leaf, yes in zip(leaves, is_array, strict=True)
    ]
    # Beside sharded arguments, the others follow them.
    default = target.sharding() if not any(shardings) else None
    return [
        _shape(leaf, sharding or default) if yes else None
        for leaf, yes, sharding in zip(leaves, is_array, shardings, strict=True)
    ]


def _shape(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _moved(leaf: Any, target: Target) -> NamedSharding | None:
    """An argument's sharding, over the target's devices; None where it has none."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    if not isinstance(mesh, jax.sharding.Mesh) or not _is_on(mesh, target):
        mesh = target.mesh(tuple(mesh.shape.values()), mesh.axis_names)
    kind = sharding.memory_kind
    return NamedSharding(
        mesh, sharding.spec, memory_kind=kind if kind == "pinned_host" else None
    )


def _is_on(mesh: jax.sharding.Mesh, target: Target) -> bool:
    return set(mesh.devices.flat) <= set(target.devices())


def _arrays_only(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else None, tree
    )


# Compiling


def _limit_option(target: Target, probe: bool, limit_bytes: int | None) -> dict:
    if not probe and limit_bytes is None:
        return {}
    if target.kind != "tpu":
        raise TargetError(
            f"only the TPU compiler takes a memory limit; the target is {target.name}."
        )
    return {TPU_LIMIT_OPTION: 1 if probe or not limit_bytes else limit_bytes >> 20}


def _compile(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], folder: Dump
) -> tuple[jax.stages.Compiled | None, str | None]:
    """The executable, or what XLA said instead of making one."""
    # A program from the persistent cache would leave nothing in the folder.
    with compat.without_compilation_cache():
        try:
            return lowered.compile(compiler_options={**options, **folder.options}), None
        except jax.errors.JaxRuntimeError as error:
            return None, str(error)


def _check_platform(executable: jax.stages.Compiled, target: Target) -> None:
    shardings = jax.tree.leaves(
        (executable.input_shardings, executable.output_shardings)
    )
    devices: Iterable[Any] = (d for s in shardings for d in s.device_set)
    found = {device.platform for device in devices}
    if found - {target.kind}:
        raise TargetError(
            f"the program was lowered for {' and '.join(sorted(found))}, not for "
            f"{target.name}; lower it with shardings on "
            f'remat.target("{target.name}").mesh(...), or pass the function.'
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
    return f"XLA could not compile the program for {target.name}: {error}"
