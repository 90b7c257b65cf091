"""Live memory over the program's schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remat._hlo._buffers import Heap, HeapTrace
from remat._hlo._module import Instruction, Module
from remat._hlo._spaces import DEVICE, HOST, ON_CHIP

_MAX_POINTS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """Memory while one instruction runs."""

    position: int
    """Place in the schedule, a loop's body standing once where the loop is."""
    instruction: str
    """HLO name."""
    device_bytes: int
    """Live in device memory, arguments and outputs included."""
    host_bytes: int
    """Live in host memory."""
    on_chip_bytes: int
    """Live in the chip's own memories."""
    phase: str | None
    """forward, backward, recompute or optimizer."""
    n_runs: int
    """Times the instruction runs (the trip counts of its loops)."""


def schedule(module: Module) -> list[Instruction]:
    """The instructions of a module in the order they run, loop bodies once."""
    order: list[Instruction] = []
    visited: set[int] = set()

    def visit(computation_id: int) -> None:
        visited.add(computation_id)
        computation = module.computations[computation_id]
        ids = computation.schedule or [one.id for one in computation.instructions]
        for id in ids:
            instruction = module.instructions[id]
            order.append(instruction)
            if instruction.opcode == "fusion":
                continue
            # XLA simulates a loop's condition before its body.
            for callee in reversed(instruction.called):
                if callee not in visited:
                    visit(callee)

    visit(module.entry.id)
    return order


def timeline(
    module: Module,
    heaps: Mapping[str, list[HeapTrace]],
    held: Mapping[str, int],
    phase_of: Callable[[Instruction], str | None],
    runs: Mapping[int, int],
) -> tuple[TimelinePoint, ...]:
    """Live bytes wherever they change.

    Args:
        module: The program, with its buffer assignment.
        heaps: The heaps in each memory space (device, host, on-chip).
        held: Bytes held in each space during the whole run (arguments, outputs).
        phase_of: The pass an instruction belongs to.
        runs: Times each computation runs.

    Returns:
        Points in schedule order, thinned to some 2000 if there are more; the highest
        are kept.
    """
    order = schedule(module)
    names = {id: part.name for id, part in module.computations.items()}
    positions = {
        (names[one.computation], one.name): place for place, one in enumerate(order)
    }
    changes = {
        space: [_occupancy(module, trace, positions) for trace in heaps.get(space, [])]
        for space in (DEVICE, HOST, ON_CHIP)
    }
    places = sorted({p for several in changes.values() for one in several for p in one})
    tops = {space: _sum(several, places) for space, several in changes.items()}
    return thin(
        [
            TimelinePoint(
                position=place,
                instruction=order[place].name,
                phase=phase_of(order[place]),
                n_runs=runs.get(order[place].computation, 1),
                device_bytes=held.get(DEVICE, 0) + tops[DEVICE][i],
                host_bytes=held.get(HOST, 0) + tops[HOST][i],
                on_chip_bytes=held.get(ON_CHIP, 0) + tops[ON_CHIP][i],
            )
            for i, place in enumerate(places)
        ]
    )


def _occupancy(
    module: Module, trace: HeapTrace, positions: Mapping[tuple[str, str], int]
) -> dict[int, tuple[int, int]]:
    """Most bytes during, and bytes after, each place where a heap changes."""
    assert module.buffers is not None
    heap = Heap(module.buffers)
    found: dict[int, tuple[int, int]] = {}
    place = 0
    for event in trace.events:
        place = max(place, positions.get((event.computation, event.instruction), place))
        top, _ = found.get(place, (heap.bytes, 0))
        heap.apply(event)
        found[place] = max(top, heap.bytes), heap.bytes
    return found


def _sum(several: list[dict[int, tuple[int, int]]], places: list[int]) -> list[int]:
    """Bytes of several heaps together at each place."""
    totals = [0] * len(places)
    for one in several:
        after = 0
        for i, place in enumerate(places):
            top, after = one.get(place, (after, after))
            totals[i] += top
    return totals


def summits(points: Sequence[TimelinePoint], n: int) -> tuple[TimelinePoint, ...]:
    """The `n` highest local maxima of device memory, highest first."""
    levels = [-1, *(point.device_bytes for point in points), -1]
    found = [
        point
        for i, point in enumerate(points)
        if levels[i] < levels[i + 1] and levels[i + 1] >= levels[i + 2]
    ]
    return tuple(sorted(found, key=lambda point: -point.device_bytes)[:n])


def thin(points: list[TimelinePoint]) -> tuple[TimelinePoint, ...]:
    """At most some 2000 points, the highest of each stretch kept."""
    if len(points) <= _MAX_POINTS:
        return tuple(points)
    stretch = -(-len(points) // (_MAX_POINTS // 2))
    kept: list[TimelinePoint] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        low = min(part, key=lambda point: point.device_bytes)
        high = max(part, key=lambda point: point.device_bytes)
        kept.extend(sorted({low, high}, key=lambda point: point.position))
    return tuple(kept)
