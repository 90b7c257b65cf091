"""XLA's buffer assignment: what memory a compiled program asks for, and what is in it.

A *logical buffer* is one array an instruction defines. Values that share memory on
purpose (a while loop's operand, its body's parameter and its result) are several
logical buffers at one place. An *allocation* is one block that the runtime provides.
Most temporaries live in one large allocation, whose contents over time a *heap trace*
records event by event.
"""

from dataclasses import dataclass

ALLOC, FREE, SHARE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LogicalBuffer:
    """One array as an instruction defines it."""

    id: int
    bytes: int
    """As laid out on the target, padding included."""
    instruction: int
    """Id of the instruction that defines it."""
    index: tuple[int, ...]
    """Where in that instruction's (tuple) shape."""
    color: int
    """Memory space, by XLA's number."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The place of a logical buffer inside an allocation."""

    buffer: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A block of memory the runtime provides for a run of the program."""

    index: int
    bytes: int
    color: int
    is_parameter: bool
    parameter_number: int
    is_output: bool
    """It may hold a result of the program (and it does, if also a parameter)."""
    is_constant: bool
    is_thread_local: bool
    """Scalars of reducers and the like, not memory of the device."""
    slices: tuple[Slice, ...]

    @property
    def is_temporary(self) -> bool:
        return not (
            self.is_parameter
            or self.is_output
            or self.is_constant
            or self.is_thread_local
        )


@dataclass(frozen=True, slots=True)
class HeapEvent:
    """One step of XLA's simulation of the heap."""

    kind: int
    """ALLOC, FREE or SHARE."""
    buffer: int
    shared_with: int
    """For SHARE: the buffer whose place it takes."""
    instruction: str
    computation: str


@dataclass(frozen=True, slots=True)
class HeapTrace:
    """The events of one allocation, in program order."""

    events: tuple[HeapEvent, ...]


@dataclass(frozen=True, slots=True)
class LiveSet:
    """What a heap holds at one moment."""

    bytes: int
    event: int
    """Position of the event after which it holds this."""
    groups: tuple[tuple[int, ...], ...]
    """Logical buffers, those that share one place together, up to this moment."""
    later: tuple[tuple[int, ...], ...]
    """For each group, the buffers that share its place afterwards."""


@dataclass(frozen=True, slots=True)
class BufferAssignment:
    """All memory of one compiled program."""

    logical: dict[int, LogicalBuffer]
    allocations: tuple[Allocation, ...]
    traces: tuple[HeapTrace, ...]

    def trace_color(self, trace: HeapTrace) -> int:
        """The memory space a trace is about (its own index is not to be trusted)."""
        return self.logical[trace.events[0].buffer].color if trace.events else 0


class Heap:
    """A heap that heap events are applied to, one after another.

    A place is freed when the last of the buffers that share it is; a buffer may also
    take over a place just freed.
    """

    def __init__(self, assignment: BufferAssignment) -> None:
        self._logical = assignment.logical
        self._place_of: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}
        self._members: dict[int, list[int]] = {}
        self.bytes = 0
        """Bytes live now."""

    def apply(self, event: HeapEvent) -> None:
        if event.kind == FREE:
            self._free(event.buffer)
        elif event.kind == SHARE:
            place = self._place_of.get(event.shared_with, event.shared_with)
            self._hold(event.buffer, place)
        else:
            self._hold(event.buffer, event.buffer)

    def _hold(self, buffer: int, place: int) -> None:
        self._place_of[buffer] = place
        holders = self._holders.setdefault(place, set())
        if not holders:
            self.bytes += self._logical[place].bytes
        holders.add(buffer)
        self._members.setdefault(place, []).append(buffer)

    def _free(self, buffer: int) -> None:
        place = self._place_of.get(buffer, buffer)
        holders = self._holders.get(place, set())
        if buffer in holders:
            holders.remove(buffer)
            if not holders:
                self.bytes -= self._logical[place].bytes

    def live(self) -> dict[int, tuple[int, ...]]:
        """Places in use, each with all buffers that have shared it so far."""
        return {
            place: self.members(place)
            for place, holders in self._holders.items()
            if holders
        }

    def members(self, place: int) -> tuple[int, ...]:
        """The buffers that have shared a place so far."""
        return tuple(self._members[place])


def peak(assignment: BufferAssignment, trace: HeapTrace) -> LiveSet:
    """The moment of a trace at which most bytes are live (the first of equals)."""
    heap = Heap(assignment)
    most, moment = 0, -1
    for position, event in enumerate(trace.events):
        heap.apply(event)
        if heap.bytes > most:
            most, moment = heap.bytes, position
    again = Heap(assignment)
    for event in trace.events[: moment + 1]:
        again.apply(event)
    live = again.live()
    return LiveSet(
        bytes=most,
        event=moment,
        groups=tuple(live.values()),
        later=tuple(heap.members(place)[len(live[place]) :] for place in live),
    )
