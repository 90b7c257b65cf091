"""What is in memory when a compiled program needs most of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat._hlo._buffers import (
    Allocation,
    BufferAssignment,
    HeapTrace,
    LiveSet,
    Slice,
    peak,
)
from remat._hlo._flow import Value
from remat._hlo._module import Module
from remat._hlo._spaces import memory_space
from remat._hlo._trips import runs_of_computations, trip_counts
from remat._report._attribution import Attributor, Origin
from remat._report._buffer import Buffer
from remat._report._role_table import RoleTable
from remat._report._roles import Roles


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the allocations of one memory space."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    constant_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the allocator must find, constants apart."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes


class Memory:
    """The memory of one module, by memory space."""

    def __init__(self, module: Module, kind: str, roles: Roles | None) -> None:
        """Reads a module.

        Args:
            module: A program with its buffer assignment.
            kind: Platform: "cpu", "gpu" or "tpu".
            roles: What its arguments and outputs are, if known.
        """
        assert module.buffers is not None
        self.module = module
        self.attributor = Attributor(module)
        self._buffers: BufferAssignment = module.buffers
        self._kind = kind
        self._roles = RoleTable(module, roles)

    @cached_property
    def runs(self) -> dict[int, int]:
        """Times each computation runs in one run of the program."""
        return runs_of_computations(self.module, trip_counts(self.module))

    def space(self, color: int) -> str:
        return memory_space(color, self._kind)

    def totals(self, space: str) -> Totals:
        """Sums of one memory space, by the rules of XLA's memory analysis."""
        here = [a for a in self._allocations if self.space(a.color) == space]
        return Totals(
            argument_bytes=sum(a.bytes for a in here if a.is_parameter),
            output_bytes=sum(a.bytes for a in here if a.is_output),
            alias_bytes=sum(a.bytes for a in here if a.is_parameter and a.is_output),
            temp_bytes=sum(a.bytes for a in here if a.is_temporary),
            constant_bytes=sum(a.bytes for a in here if a.is_constant),
        )

    @cached_property
    def heaps(self) -> dict[str, list[HeapTrace]]:
        """The simulated heaps of each memory space."""
        found: dict[str, list[HeapTrace]] = {}
        for trace in self._buffers.traces:
            space = self.space(self._buffers.trace_color(trace))
            found.setdefault(space, []).append(trace)
        return found

    @cached_property
    def held(self) -> dict[str, int]:
        """Bytes of each memory space that are taken during the whole run."""
        found: dict[str, int] = {}
        for place in self._held_places:
            space = self.space(place.allocation.color)
            found[space] = found.get(space, 0) + place.bytes
        return found

    @cached_property
    def _peaks(self) -> list[tuple[str, LiveSet]]:
        """The peak of each heap, with its memory space."""
        return [
            (space, peak(self._buffers, trace))
            for space, traces in self.heaps.items()
            for trace in traces
        ]

    def live_peak_bytes(self, space: str) -> int:
        """The most bytes live at once."""
        heaps = sum(live.bytes for where, live in self._peaks if where == space)
        return self.held.get(space, 0) + heaps

    def buffers(self) -> tuple[Buffer, ...]:
        """What is live at the peak of each memory space, largest first."""
        found = [*self._held_buffers(), *self._heap_buffers()]
        return tuple(sorted(found, key=lambda buffer: -buffer.bytes))

    @property
    def _allocations(self) -> Iterator[Allocation]:
        return (a for a in self._buffers.allocations if not a.is_thread_local)

    @cached_property
    def _held_places(self) -> list[_Place]:
        """Arguments, outputs, constants, and what no heap trace tells more about."""
        traced = {
            event.buffer for trace in self._buffers.traces for event in trace.events
        }
        places: list[_Place] = []
        for allocation in self._allocations:
            if not allocation.is_temporary:
                places.append(_whole(allocation))
            elif not any(part.buffer in traced for part in allocation.slices):
                places.extend(self._arrays_of(allocation))
        return places

    def _arrays_of(self, allocation: Allocation) -> Iterator[_Place]:
        """The places of arrays; tables of pointers are in no heap's simulation."""
        slices = allocation.slices
        values = self._values(part.buffer for part in slices)
        arrays = [
            part
            for part, (instruction, index) in zip(slices, values, strict=True)
            if not instruction.shape.at(index).is_tuple
        ]
        return _places(allocation, arrays)

    def _held_buffers(self) -> Iterator[Buffer]:
        for place in self._held_places:
            if place.members:
                yield self._buffer(place.members, place.bytes, place.allocation)

    def _heap_buffers(self) -> Iterator[Buffer]:
        for _, live in self._peaks:
            for group, later in zip(live.groups, live.later, strict=True):
                size = max(self._buffers.logical[id].bytes for id in group)
                yield self._buffer(group, size, None, later)

    def _buffer(
        self,
        members: Sequence[int],
        size: int,
        allocation: Allocation | None,
        later: Sequence[int] = (),
    ) -> Buffer:
        """One entry for the values that share a place."""
        logical = [self._buffers.logical[id] for id in members]
        values = self._values(members)
        origin = self._origin(values, self._values(later), allocation)
        largest = max(range(len(values)), key=lambda i: logical[i].bytes)
        instruction, index = values[largest]
        shape = instruction.shape.at(index)
        role = self._roles.of(allocation) if allocation else None
        category, path = role or (self._category(values, origin, allocation), None)
        space = self.space(logical[0].color)
        return Buffer(
            bytes=size,
            unpadded_bytes=min(size, shape.bytes) if not shape.is_tuple else size,
            shape=shape.dimensions,
            dtype=shape.dtype,
            memory_space=space,
            category=category,
            phase=None if _is_input(allocation) else origin.phase,
            module_path=path or origin.module_path,
            label=origin.label,
            source=origin.source,
            n_stacked=origin.n_stacked,
            instruction=origin.instruction or instruction.name,
            primitive=origin.primitive,
            n_runs=self.runs[instruction.computation],
        )

    def _values(self, members: Iterable[int]) -> list[Value]:
        logical = (self._buffers.logical[id] for id in members)
        return [
            (self.module.instructions[one.instruction], one.index) for one in logical
        ]

    def _origin(
        self, values: list[Value], later: list[Value], allocation: Allocation | None
    ) -> Origin:
        if allocation is None or not allocation.is_parameter:
            return self.attributor.origin(values, later)
        # Whatever is written over a donated argument, it is the argument at first.
        parameter = self.module.entry.parameters[allocation.parameter_number]
        return Origin(
            module_path=parameter.op_name or None,
            primitive="parameter",
            instruction=parameter.name,
        )

    def _category(
        self, values: Iterable[Value], origin: Origin, allocation: Allocation | None
    ) -> str:
        if allocation is not None and allocation.is_parameter:
            return "argument"
        if allocation is not None and allocation.is_constant:
            return "constants"
        if all(instruction.shape.at(index).is_tuple for instruction, index in values):
            return "outputs" if allocation and allocation.is_output else "temporaries"
        if allocation is not None and allocation.is_output:
            return "gradients" if origin.phase == "backward" else "outputs"
        if not origin.is_known and origin.phase is None:
            return "unknown"
        return self._temporary_category(list(values), origin)

    def _temporary_category(self, values: list[Value], origin: Origin) -> str:
        """Residuals are computed forward and read backward."""
        if origin.phase not in ("forward", "backward"):
            return "temporaries"
        read_in = self.attributor.read_in(values)
        if origin.phase == "forward" and read_in & {"backward", "recompute"}:
            return "residuals"
        if origin.phase == "backward" and "optimizer" in read_in:
            return "gradients"
        return "temporaries"


def _is_input(allocation: Allocation | None) -> bool:
    return allocation is not None and (
        allocation.is_parameter or allocation.is_constant
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of an allocation, and the logical buffers that are put there."""

    allocation: Allocation
    bytes: int
    members: tuple[int, ...]


def _whole(allocation: Allocation) -> _Place:
    """An allocation made for one value, which others may have used before."""
    slices = allocation.slices
    whole = [part.buffer for part in slices if part.bytes == allocation.bytes]
    members = tuple(whole or (part.buffer for part in slices))
    return _Place(allocation, allocation.bytes, members)


def _places(allocation: Allocation, slices: Iterable[Slice]) -> Iterator[_Place]:
    """The disjoint parts of an allocation, each as large as its largest buffer."""
    group: list[Slice] = []
    end = 0
    for part in sorted(slices, key=lambda part: part.offset):
        if group and part.offset >= end:
            yield _largest(allocation, group)
            group = []
        group.append(part)
        end = max(end, part.offset + part.bytes)
    if group:
        yield _largest(allocation, group)


def _largest(allocation: Allocation, group: list[Slice]) -> _Place:
    size = max(part.bytes for part in group)
    members = tuple(part.buffer for part in group if part.bytes == size)
    return _Place(allocation, size, members)
