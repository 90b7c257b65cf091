"""The cost of a compiled HLO module, loops counted as often as they run.

Time is a roofline: each instruction that is scheduled takes the longer of its work at
the device's peak and its traffic at the memory's bandwidth; or, where a full TPU
compile left its own estimate of an instruction's cycles, that. Instructions follow one
another, asynchronous copies run beside them, collectives and host copies take their
time on their own links. It ranks programs; it knows nothing of launch overheads or of
how well a kernel does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from remat._cost._figures import NO_COST, Cost
from remat._cost._ops import elementwise_flops, matmul_flops, transcendentals
from remat._cost._traffic import FREE, TrafficCounter
from remat._cost._xla_remat import added_by_xla
from remat._hlo._module import Computation, Instruction, Module
from remat._hlo._spaces import DEVICE, HOST, guess_kind, memory_space
from remat._hlo._trips import trip_counts
from remat._naming._op_name import parse_op_name
from remat._targets._target import Target

_COLLECTIVES = {
    "all-reduce": "all-reduce",
    "all-reduce-start": "all-reduce",
    "all-gather": "all-gather",
    "all-gather-start": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-permute-start": "permute",
    "collective-broadcast": "permute",
}
_MOVES = frozenset(
    {
        "parameter",
        "constant",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "copy",
        "bitcast",
    }
)
_HALF = ("bfloat16", "float16", "float8", "float4", "int8", "int4", "uint8")


def module_cost(module: Module, target: Target | None = None) -> Cost:
    """Counts what one run of a compiled program costs.

    Args:
        module: The program, for one device.
        target: The device whose peaks give the seconds; without one they are nan.

    Returns:
        The cost. A loop whose trip count is not known counts once, and of a
        conditional's branches the most expensive counts.
    """
    return _Counter(module, target).total()


@dataclass(slots=True)
class _Work:
    """What the cores do in one instruction, fused ones included."""

    matmul_flops: float = 0.0
    other_flops: float = 0.0
    transcendentals: float = 0.0
    recompute_flops: float = 0.0
    xla_recompute_flops: float = 0.0
    n_kernels: float = 0.0
    n_uncounted: float = 0.0
    cores_s: float = 0.0

    def add(self, other: _Work) -> None:
        self.matmul_flops += other.matmul_flops
        self.other_flops += other.other_flops
        self.transcendentals += other.transcendentals
        self.recompute_flops += other.recompute_flops
        self.xla_recompute_flops += other.xla_recompute_flops
        self.n_kernels += other.n_kernels
        self.n_uncounted += other.n_uncounted
        self.cores_s += other.cores_s


class _Counter:
    """Adds up costs, each computation once."""

    def __init__(self, module: Module, target: Target | None) -> None:
        kind = target.kind if target else guess_kind(module)
        self._module = module
        self._peaks = _Peaks.of(target)
        self._n_devices = target.n_devices if target else 1
        self._trips = trip_counts(module)
        self._traffic = TrafficCounter(module, lambda color: memory_space(color, kind))
        self._added = added_by_xla(module)
        self._done: dict[int, Cost] = {}
        self._fused: dict[int, _Work] = {}

    def computation(self, computation: Computation) -> Cost:
        """The cost of a scheduled computation: the entry, a loop's body, a branch."""
        if computation.id not in self._done:
            total = NO_COST
            for instruction in computation.instructions:
                total = total + self._instruction(instruction)
            self._done[computation.id] = total
        return self._done[computation.id]

    def total(self) -> Cost:
        """The cost of the whole program."""
        cost = self.computation(self._module.entry)
        # Copies run beside compute, as far as they fit beside it on memory's bandwidth
        # and on the host link.
        traffic_s = cost.bytes_accessed / self._peaks.bandwidth
        cost = replace(cost, compute_s=max(cost.compute_s, traffic_s))
        return replace(cost, estimated_s=max(cost.busy_s, cost.host_s))

    def _instruction(self, instruction: Instruction) -> Cost:
        opcode = instruction.opcode
        if opcode in FREE and not instruction.called:
            return NO_COST
        called = [self._module.computations[id] for id in instruction.called]
        if opcode == "while" and len(called) == 2:
            return self._loop(instruction, *called)
        if opcode == "conditional" and called:
            branches = [self.computation(branch) for branch in called]
            return max(branches, key=lambda cost: (cost.flops, cost.bytes_accessed))
        if opcode == "copy-start":
            return self._beside(self._kernel(instruction))
        if opcode in ("call", "async-start"):
            return self._call(called)
        if opcode in FREE:
            return NO_COST
        if opcode in _COLLECTIVES:
            return self._collective(instruction)
        return self._kernel(instruction)

    def _call(self, called: list[Computation]) -> Cost:
        if not called:
            return NO_COST
        cost = self.computation(called[0])
        opcodes = {instruction.opcode for instruction in called[0].instructions}
        return self._beside(cost) if opcodes <= _MOVES else cost

    @staticmethod
    def _beside(copy: Cost) -> Cost:
        """A copy that the copy engines do while the cores work."""
        return replace(copy, compute_s=0.0, cycles_s=0.0)

    def _loop(self, loop: Instruction, body: Computation, test: Computation) -> Cost:
        trips = self._trips[loop.id]
        once = self.computation(body) + self.computation(test)
        if trips is None:
            return replace(once, n_unknown_loops=once.n_unknown_loops + 1)
        return once.times(trips)

    def _kernel(self, instruction: Instruction) -> Cost:
        """An instruction the device runs as one kernel."""
        work = self._work(instruction)
        traffic = self._traffic.count(instruction)
        peaks = self._peaks
        compute_s = max(work.cores_s, traffic[DEVICE] / peaks.bandwidth)
        cycles = _estimated_cycles(instruction)
        added = instruction.id in self._added
        return replace(
            NO_COST,
            flops=work.matmul_flops + work.other_flops,
            matmul_flops=work.matmul_flops,
            transcendentals=work.transcendentals,
            recompute_flops=work.recompute_flops,
            xla_recompute_flops=work.xla_recompute_flops,
            bytes_accessed=traffic[DEVICE],
            host_bytes=traffic[HOST],
            n_kernels=work.n_kernels,
            kernel_bytes=traffic[DEVICE] if work.n_kernels else 0.0,
            n_uncounted=work.n_uncounted,
            compute_s=compute_s,
            xla_recompute_s=compute_s if added else 0.0,
            host_s=traffic[HOST] / peaks.host_link,
            estimated_cycles=cycles,
            cycles_s=cycles / peaks.clock if cycles else compute_s,
        )

    def _collective(self, instruction: Instruction) -> Cost:
        """A ring of the group's devices."""
        kind = _COLLECTIVES[instruction.opcode]
        n = max(1, _group_size(instruction, self._n_devices))
        operands = [self._module.instructions[id].shape for id in instruction.operands]
        size = sum(shape.bytes for shape in operands)
        sent = size * _sent_share(kind, n)
        traffic = self._traffic.count(instruction)
        return replace(
            NO_COST,
            bytes_accessed=traffic[DEVICE],
            collective_bytes=sent,
            n_collectives=1,
            collective_s=sent / self._peaks.ici,
        )

    def _work(self, instruction: Instruction) -> _Work:
        work = self._work_within(instruction)
        if instruction.id in self._added:
            flops = work.matmul_flops + work.other_flops
            work = replace(work, xla_recompute_flops=flops)
        return work

    def _work_within(self, instruction: Instruction) -> _Work:
        if instruction.opcode in ("fusion", "map") and instruction.called:
            return self._fused_work(instruction.called[0])
        matmul = matmul_flops(self._module, instruction)
        other = elementwise_flops(self._module, instruction)
        kernel = instruction.opcode == "custom-call"
        flops = (matmul or 0.0) + other
        recomputed = parse_op_name(instruction.op_name).phase == "recompute"
        half = bool(matmul) and self._is_half(instruction)
        rate = self._peaks.half if half else self._peaks.single
        vector = other + transcendentals(instruction)
        return _Work(
            matmul_flops=matmul or 0.0,
            other_flops=other,
            transcendentals=transcendentals(instruction),
            recompute_flops=flops if recomputed else 0.0,
            n_kernels=float(kernel and matmul != 0.0),
            n_uncounted=float(kernel and matmul is None),
            cores_s=(matmul or 0.0) / rate + vector / self._peaks.vector,
        )

    def _fused_work(self, computation: int) -> _Work:
        if computation not in self._fused:
            total = _Work()
            for instruction in self._module.computations[computation].instructions:
                total.add(self._work(instruction))
            self._fused[computation] = total
        return self._fused[computation]

    def _is_half(self, instruction: Instruction) -> bool:
        dtypes = [
            self._module.instructions[id].shape.dtype for id in instruction.operands[:2]
        ]
        return all(dtype.startswith(_HALF) for dtype in dtypes)


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Rates of a device; infinite where they are not known or do not exist."""

    half: float
    single: float
    vector: float
    bandwidth: float
    host_link: float
    ici: float
    clock: float

    @classmethod
    def of(cls, target: Target | None) -> _Peaks:
        if target is None:
            return cls(*[math.nan] * 7)
        return cls(
            half=target.flops_bf16,
            single=target.flops_tf32,
            vector=target.flops_fp32,
            bandwidth=target.bandwidth_bytes_s,
            host_link=target.host_link_bytes_s or math.nan,
            ici=target.ici_bytes_s or math.nan,
            clock=target.clock_hz,
        )


def _group_size(instruction: Instruction, n_devices: int) -> int:
    """Devices that take part in one collective; all where it lists none.

    XLA has three ways to write them: lists, an iota, and axes of a mesh (0.12).
    """
    message = instruction.message
    devices = message.collective_device_list
    if devices.iota_replica_group_list.num_devices_per_group > 0:
        return devices.iota_replica_group_list.num_devices_per_group
    by_mesh = message.mesh_axes_replica_groups
    if by_mesh.axes:
        sizes = [axis.size for axis in by_mesh.mesh.axes]
        return max(1, math.prod(_axis_size(axis, sizes) for axis in by_mesh.axes))
    groups = list(devices.replica_groups) or list(message.replica_groups)
    return max((len(group.replica_ids) for group in groups), default=n_devices)


def _axis_size(axis: Any, sizes: list[int]) -> int:
    if axis.sub_axis.size > 0:
        return axis.sub_axis.size
    return sizes[axis.mesh_axis_index] if axis.mesh_axis_index < len(sizes) else 1


def _sent_share(kind: str, n: int) -> float:
    """Bytes a device sends, as a share of its operand's bytes."""
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    if kind == "all-gather":
        return n - 1
    return 1.0 if kind == "permute" else (n - 1) / n


def _estimated_cycles(instruction: Instruction) -> float:
    config = instruction.backend_config
    if b"estimated_cycles" not in config:
        return 0.0
    try:
        found = json.loads(config)
        window = found.get("window_config", found)
        return float(window["estimated_cycles"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0.0
