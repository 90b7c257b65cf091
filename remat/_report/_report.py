"""What one compiled program uses: the memory report.

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
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat._compile._compile import Program, XlaStats
from remat._cost._cost import Cost, module_cost
from remat._files import write_bytes, write_text
from remat._hlo import HloError, Module, parse
from remat._hlo._spaces import DEVICE, HOST, ON_CHIP
from remat._report._buffer import Buffer as Buffer
from remat._report._contents import Memory, Totals
from remat._report._diff import ReportDiff, diff
from remat._report._recomputed import Recomputed, compiled_recompute
from remat._report._roles import Roles as Roles
from remat._report._timeline import TimelinePoint as TimelinePoint
from remat._report._timeline import summits, timeline
from remat._targets._target import Target

SCHEMA = "remat.report/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory, work and time of one compiled program, on one device."""

    target: str
    """Name of the device it was compiled for."""
    module: str
    """Name of the HLO module."""
    peak_bytes: int
    """Device memory the allocator must find: arguments + outputs - aliased +
    temporaries. A floor where `exact` is False."""
    live_peak_bytes: int
    """The most bytes of device memory live at once, constants included."""
    floor_bytes: int | None
    """What the compiler can squeeze the program to; None where it was not asked."""
    argument_bytes: int
    """Arguments in device memory."""
    output_bytes: int
    """Outputs in device memory, aliased ones included."""
    alias_bytes: int
    """Outputs written over donated arguments."""
    temp_bytes: int
    """Temporaries in device memory, the gaps between them included."""
    constant_bytes: int
    """Constants in device memory; not in `peak_bytes`."""
    host_bytes: int
    """Host memory: offloaded temporaries, arguments and outputs kept there."""
    on_chip_bytes: int
    """The chip's own memories (TPU)."""
    generated_code_bytes: int
    """The program's own code in device memory."""
    available_bytes: int
    """What one program may use of the device."""
    fits: bool
    """Whether peak, constants and generated code are within `available_bytes`."""
    exact: bool
    """False for a probe: the compiler was asked for the least, not for the program."""
    flops: int
    """FLOPs of one run, trip counts included."""
    recompute_flops: int
    """Of these, FLOPs of values computed a second time for the backward pass."""
    bytes_accessed: int
    """Device memory traffic of one run, trip counts included."""
    estimated_step_s: float
    """Roofline time of one run; nan where the device's figures are not known."""
    cost: Cost = field(repr=False)
    """The whole cost, of which the fields above are a part."""
    buffers: tuple[Buffer, ...] = field(repr=False)
    """What is live at the peak (of device, host and on-chip memory each), largest
    first, one entry for each allocated value."""
    timeline: tuple[TimelinePoint, ...] = field(repr=False)
    """Live bytes over the schedule, loop bodies once."""
    recomputed: tuple[Recomputed, ...] = field(default=(), repr=False)
    """Matrix products computed a second time for the backward pass, by module."""
    notes: tuple[str, ...] = ()
    """What else to know of these figures."""
    xla_stats: XlaStats | None = field(default=None, repr=False)
    """What XLA itself stated; None where the compile did not end."""

    @property
    def fragmentation_bytes(self) -> int:
        """Assigned but not live at the peak: gaps between the temporaries."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        live_temp = self.live_peak_bytes - held - self.constant_bytes
        return max(0, self.temp_bytes - live_temp)

    def by_category(self, memory_space: str = DEVICE) -> dict[str, int]:
        """Bytes live at the peak by category, largest first."""
        totals: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.memory_space == memory_space:
                key = buffer.category
                totals[key] = totals.get(key, 0) + buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def summits(self, n: int = 5) -> tuple[TimelinePoint, ...]:
        """The peak and the next highest points that memory falls from, highest first.

        To lower the peak beyond the second, what the second holds must shrink too.
        """
        return summits(self.timeline, n)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; figures that are not known are None."""
        data = {"schema": SCHEMA, **dataclasses.asdict(self)}
        data["fragmentation_bytes"] = self.fragmentation_bytes
        return _json_ready(data)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained page that needs no network.

        Args:
            path: File to write it to as well.

        Returns:
            The page: timeline, treemap of the peak by module, table of the buffers.
        """
        from remat._show.page import report_page

        text = report_page(self)
        if path is not None:
            write_text(path, text)
        return text

    def to_pprof(self, path: str | Path | None = None) -> bytes:
        """The buffers at the peak as a profile that `pprof` and its kin read.

        Args:
            path: File to write it to as well, `memory.pb.gz`.

        Returns:
            The gzipped `profile.proto`.
        """
        from remat._report._pprof import pprof_of

        data = pprof_of(self)
        if path is not None:
            write_bytes(path, data)
        return data

    def plot(self) -> Any:
        """Timeline and treemap of the peak, as a plotly figure."""
        from remat._show.figure import report_figure

        return report_figure(self)

    def diff(self, other: MemoryReport) -> ReportDiff:
        """What changes at the peak if `other` runs in place of this program.

        Args:
            other: Report of another program for the same device.

        Returns:
            What went, what came and what moved to the host; adds up to
            `other.peak_bytes - self.peak_bytes`.

        Raises:
            ValueError: The two are for different devices, or one is a floor.
        """
        return diff(self, other)

    def _repr_html_(self) -> str:
        from remat._show.page import notebook_html

        return notebook_html(self)

    def __str__(self) -> str:
        """The report as a terminal shows it."""
        from remat._show.report import report_text

        return report_text(self)


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
    module = parse(program.hlo_proto)
    memory = Memory(_with_buffers(module), program.target.kind, roles)
    cost = _cost(program, module, cost_target or program.target)
    totals = {space: memory.totals(space) for space in (DEVICE, HOST, ON_CHIP)}
    return _report(program, memory, totals, cost)


def report_from_hlo(
    proto: bytes, target: Target, *, roles: Roles | None = None
) -> MemoryReport:
    """Makes the report of an XLA dump that any job left.

    Args:
        proto: Content of `*after_optimizations.hlo.pb`.
        target: Device that the program was compiled for.
        roles: What its arguments and outputs are, if known.

    Returns:
        The report. What only the compile knows (the size of its code) is 0.

    Raises:
        HloError: The bytes cannot be read, or hold no buffer assignment.
    """
    program = Program(
        target=target,
        hlo_proto=proto,
        codegen_proto=None,
        stats=None,
        oom=None,
        codegen_error=None,
        exact=True,
        compiler_options={},
        program_hash="",
        executable=None,
    )
    return report_from_program(program, roles=roles)


def _cost(program: Program, module: Module, target: Target) -> Cost:
    """The cost, with XLA's own cycles where a full TPU compile left them."""
    cost = module_cost(module, target)
    if program.codegen_proto is None:
        return cost
    cycles = module_cost(parse(program.codegen_proto)).estimated_cycles
    return dataclasses.replace(cost, estimated_cycles=cycles)


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
        notes=tuple(_notes(program, device, cost)),
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


def _notes(program: Program, device: Totals, cost: Cost) -> list[str]:
    notes: list[str] = []
    if program.target.kind == "cpu":
        notes.append("CPU figures rank policies differently than TPU and GPU ones.")
    if not program.exact and program.oom is None and program.codegen_error is None:
        notes.append("Work is that of the program squeezed to its floor.")
    if program.codegen_error:
        notes.append(f"Code generation failed: {program.codegen_error}")
    if cost.xla_recompute_flops:
        share = cost.xla_recompute_flops / cost.flops
        notes.append(
            f"XLA's own rematerialization, for want of memory, added {share:.0%} of "
            "the FLOPs."
        )
    if cost.n_unknown_loops:
        notes.append(f"{cost.n_unknown_loops} loops of unknown length counted once.")
    if cost.n_uncounted:
        notes.append(f"{cost.n_uncounted:.0f} runs of kernels of unknown FLOPs.")
    stated = program.stats.temp_bytes if program.stats else device.temp_bytes
    if stated != device.temp_bytes:
        notes.append(
            f"XLA states {stated} bytes of temporaries, fragmentation counted twice; "
            f"{device.temp_bytes} are assigned."
        )
    return notes


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
        cost=Cost(),
        buffers=(),
        timeline=(),
        notes=("Totals only: the compiled program holds no buffer assignment.",),
        xla_stats=stats,
    )


def _whole(figure: float) -> int:
    return round(figure) if math.isfinite(figure) else 0


def _json_ready(value: Any) -> Any:
    """Without nan and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    return value
