"""What each block of memory holds: whose value, from which pass, line and module.

A block is traced from the instruction that writes it back to the one that computed its
value: through fusions, loops, copies and asynchronous pairs, and from a stack written
by a dynamic-update-slice in a loop's body to the value that is written into it. Names
come from JAX's name stack, which survives compilation; checkpoint names do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from remat._hlo._flow import SAME_DATA, Value, readers, sources
from remat._hlo._module import Instruction, Module
from remat._naming._op_name import OpName, parse_op_name
from remat._report._lines import source_of

_MAX_VISITS = 400
"""Values looked at for one block; only blocks nobody named come near."""

_HAND_ON = SAME_DATA | {
    "dynamic-update-slice",
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
_PARTS_OF = ("dynamic-slice", "slice", "broadcast", "pad", "concatenate")
_LOOP_VALUES = ("parameter", "while", "get-tuple-element", "conditional", "call")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the value in a block comes from."""

    module_path: str | None = None
    label: str | None = None
    source: str | None = None
    phase: str | None = None
    n_stacked: int = 1
    primitive: str | None = None
    instruction: str | None = None
    """Name of the HLO instruction that writes the block."""

    @property
    def is_known(self) -> bool:
        return bool(self.label or self.module_path or self.source or self.primitive)


@dataclass(frozen=True, slots=True)
class _Named:
    """An instruction on the way back from a value, and what its name says."""

    instruction: Instruction
    name: OpName


class Attributor:
    """Answers where the blocks of one module's memory come from."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def origin(
        self, definitions: Iterable[Value], later: Iterable[Value] = ()
    ) -> Origin:
        """Traces a block to the value it holds.

        Args:
            definitions: The values that share the block, in the order of their
                definition (a loop's operand, its body's parameter, the new value).
            later: The values that share it afterwards: what a block is for that so
                far holds zeros only.

        Returns:
            The origin; its fields are None where nothing is known.
        """
        writers = _writers(list(definitions), list(later))
        phase = next((p for p in map(self.phase_of_value, writers) if p), None)
        found = Origin(phase=phase)
        for writer in writers:
            found = self._named(writer, phase)
            if found.is_known:
                break
        return replace(found, instruction=writers[0][0].name) if writers else found

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
        if not self._uses_gradients:
            return None
        in_entry = self._caller_in_entry(instruction)
        return "optimizer" if in_entry.id in self._uses_gradients else "forward"

    def read_in(self, definitions: Iterable[Value]) -> frozenset[str]:
        """The passes that read any of the values."""
        phases: set[str] = set()
        for value in definitions:
            for reader in readers(self._module, value):
                phase = self.phase(reader) or self.phase_of_value((reader, ()))
                if phase:
                    phases.add(phase)
        return frozenset(phases)

    def _named(self, value: Value, phase: str | None) -> Origin:
        """The nearest origin with a label, else the instruction that computes it.

        Names of what only hands on (a fusion with several results has one name) count
        where nothing behind them has a name; those of scan's own plumbing last.
        """
        found: dict[int, _Named] = {}
        n_stacked = 1
        for instruction, n_here in _walk(self._module, value):
            n_stacked = max(n_stacked, n_here)
            if _is_entry_parameter(self._module, instruction):
                if not found:
                    return _argument(instruction, phase, n_stacked)
                continue
            name = parse_op_name(instruction.op_name)
            named = _Named(instruction, name)
            if name.label:
                return self._origin(named, phase, n_stacked)
            computed = instruction.opcode not in _HAND_ON
            if instruction.op_name:
                rank = 2 if name.is_plumbing else 1 - computed
                found.setdefault(rank, named)
            if computed and 0 in found:
                break
        if not found:
            return Origin(phase=phase, n_stacked=n_stacked)
        return self._origin(found[min(found)], phase, n_stacked)

    def _origin(self, found: _Named, phase: str | None, n_stacked: int) -> Origin:
        return Origin(
            module_path=found.name.module_path,
            label=found.name.label,
            source=source_of(self._module, found.instruction),
            phase=phase or found.name.phase,
            n_stacked=n_stacked,
            primitive=found.name.primitive or None,
        )

    @cached_property
    def _uses_gradients(self) -> frozenset[int]:
        """Instructions of the entry that depend on the backward pass; none if none."""
        found: set[int] = set()
        for instruction in self._module.entry.instructions:
            if any(id in found for id in instruction.operands):
                found.add(instruction.id)
            elif instruction.operands and instruction.op_name:
                if parse_op_name(instruction.op_name).phase in (
                    "backward",
                    "recompute",
                ):
                    found.add(instruction.id)
        return frozenset(found)

    def _caller_in_entry(self, instruction: Instruction) -> Instruction:
        """The instruction of the entry computation that one runs inside of."""
        for _ in range(len(self._module.computations)):
            callers = self._module.callers[instruction.computation]
            if instruction.computation == self._module.entry.id or not callers:
                break
            instruction = callers[0]
        return instruction


def _argument(parameter: Instruction, phase: str | None, n_stacked: int) -> Origin:
    """A block that holds a copy or cast of a program argument."""
    return Origin(
        module_path=parameter.op_name or None,
        phase=phase,
        n_stacked=n_stacked,
        primitive="parameter",
    )


def _writers(definitions: list[Value], later: list[Value]) -> list[Value]:
    """The values to trace, best first: those computed, the latest first.

    A loop's parameters and results only hand on. What a loop's stack starts from
    (zeros, or the block as it is allocated) says least.
    """
    ranks: tuple[list[Value], ...] = ([], [], [])
    for value in reversed(definitions):
        ranks[_rank(value[0])].append(value)
    computed, handed, started = ranks
    after = [value for value in later if _rank(value[0]) < 2]
    return [*computed, *handed, *after, *started]


def _rank(instruction: Instruction) -> int:
    if instruction.opcode in _LOOP_VALUES:
        return 1
    return 2 if not instruction.operands or instruction.opcode == "broadcast" else 0


def _is_entry_parameter(module: Module, instruction: Instruction) -> bool:
    return (
        instruction.opcode == "parameter" and instruction.computation == module.entry.id
    )


def _walk(module: Module, value: Value) -> Iterable[tuple[Instruction, int]]:
    """Instructions back from a value, with the times the value is stacked there."""
    seen = {(value[0].id, value[1])}
    pending = deque([(value, 1, True)])
    for _ in range(_MAX_VISITS):
        if not pending:
            return
        here, n_stacked, whole = pending.popleft()
        instruction = here[0]
        yield instruction, n_stacked
        if instruction.opcode == "dynamic-update-slice" and whole:
            n_stacked *= _times_stacked(module, instruction)
        onward = sources(module, here)
        if not onward and _says_little(instruction):
            # One layer's slice of a stack is not stacked itself.
            operands = (module.instructions[id] for id in instruction.operands)
            onward, whole = [(one, ()) for one in operands if one.shape.size > 1], False
        for source in onward:
            key = (source[0].id, source[1])
            if key not in seen:
                seen.add(key)
                pending.append((source, n_stacked, whole))


def _says_little(instruction: Instruction) -> bool:
    """Whether a value is better told by what it is made from."""
    return not instruction.op_name or instruction.opcode in _PARTS_OF


def _times_stacked(module: Module, update: Instruction) -> int:
    """Slots of the stack that a dynamic-update-slice in a loop fills one of."""
    slot = module.operand(update, 1).shape.size
    return max(1, update.shape.size // slot) if slot else 1
