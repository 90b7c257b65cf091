"""How often each loop of a module runs.

GPU and CPU dumps state it (`known_trip_count` in the while's backend_config). TPU
dumps do not, so it is worked out from the condition `i < limit`, the first value of
`i` and the step by which the body raises it. JAX's scans all have this form.
"""

import json
from collections.abc import Mapping

from remat._hlo._flow import sources
from remat._hlo._module import Instruction, Module

_MAX_STEPS = 200


def trip_counts(module: Module) -> dict[int, int | None]:
    """Times the body of each while runs, by instruction id; None where unknown."""
    return {
        one.id: _stated(one) if _stated(one) is not None else _derived(module, one)
        for one in module.instructions.values()
        if one.opcode == "while"
    }


def runs_of_computations(
    module: Module, trips: Mapping[int, int | None]
) -> dict[int, int]:
    """Times each computation runs in one run of the program.

    Unknown trip counts and every branch of a conditional count once.
    """
    runs = dict.fromkeys(module.computations, 0)
    runs[module.entry.id] = 1
    # Callees stand before callers in a module, so callers come first in reverse.
    for computation in reversed(module.computations.values()):
        for instruction in computation.instructions:
            times = trips.get(instruction.id) or 1
            for callee in instruction.called:
                runs[callee] += runs[computation.id] * times
    return runs


def _stated(loop: Instruction) -> int | None:
    config = loop.backend_config
    if b"known_trip_count" not in config:
        return None
    try:
        count = int(json.loads(config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        return None
    return count if count >= 0 else None


def _derived(module: Module, loop: Instruction) -> int | None:
    """Count `for i = first; i < limit; i += step`."""
    if len(loop.called) != 2 or len(loop.operands) != 1:
        return None
    body, condition = (module.computations[id] for id in loop.called)
    found = _comparison(module, condition.root)
    if found is None or not body.root.operands:
        return None
    direction, position, limit_value = found
    if position >= len(body.root.operands):
        return None
    first = _constant(module, (module.operand(loop, 0), (position,)))
    step = _step(module, module.operand(body.root, position), position)
    if first is None or limit_value is None or not step:
        return None
    if direction == "LT" and step > 0:
        return max(0, -(-(limit_value - first) // step))
    if direction == "LE" and step > 0:
        return max(0, (limit_value - first) // step + 1)
    if direction == "GT" and step < 0:
        return max(0, -((limit_value - first) // -step))
    return None


def _comparison(
    module: Module, root: Instruction
) -> tuple[str, int, int | None] | None:
    """Direction, tuple position of the counter, and limit of a loop condition."""
    root, _ = _computed(module, (root, ()))
    if root.opcode != "compare":
        return None
    left, right = ((module.operand(root, i), ()) for i in (0, 1))
    position = _loop_position(module, left)
    if position is None:
        return None
    return root.message.comparison_direction, position, _constant(module, right)


def _step(module: Module, value: Instruction, position: int) -> int | None:
    """The constant the body adds to its counter."""
    added, _ = _computed(module, (value, ()))
    if added.opcode not in ("add", "subtract"):
        return None
    left, right = ((module.operand(added, i), ()) for i in (0, 1))
    sign = 1 if added.opcode == "add" else -1
    for counter, constant in ((left, right), (right, left)):
        if _loop_position(module, counter) == position:
            step = _constant(module, constant)
            return None if step is None else sign * step
    return None


def _computed(module: Module, value: tuple) -> tuple:
    """Back to the instruction that computes a value, out of loops excepted."""
    for _ in range(_MAX_STEPS):
        found = sources(module, value)
        if len(found) != 1:
            break
        value = found[0]
    return value


def _loop_position(module: Module, value: tuple) -> int | None:
    """Position in the loop's tuple, if the value is the loop's own parameter."""
    instruction, index = _computed(module, value)
    if instruction.opcode == "parameter" and len(index) == 1:
        return index[0]
    return None


def _constant(module: Module, value: tuple) -> int | None:
    """The integer a value is, looking through loops that hand it on unchanged."""
    for _ in range(_MAX_STEPS):
        instruction, index = value = _computed(module, value)
        if instruction.opcode == "constant":
            return _integer(instruction)
        outer = [
            source
            for source in sources(module, value)
            if _computed(module, source) != value
        ]
        if instruction.opcode != "parameter" or len(outer) != 1 or not index:
            return None
        value = outer[0]
    return None


def _integer(constant: Instruction) -> int | None:
    literal = constant.message.literal
    for name in ("s32s", "s64s", "u32s", "u64s"):
        values = getattr(literal, name)
        if len(values) == 1:
            return int(values[0])
    small = literal.s8s or literal.u8s
    return int.from_bytes(small, "little", signed=True) if len(small) == 1 else None
