"""Bytes that HLO instructions move, by memory space."""

from collections import Counter
from collections.abc import Callable

from remat._hlo._module import Instruction, Module
from remat._hlo._shapes import Shape

# Instructions that move nothing by themselves.
FREE = frozenset(
    {
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "call",
        "conditional",
        "async-start",
        "async-update",
        "async-done",
        "copy-done",
        "optimization-barrier",
        "after-all",
        "domain",
        "partition-id",
        "replica-id",
        "all-reduce-done",
        "all-gather-done",
        "collective-permute-done",
        "send-done",
        "recv-done",
        "add-dependency",
    }
)
_FREE_CALLS = frozenset({"AllocateBuffer", "Sharding"})
_SLICING = frozenset({"dynamic-slice", "slice", "gather"})

Traffic = Counter[str]
"""Bytes by memory space."""


class TrafficCounter:
    """Counts what each instruction of a module reads and writes."""

    def __init__(self, module: Module, space_of: Callable[[int], str]) -> None:
        self._module = module
        self._space_of = space_of

    def count(self, instruction: Instruction) -> Traffic:
        """Bytes an instruction reads and writes, one run.

        A slice of a large operand counts as the slice, and an update in place as the
        update: a scan reads one layer of its stacked parameters a step, not all.
        """
        opcode = instruction.opcode
        traffic: Traffic = Counter()
        if opcode in FREE or instruction.custom_call_target in _FREE_CALLS:
            return traffic
        if opcode == "fusion" and instruction.called:
            self._fusion(instruction, traffic)
        elif opcode in _SLICING:
            operand = self._module.operand(instruction, 0).shape
            self._add(traffic, operand, instruction.shape.bytes)
            self._add(traffic, instruction.shape)
        elif opcode == "dynamic-update-slice":
            update = self._module.operand(instruction, 1).shape
            self._add(traffic, update)
            self._add(traffic, instruction.shape, update.bytes)
        elif opcode == "copy-start":
            for element in instruction.shape.elements[:2]:
                self._add(traffic, element)
        elif opcode == "scatter":
            self._scatter(instruction, traffic)
        else:
            for operand in instruction.operands:
                self._add(traffic, self._module.instructions[operand].shape)
            self._add(traffic, instruction.shape)
        return traffic

    def _add(self, traffic: Traffic, shape: Shape, size: int | None = None) -> None:
        if size is not None:
            traffic[self._space_of(shape.memory_space)] += size
            return
        for _, leaf in shape.leaves():
            traffic[self._space_of(leaf.memory_space)] += leaf.bytes

    def _scatter(self, scatter: Instruction, traffic: Traffic) -> None:
        n_arrays = (len(scatter.operands) - 1) // 2
        for position in range(n_arrays, len(scatter.operands)):
            self._add(traffic, self._module.operand(scatter, position).shape)
        for position in range(n_arrays + 1, len(scatter.operands)):
            update = self._module.operand(scatter, position).shape
            target = self._module.operand(scatter, position - n_arrays - 1).shape
            self._add(traffic, target, 2 * update.bytes)

    def _fusion(self, fusion: Instruction, traffic: Traffic) -> None:
        body = self._module.computations[fusion.called[0]]
        for parameter in body.parameters[: len(fusion.operands)]:
            operand = self._module.operand(fusion, parameter.parameter_number).shape
            self._add(traffic, operand, self._read(parameter, operand.bytes))
        for (_, leaf), written in zip(
            fusion.shape.leaves(), self._written(body.root), strict=False
        ):
            self._add(traffic, leaf, leaf.bytes if written is None else written)

    def _read(self, value: Instruction, whole: int) -> int:
        """Bytes that a fusion reads of one parameter."""
        read = 0
        for user in self._module.users[value.id]:
            if user.opcode in _SLICING and user.operands[0] == value.id:
                read += user.shape.bytes
            elif user.opcode == "bitcast":
                read += self._read(user, whole)
            elif user.opcode == "fusion" and user.called:
                body = self._module.computations[user.called[0]]
                for position, operand in enumerate(user.operands):
                    if operand == value.id and position < len(body.parameters):
                        read += self._read(body.parameters[position], whole)
            elif user.opcode == "dynamic-update-slice" and self._in_place(user, value):
                continue
            else:
                return whole
        return min(read, whole)

    @staticmethod
    def _in_place(update: Instruction, value: Instruction) -> bool:
        return update.operands[0] == value.id and update.operands.count(value.id) == 1

    def _written(self, root: Instruction) -> list[int | None]:
        """Bytes written to each array of a fusion's result; None means all of it."""
        if root.opcode == "tuple":
            return [
                self._written_array(self._module.instructions[id])
                for id in root.operands
            ]
        return [self._written_array(root)]

    def _written_array(self, value: Instruction) -> int | None:
        for _ in range(64):
            if value.opcode == "dynamic-update-slice":
                return self._module.operand(value, 1).shape.bytes
            if value.opcode == "fusion" and value.called:
                value = self._module.computations[value.called[0]].root
            elif value.opcode == "bitcast":
                value = self._module.operand(value, 0)
            else:
                break
        return None
