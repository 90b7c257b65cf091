"""Finds what the arguments and outputs in a compiled program are.

A compiled program numbers its parameters and knows nothing of pytrees; arguments that
nothing reads are gone from it.
"""

from __future__ import annotations

from functools import cached_property

from remat._hlo._buffers import Allocation
from remat._hlo._flow import Value
from remat._hlo._module import Module
from remat._report._roles import Roles


class RoleTable:
    """The roles of one module's allocations."""

    def __init__(self, module: Module, roles: Roles | None) -> None:
        self._module = module
        self._roles = roles

    def of(self, allocation: Allocation) -> tuple[str, str] | None:
        """(category, path) of the argument or output in an allocation."""
        if self._roles is None:
            return None
        if allocation.is_parameter:
            return self._arguments.get(allocation.parameter_number)
        if allocation.is_output:
            for part in allocation.slices:
                if part.buffer in self._outputs:
                    return self._outputs[part.buffer]
        return None

    @cached_property
    def _arguments(self) -> dict[int, tuple[str, str]]:
        """Roles by parameter number. JAX drops arguments that nothing reads."""
        assert self._roles is not None
        roles = list(self._roles.arguments)
        parameters = self._module.entry.parameters
        if len(parameters) == len(roles):
            return dict(enumerate(roles))
        found: dict[int, tuple[str, str]] = {}
        position = 0
        for number, parameter in enumerate(parameters):
            words = _words(parameter.op_name)
            for i in range(position, len(roles)):
                if words and _ends_alike(words, _words(roles[i][1])):
                    found[number] = roles[i]
                    position = i + 1
                    break
        return found

    @cached_property
    def _outputs(self) -> dict[int, tuple[str, str]]:
        """Roles by the logical buffer that holds an output."""
        assert self._roles is not None and self._module.buffers is not None
        by_value = {
            (one.instruction, one.index): one.id
            for one in self._module.buffers.logical.values()
        }
        root = self._module.entry.root
        leaves = [index for index, _ in root.shape.leaves()]
        if len(leaves) != len(self._roles.outputs):
            return {}
        found: dict[int, tuple[str, str]] = {}
        for index, role in zip(leaves, self._roles.outputs, strict=True):
            buffer = self._holder(by_value, (root, index))
            if buffer is not None:
                found.setdefault(buffer, role)
        return found

    def _holder(
        self, by_value: dict[tuple[int, tuple[int, ...]], int], value: Value
    ) -> int | None:
        """The logical buffer a value of the entry computation lies in."""
        instruction, index = value
        for _ in range(len(self._module.entry.instructions)):
            if (instruction.id, index) in by_value:
                return by_value[instruction.id, index]
            if instruction.opcode == "tuple" and index:
                instruction = self._module.operand(instruction, index[0])
                index = index[1:]
            elif instruction.opcode == "get-tuple-element":
                index = (instruction.tuple_index, *index)
                instruction = self._module.operand(instruction, 0)
            elif instruction.opcode in ("bitcast", "optimization-barrier"):
                instruction = self._module.operand(instruction, 0)
            else:
                return None
        return None


def _words(path: str) -> list[str]:
    """`params['layer_0'].wi` and `params/layer_0/wi` as the same words."""
    separators = str.maketrans({c: "/" for c in "[]'\".()"})
    return [word for word in path.translate(separators).split("/") if word]


def _ends_alike(left: list[str], right: list[str]) -> bool:
    n = min(len(left), len(right))
    return n > 0 and left[-n:] == right[-n:]
