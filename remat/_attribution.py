"""What each block of memory holds: whose value, from which pass, line and module.

A block is traced from the instruction that writes it back to the one that computed its
value: through fusions, loops, copies and asynchronous pairs, and from a stack written
by a dynamic-update-slice in a loop's body to the value that is written into it. Names
come from JAX's name stack, which survives compilation; checkpoint names do not.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from remat._hlo._flow import SAME_DATA, Value, readers, sources
from remat._hlo._module import Instruction, Module
from remat._op_name import OpName, parse_op_name

_MAX_VISITS = 400
"""Values looked at for one block; only blocks nobody named come near."""

_HAND_ON = SAME_DATA | {
    "parameter",
    "while",
    "get-tuple-element",
    "tuple",
    "conditional",
    "call",
    "fusion",
    "async-start",
    "async-done",
    "copy-start",
}
_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the value in a block comes from."""

    module_path: str | None = None
    label: str | None = None
    source: str | None = None
    phase: str | None = None
    n_stacked: int = 1
    primitive: str | None = None
    parameter_number: int | None = None
    """Set where the block only holds (a cast or copy of) a program argument."""

    @property
    def is_known(self) -> bool:
        return bool(self.label or self.module_path or self.source or self.primitive)


class Attributor:
    """Answers where the blocks of one module's memory come from."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def origin(self, definitions: Iterable[Value]) -> Origin:
        """Traces a block to the value it holds.

        Args:
            definitions: The values that share the block, in the order of their
                definition (a loop's operand, its body's parameter, the new value).

        Returns:
            The origin; its fields are None where nothing is known.
        """
        writers = _writers(list(definitions))
        phase = next((p for p in map(self.phase_of_value, writers) if p), None)
        found = None
        for writer in writers:
            found = self._named(writer, phase)
            if found.is_known:
                return found
        return found or Origin(phase=phase)

    def phase_of_value(self, value: Value) -> str | None:
        """The pass in which a value is computed."""
        for instruction, _ in _walk(self._module, value):
            if phase := self.phase(instruction):
                return phase
        return None

    def phase(self, instruction: Instruction) -> str | None:
        """The pass an instruction belongs to, by its name and where it stands."""
        if not instruction.op_name or _is_entry_parameter(self._module, instruction):
            return None
        if stated := parse_op_name(instruction.op_name).phase:
            return stated
        if not self._first_backward:
            return None
        position = self._entry_position(instruction)
        return "forward" if position < self._first_backward else "optimizer"

    def read_in(self, definitions: Iterable[Value]) -> frozenset[str]:
        """The passes that read any of the values."""
        phases: set[str] = set()
        for value in definitions:
            for reader in readers(self._module, value):
                phase = self.phase(reader) or self.phase_of_value((reader, ()))
                if phase:
                    phases.add(phase)
        return frozenset(phases)

    def source(self, instruction: Instruction) -> str | None:
        """`file.py:12` of the user's code that an instruction comes from."""
        metadata = instruction.message.metadata
        if line := self._frame_line(metadata.stack_frame_id):
            return line
        if metadata.source_file:
            return f"{PurePath(metadata.source_file).name}:{metadata.source_line}"
        return None

    def _frame_line(self, frame_id: int) -> str | None:
        """The innermost frame outside installed libraries, else the innermost."""
        index = self._module.stack_frames
        innermost = None
        for _ in range(len(index.stack_frames)):
            if not 0 < frame_id <= len(index.stack_frames):
                break
            frame = index.stack_frames[frame_id - 1]
            if not 0 < frame.file_location_id <= len(index.file_locations):
                break
            location = index.file_locations[frame.file_location_id - 1]
            if not 0 < location.file_name_id <= len(index.file_names):
                break
            file = index.file_names[location.file_name_id - 1]
            line = f"{PurePath(file).name}:{location.line}"
            if not any(library in file for library in _LIBRARIES):
                return line
            innermost = innermost or line
            frame_id = frame.parent_frame_id
        return innermost

    def _named(self, value: Value, phase: str | None) -> Origin:
        """The nearest origin with a label, else with a name that says something."""
        plain: tuple[Instruction, OpName, int] | None = None
        fallback: tuple[Instruction, OpName, int] | None = None
        for instruction, n_stacked in _walk(self._module, value):
            if _is_entry_parameter(self._module, instruction):
                if plain is None and fallback is None:
                    return Origin(
                        label=instruction.op_name or None,
                        phase=phase,
                        n_stacked=n_stacked,
                        primitive="parameter",
                        parameter_number=instruction.parameter_number,
                    )
                continue
            if not instruction.op_name:
                continue
            name = parse_op_name(instruction.op_name)
            found = (instruction, name, n_stacked)
            if name.label:
                return self._origin(*found, phase)
            if name.is_plumbing:
                fallback = fallback or found
            elif plain is None:
                plain = found
            if plain is not None and instruction.opcode not in _HAND_ON:
                break
        best = plain or fallback
        return self._origin(*best, phase) if best else Origin(phase=phase)

    def _origin(
        self, instruction: Instruction, name: OpName, n_stacked: int, phase: str | None
    ) -> Origin:
        return Origin(
            module_path=name.module_path,
            label=name.label,
            source=self.source(instruction),
            phase=phase or name.phase,
            n_stacked=n_stacked,
            primitive=name.primitive or None,
        )

    @cached_property
    def _first_backward(self) -> int:
        """Position in the entry of the first backward instruction; 0 if none."""
        for position, id in enumerate(self._entry_order):
            name = self._module.instructions[id].op_name
            if name and parse_op_name(name).phase in ("backward", "recompute"):
                return position
        return 0

    @cached_property
    def _entry_order(self) -> tuple[int, ...]:
        entry = self._module.entry
        return entry.schedule or tuple(one.id for one in entry.instructions)

    @cached_property
    def _entry_positions(self) -> dict[int, int]:
        return {id: position for position, id in enumerate(self._entry_order)}

    def _entry_position(self, instruction: Instruction) -> int:
        """Where in the entry's schedule an instruction runs, callers followed."""
        for _ in range(len(self._module.computations)):
            if instruction.computation == self._module.entry.id:
                break
            callers = self._module.callers[instruction.computation]
            if not callers:
                return 0
            instruction = callers[0]
        return self._entry_positions.get(instruction.id, 0)


def _writers(definitions: list[Value]) -> list[Value]:
    """The values to trace, best first: those written, the latest first.

    A loop's own parameters and results only hand on; the value a loop starts from
    (often zeros, or the block as it is allocated) says less than what is written later.
    """
    handing = ("parameter", "while", "get-tuple-element", "conditional", "call")
    written = [value for value in definitions if value[0].opcode not in handing]
    return [*reversed(written), *(v for v in definitions if v not in written)]


def _is_entry_parameter(module: Module, instruction: Instruction) -> bool:
    return (
        instruction.opcode == "parameter" and instruction.computation == module.entry.id
    )


def _walk(module: Module, value: Value) -> Iterable[tuple[Instruction, int]]:
    """Instructions back from a value, with the times the value is stacked there."""
    seen = {(value[0].id, value[1])}
    pending = deque([(value, 1)])
    for _ in range(_MAX_VISITS):
        if not pending:
            return
        here, n_stacked = pending.popleft()
        instruction = here[0]
        yield instruction, n_stacked
        if instruction.opcode == "dynamic-update-slice":
            n_stacked *= _times_stacked(module, instruction)
        onward = sources(module, here)
        if not onward and instruction.opcode in ("dynamic-slice", "slice", "broadcast"):
            onward = [(module.operand(instruction, 0), ())]
        for source in onward:
            key = (source[0].id, source[1])
            if key not in seen:
                seen.add(key)
                pending.append((source, n_stacked))


def _times_stacked(module: Module, update: Instruction) -> int:
    """Slots of the stack that a dynamic-update-slice in a loop fills one of."""
    slot = module.operand(update, 1).shape.size
    return max(1, update.shape.size // slot) if slot else 1
