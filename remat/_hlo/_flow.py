"""Where a value comes from and where it goes, through everything that only moves it.

A value is an instruction and an index into its shape. Loops, fusions, calls, tuples,
copies and asynchronous pairs hand values on without computing anything; following
them backwards ends at the instruction that computed a value, forwards at those that
read it.
"""

from collections.abc import Callable, Iterator

from remat._hlo._module import Instruction, Module

Value = tuple[Instruction, tuple[int, ...]]

SAME_DATA = frozenset(
    {
        "bitcast",
        "copy",
        "copy-done",
        "convert",
        "optimization-barrier",
        "reduce-precision",
        "reshape",
        "transpose",
        "domain",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
    }
)
"""Opcodes whose result holds the values of their first operand."""

_ASYNC_OPERANDS, _ASYNC_RESULT = 0, 1


def sources(module: Module, value: Value) -> list[Value]:
    """The values that a value is handed on from; empty if it is computed here.

    A dynamic-update-slice is followed to the update, not to the array it is written
    into: what a stack holds is what was written.
    """
    instruction, index = value
    opcode = instruction.opcode
    if opcode == "parameter":
        return _parameter_sources(module, instruction, index)
    if not instruction.operands:
        return [(root, index) for root in _roots(module, instruction)]
    first = module.operand(instruction, 0)
    if opcode == "get-tuple-element":
        return [(first, (instruction.tuple_index, *index))]
    if opcode == "tuple":
        return [(module.operand(instruction, index[0]), index[1:])] if index else []
    if opcode == "dynamic-update-slice":
        return [(module.operand(instruction, 1), ())]
    if opcode in SAME_DATA:
        return [(first, index if opcode != "copy-done" else (0, *index))]
    if opcode == "copy-start":
        return [(first, index[1:])] if index else []
    if opcode in ("async-done", "async-update"):
        if first.opcode in ("async-start", "async-update"):
            prefix = (_ASYNC_RESULT,) if opcode == "async-done" else ()
            return [(first, (*prefix, *index))]
        return []
    if opcode == "async-start":
        return _async_sources(module, instruction, index)
    return [(root, index) for root in _roots(module, instruction)]


def _roots(module: Module, instruction: Instruction) -> list[Instruction]:
    """The computations' roots that are an instruction's result."""
    called = [module.computations[id].root for id in instruction.called]
    if instruction.opcode == "while":
        return called[:1]
    return called if instruction.opcode in ("fusion", "call", "conditional") else []


def _parameter_sources(
    module: Module, parameter: Instruction, index: tuple[int, ...]
) -> list[Value]:
    found: list[Value] = []
    for caller in module.callers[parameter.computation]:
        if caller.opcode == "while":
            body = module.computations[caller.called[0]]
            found.append((body.root, index))
            found.append((module.operand(caller, 0), index))
            continue
        position = parameter.parameter_number
        if caller.opcode == "conditional":
            position = 1 + caller.called.index(parameter.computation)
        elif caller.opcode not in ("fusion", "call", "async-start"):
            continue
        if position < len(caller.operands):
            found.append((module.operand(caller, position), index))
    return found


def _async_sources(
    module: Module, start: Instruction, index: tuple[int, ...]
) -> list[Value]:
    if len(index) >= 2 and index[0] == _ASYNC_OPERANDS:
        if index[1] < len(start.operands):
            return [(module.operand(start, index[1]), index[2:])]
    elif index and index[0] == _ASYNC_RESULT and start.called:
        return [(module.computations[start.called[0]].root, index[1:])]
    return []


def origins(
    module: Module,
    value: Value,
    *,
    stop: Callable[[Value], bool] = lambda value: False,
    limit: int = 400,
) -> Iterator[Value]:
    """The values met on the way back from a value, itself first, nearest first.

    Args:
        module: The program.
        value: Where to start.
        stop: Whether to go back no further from a value.
        limit: Values to visit at most, so that huge programs cost no more.
    """
    seen = {(value[0].id, value[1])}
    frontier = [value]
    while frontier and limit > 0:
        following: list[Value] = []
        for here in frontier:
            limit -= 1
            yield here
            if stop(here):
                continue
            for source in sources(module, here):
                key = (source[0].id, source[1])
                if key not in seen:
                    seen.add(key)
                    following.append(source)
        frontier = following


def readers(module: Module, value: Value, limit: int = 400) -> Iterator[Instruction]:
    """The instructions that compute with a value, through what hands it on."""
    seen = {(value[0].id, value[1])}
    pending = [value]
    while pending and limit > 0:
        limit -= 1
        here = pending.pop()
        for user in module.users[here[0].id]:
            onward = _onward(module, here, user)
            if onward is None:
                yield user
                continue
            for after in onward:
                if (after[0].id, after[1]) not in seen:
                    seen.add((after[0].id, after[1]))
                    pending.append(after)
        for after in _returned(module, here):
            if (after[0].id, after[1]) not in seen:
                seen.add((after[0].id, after[1]))
                pending.append(after)


def _onward(module: Module, value: Value, user: Instruction) -> list[Value] | None:
    """Where a user hands a value on to, None where it computes with it."""
    source, index = value
    opcode = user.opcode
    if opcode == "get-tuple-element":
        if not index:
            return [(user, ())]
        return [(user, index[1:])] if index[0] == user.tuple_index else []
    positions = [i for i, id in enumerate(user.operands) if id == source.id]
    if opcode == "tuple":
        return [(user, (position, *index)) for position in positions]
    if opcode == "while":
        inside = [module.computations[id].parameters for id in user.called]
        return [(user, index), *((found[0], index) for found in inside if found)]
    if opcode in ("call", "async-start"):
        parameters = module.computations[user.called[0]].parameters
        return [(parameters[i], index) for i in positions if i < len(parameters)]
    if opcode == "conditional":
        return [
            (parameter, index)
            for i in positions
            if 0 < i <= len(user.called)
            for parameter in module.computations[user.called[i - 1]].parameters
        ]
    if opcode in ("bitcast", "optimization-barrier"):
        return [(user, index)]
    if opcode == "async-done":
        return [(user, index[1:])] if index[:1] == (_ASYNC_RESULT,) else []
    return None


def _returned(module: Module, value: Value) -> Iterator[Value]:
    """Where the value goes when it is the result of its computation."""
    instruction, index = value
    if module.computations[instruction.computation].root is not instruction:
        return
    for caller in module.callers[instruction.computation]:
        if caller.opcode == "while":
            body = module.computations[caller.called[0]]
            if body.id == instruction.computation:
                yield caller, index
                yield from ((parameter, index) for parameter in body.parameters)
        elif caller.opcode in ("call", "conditional"):
            yield caller, index
        elif caller.opcode == "async-start":
            yield caller, (_ASYNC_RESULT, *index)
