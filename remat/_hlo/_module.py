"""An HLO module: computations, instructions, schedule, source lines."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat._hlo._buffers import BufferAssignment
from remat._hlo._errors import HloError
from remat._hlo._shapes import Shape


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One HLO instruction."""

    id: int
    """Unique in the module."""
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    """Instruction ids, in the same computation."""
    called: tuple[int, ...]
    """Computation ids: fusion and async bodies, while (body, condition), branches."""
    computation: int
    op_name: str
    """JAX's name stack, `jit(step)/jvp(Net)/while/body/mlp/dot_general`."""
    message: Any = field(repr=False)
    """The protobuf message, for what only some opcodes have."""

    @property
    def tuple_index(self) -> int:
        return self.message.tuple_index

    @property
    def parameter_number(self) -> int:
        return self.message.parameter_number

    @property
    def custom_call_target(self) -> str:
        return self.message.custom_call_target

    @property
    def backend_config(self) -> bytes:
        return self.message.backend_config


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """A list of instructions, operands before their users."""

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    parameters: tuple[Instruction, ...]
    """By parameter number."""
    schedule: tuple[int, ...]
    """Instruction ids in the order they run; empty for fused computations."""


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """An output that is written over a donated argument."""

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program as XLA dumped it."""

    name: str
    computations: dict[int, Computation]
    """By id, callees before callers."""
    entry: Computation
    instructions: dict[int, Instruction]
    """All instructions of the module by id."""
    aliases: tuple[OutputAlias, ...]
    buffers: BufferAssignment | None
    """None in a dump made before buffer assignment."""
    stack_frames: Any = field(repr=False)
    n_devices: int = 1
    """Devices that run it together."""

    def operand(self, instruction: Instruction, position: int) -> Instruction:
        """The instruction whose result is one operand of another.

        Raises:
            HloError: There is no such operand.
        """
        if not 0 <= position < len(instruction.operands):
            raise HloError(
                f"{instruction.opcode} {instruction.name} has no operand {position}"
            )
        return self.instructions[instruction.operands[position]]

    @cached_property
    def callers(self) -> dict[int, tuple[Instruction, ...]]:
        """The instructions that call each computation."""
        callers: dict[int, list[Instruction]] = {id: [] for id in self.computations}
        for instruction in self.instructions.values():
            for computation in instruction.called:
                callers[computation].append(instruction)
        return {id: tuple(found) for id, found in callers.items()}

    @cached_property
    def users(self) -> dict[int, tuple[Instruction, ...]]:
        """The instructions that take each instruction's result, by its id."""
        users: dict[int, list[Instruction]] = {id: [] for id in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {id: tuple(found) for id, found in users.items()}
