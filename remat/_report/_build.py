"""From a compiled program to its memory report.

Every figure of memory comes from the buffer assignment that XLA leaves in its dump.
*Arguments* are the allocations of entry parameters, *outputs* those that may be live
out, *aliased* those that are both (donated), *temporaries* the rest; constants and
thread-local scalars stand apart, and each memory space is counted by itself.

On CPU and GPU the sums equal XLA's own `memory_analysis()` to the byte. On TPU so do
arguments, outputs and aliases, while the temporaries that `memory_analysis()` states
are those assigned *plus* an estimate of their fragmentation, which the assigned ones
already contain. That figure is no need of the program: one with 960 MiB assigned and
1408 MiB stated (448 MiB fragmentation, by the compiler's own breakdown) compiles under
an HBM limit that leaves it 961 MiB (libtpu 0.0.52). So the assignment is what the
report uses; XLA's figures stand in `xla_stats`. xprof's memory viewer gives the same
peak and the same total for the same dump, on all three (xprof 2.24.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from remat._compile._compile import Program
from remat._cost._cost import Cost, module_cost
from remat._hlo import HloError, Module, parse
from remat._hlo._pause_gc import paused_gc
from remat._hlo._spaces import DEVICE, HOST, ON_CHIP
from remat._report._contents import Memory, Totals
from remat._report._notes import notes_on
from remat._report._recomputed import compiled_recompute
from remat._report._report import MemoryReport
from remat._report._roles import Roles
from remat._report._timeline import timeline
from remat._targets._target import Target


def report_from_program(
    program: Program, *, roles: Roles | None = None, cost_target: Target | None = None
) -> MemoryReport:
    """Makes the report of a compiled program.

    Args:
        program: What `compile_lowered` gave, also for a program that does not fit.
        roles: What its arguments and outputs are, if known.
        cost_target: Device whose speed the seconds are for; the program's own if None.

    Returns:
        The report. Without a dump (a program someone else compiled) it has totals only.

    Raises:
        HloError: The program's dump cannot be read.
    """
    if program.hlo_proto is None:
        return _totals_only(program)
    with paused_gc():
        module = parse(program.hlo_proto)
        return _of_module(program, module, roles, cost_target or program.target)


def _of_module(
    program: Program, module: Module, roles: Roles | None, cost_target: Target
) -> MemoryReport:
    with paused_gc():
        memory = Memory(_with_buffers(module), program.target.kind, roles)
        cost = _cost(program, module, cost_target)
        totals = {space: memory.totals(space) for space in (DEVICE, HOST, ON_CHIP)}
        return _report(program, memory, totals, cost)


def report_from_hlo(
    proto: bytes | Module, target: Target, *, roles: Roles | None = None
) -> MemoryReport:
    """Makes the report of an XLA dump that any job left.

    Args:
        proto: Content of `*after_optimizations.hlo.pb`, or what `parse` made of it.
        target: Device that the program was compiled for.
        roles: What its arguments and outputs are, if known.

    Returns:
        The report. What only the compile knows (the size of its code) is 0.

    Raises:
        HloError: The bytes cannot be read, or hold no buffer assignment.
    """
    module = proto if isinstance(proto, Module) else parse(proto)
    program = Program(
        target=target,
        hlo_proto=None,
        codegen_proto=None,
        stats=None,
        oom=None,
        codegen_error=None,
        exact=True,
        compiler_options={},
        program_hash="",
        executable=None,
    )
    return _of_module(program, module, roles, target)


def _cost(program: Program, module: Module, target: Target) -> Cost:
    """The cost, with XLA's own cycles where a full TPU compile left them."""
    cost = module_cost(module, target)
    if program.codegen_proto is None:
        return cost
    timed = module_cost(parse(program.codegen_proto), target)
    return dataclasses.replace(
        cost,
        estimated_cycles=timed.estimated_cycles,
        cycles_s=timed.cycles_s,
        estimated_s=timed.estimated_s,
    )


def _with_buffers(module: Module) -> Module:
    """Raises unless a module has its buffer assignment.

    Raises:
        HloError: It has none.
    """
    if module.buffers is None or not module.buffers.allocations:
        raise HloError(
            f"module {module.name} has no buffer assignment: wanted XLA's dump after "
            "optimizations (*after_optimizations.hlo.pb), not one from before"
        )
    return module


def _report(
    program: Program, memory: Memory, totals: Mapping[str, Totals], cost: Cost
) -> MemoryReport:
    target, device = program.target, totals[DEVICE]
    code = program.stats.generated_code_bytes if program.stats else 0
    needed = device.peak_bytes + device.constant_bytes + code
    module = memory.module
    return MemoryReport(
        target=target.name,
        module=module.name,
        n_devices=module.n_devices,
        peak_bytes=device.peak_bytes,
        live_peak_bytes=memory.live_peak_bytes(DEVICE),
        floor_bytes=None if program.exact else device.peak_bytes,
        argument_bytes=device.argument_bytes,
        output_bytes=device.output_bytes,
        alias_bytes=device.alias_bytes,
        temp_bytes=device.temp_bytes,
        constant_bytes=device.constant_bytes,
        host_bytes=totals[HOST].peak_bytes,
        on_chip_bytes=totals[ON_CHIP].peak_bytes,
        generated_code_bytes=code,
        available_bytes=target.available_bytes,
        fits=_fits(program, needed),
        exact=program.exact,
        flops=_whole(cost.flops),
        recompute_flops=_whole(cost.recompute_flops),
        bytes_accessed=_whole(cost.bytes_accessed),
        estimated_step_s=_step_s(program, cost),
        estimate_source=cost.estimate_source,
        cost=cost,
        buffers=memory.buffers(),
        timeline=timeline(
            module,
            memory.heaps,
            memory.held,
            memory.attributor.phase,
            memory.runs,
        ),
        recomputed=tuple(compiled_recompute(module, memory.runs)),
        notes=notes_on(program, device, cost),
        xla_stats=program.stats,
    )


def _fits(program: Program, needed_bytes: int) -> bool:
    """The compiler's own refusal counts; a probe has none (`oom` is not set)."""
    if program.oom is not None:
        return False
    return needed_bytes <= program.target.available_bytes


def _step_s(program: Program, cost: Cost) -> float:
    """The estimate for what would run.

    A probe is squeezed: XLA recomputes what it would keep under the real limit, so that
    part is left out.
    """
    probe = not program.exact and program.oom is None and program.codegen_error is None
    if not probe:
        return cost.estimated_s
    return max(cost.estimated_s - cost.xla_recompute_s, cost.host_s)


def _totals_only(program: Program) -> MemoryReport:
    stats, target = program.stats, program.target
    if stats is None:
        raise HloError("a program with neither a dump nor XLA's totals has no report")
    peak = stats.argument_bytes + stats.output_bytes - stats.alias_bytes
    peak += stats.temp_bytes
    return MemoryReport(
        target=target.name,
        module="",
        peak_bytes=peak,
        live_peak_bytes=peak,
        floor_bytes=None,
        argument_bytes=stats.argument_bytes,
        output_bytes=stats.output_bytes,
        alias_bytes=stats.alias_bytes,
        temp_bytes=stats.temp_bytes,
        constant_bytes=0,
        host_bytes=stats.host_temp_bytes,
        on_chip_bytes=0,
        generated_code_bytes=stats.generated_code_bytes,
        available_bytes=target.available_bytes,
        fits=_fits(program, peak + stats.generated_code_bytes),
        exact=program.exact,
        flops=0,
        recompute_flops=0,
        bytes_accessed=0,
        estimated_step_s=math.nan,
        estimate_source="none",
        cost=Cost(),
        buffers=(),
        timeline=(),
        notes=("Totals only: the compiled program holds no buffer assignment.",),
        xla_stats=stats,
    )


def _whole(figure: float) -> int:
    return round(figure) if math.isfinite(figure) else 0
