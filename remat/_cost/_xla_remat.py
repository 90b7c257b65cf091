"""What XLA's own rematerialization pass added to a program."""

import re
from collections.abc import Collection

from remat._hlo._module import Instruction, Module

# What HloRematerialization names the copies it makes: `fusion.408.remat4`.
_COPY = re.compile(r"\.remat\d*(\.|$)")


def added_by_xla(module: Module) -> frozenset[int]:
    """Ids of the instructions that run again only for the pass.

    It makes copies nearer to their uses. Where that leaves the first one without any,
    it is gone, and one of the copies stands for it.
    """
    names = {one.name for one in module.instructions.values()}
    added: set[int] = set()
    stand_ins: set[str] = set()
    for instruction in module.instructions.values():
        found = _COPY.search(instruction.name)
        if not found:
            continue
        original = instruction.name[: found.start()]
        if original in names or original in stand_ins:
            added.add(instruction.id)
        stand_ins.add(original)
    return frozenset(added)


def is_within(module: Module, instruction: Instruction, added: Collection[int]) -> bool:
    """Whether an instruction is one of those added, or fused into one."""
    while instruction.id not in added:
        callers = module.callers[instruction.computation]
        if not callers or callers[0].opcode != "fusion":
            return False
        instruction = callers[0]
    return True
