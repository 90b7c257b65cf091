"""Read the bytes of an `HloProto` into a `Module`, or say what is wrong with them."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from remat._hlo._buffers import (
    SHARE,
    Allocation,
    BufferAssignment,
    HeapEvent,
    HeapTrace,
    LogicalBuffer,
    Slice,
)
from remat._hlo._errors import HloError
from remat._hlo._module import Computation, Instruction, Module, OutputAlias
from remat._hlo._schema import HloProto
from remat._hlo._shapes import ShapeReader

_MAX_CALL_DEPTH = 100
"""Real programs nest loops and fusions a few dozen deep; recursion relies on it."""


def parse(proto: bytes) -> Module:
    """Read an `HloProto`.

    Args:
        proto: The content of an XLA `*.hlo.pb` dump.

    Returns:
        The module, with its buffer assignment if the dump has one. All references in
        it (operands, callees, buffers) are known to lead somewhere, and calls to be
        free of cycles.

    Raises:
        HloError: The bytes are empty, truncated, corrupt, or something else.
    """
    if not proto:
        raise HloError("wanted an HloProto, given 0 bytes")
    message = HloProto()
    try:
        message.ParseFromString(proto)
    except DecodeError as error:
        raise HloError(
            f"{len(proto)} bytes are no HloProto (truncated, corrupt, or another "
            f"format): {error}"
        ) from error
    if not message.hlo_module.computations:
        raise HloError(
            f"no HLO module in {len(proto)} bytes: wanted an HloProto as XLA writes "
            "it with xla_dump_hlo_as_proto (*.hlo.pb)"
        )
    return _module(message)


def _module(message: Any) -> Module:
    hlo = message.hlo_module
    assigned = hlo.device_assignment
    reader = ShapeReader()
    schedule = {
        entry.key: tuple(entry.value.instruction_ids)
        for entry in hlo.schedule.sequences
    }
    computations: dict[int, Computation] = {}
    for part in hlo.computations:
        if part.id in computations:
            raise HloError(f"two computations have the id {part.id}")
        computations[part.id] = _computation(part, schedule.get(part.id, ()), reader)
    instructions = _index(computations.values())
    if hlo.entry_computation_id not in computations:
        raise HloError(f"no entry computation {hlo.entry_computation_id}")
    _check_calls(computations, hlo.entry_computation_id)
    return Module(
        name=hlo.name,
        computations=computations,
        entry=computations[hlo.entry_computation_id],
        instructions=instructions,
        aliases=tuple(
            OutputAlias(
                output_index=tuple(entry.output_shape_index),
                parameter_number=entry.parameter_number,
                parameter_index=tuple(entry.parameter_shape_index),
            )
            for entry in hlo.input_output_alias.entries
        ),
        buffers=(
            _assignment(
                message.buffer_assignment,
                instructions,
                n_parameters=len(computations[hlo.entry_computation_id].parameters),
            )
            if message.HasField("buffer_assignment")
            else None
        ),
        stack_frames=hlo.stack_frame_index,
        n_devices=max(1, assigned.replica_count * assigned.computation_count),
    )


def _computation(
    message: Any, schedule: tuple[int, ...], reader: ShapeReader
) -> Computation:
    here: dict[int, Instruction] = {}
    for part in message.instructions:
        operands = tuple(part.operand_ids)
        if not all(operand in here for operand in operands):
            raise HloError(f"{part.name} uses a value not defined before it")
        here[part.id] = Instruction(
            id=part.id,
            name=part.name,
            opcode=part.opcode,
            shape=reader.read(part.shape),
            operands=operands,
            called=tuple(part.called_computation_ids),
            computation=message.id,
            op_name=part.metadata.op_name,
            message=part,
        )
    if message.root_id not in here:
        raise HloError(f"computation {message.name} has no root")
    if not all(id in here for id in schedule):
        raise HloError(f"the schedule of {message.name} names unknown instructions")
    parameters = sorted(
        (one for one in here.values() if one.opcode == "parameter"),
        key=lambda one: one.parameter_number,
    )
    if [one.parameter_number for one in parameters] != list(range(len(parameters))):
        raise HloError(f"the parameters of {message.name} are not numbered 0, 1, ...")
    return Computation(
        id=message.id,
        name=message.name,
        instructions=tuple(here.values()),
        root=here[message.root_id],
        parameters=tuple(parameters),
        schedule=schedule,
    )


def _index(computations: Iterable[Computation]) -> dict[int, Instruction]:
    found: dict[int, Instruction] = {}
    for computation in computations:
        for instruction in computation.instructions:
            if instruction.id in found:
                raise HloError(f"two instructions have the id {instruction.id}")
            found[instruction.id] = instruction
    return found


def _check_calls(computations: dict[int, Computation], entry: int) -> None:
    """Each callee exists, no computation reaches itself, none is absurdly deep."""
    callees: dict[int, set[int]] = {}
    for computation in computations.values():
        called = {id for one in computation.instructions for id in one.called}
        if not called <= computations.keys():
            raise HloError(f"{computation.name} calls a computation that is not there")
        callees[computation.id] = called
    depth: dict[int, int] = {}
    open_: set[int] = set()
    stack = [entry, *computations]
    while stack:
        id = stack[-1]
        if id in depth:
            stack.pop()
            continue
        pending = [callee for callee in callees[id] if callee not in depth]
        if not pending:
            depth[id] = 1 + max((depth[callee] for callee in callees[id]), default=0)
            open_.discard(id)
            stack.pop()
        elif id in open_:
            raise HloError(f"computation {computations[id].name} calls itself")
        else:
            open_.add(id)
            stack.extend(pending)
    if max(depth.values()) > _MAX_CALL_DEPTH:
        raise HloError(f"calls nest {max(depth.values())} deep")


def _assignment(
    message: Any, instructions: dict[int, Instruction], n_parameters: int
) -> BufferAssignment:
    logical = {
        part.id: _logical(part, instructions) for part in message.logical_buffers
    }
    allocations = tuple(
        _allocation(part, logical) for part in message.buffer_allocations
    )
    for one in allocations:
        if one.is_parameter and not 0 <= one.parameter_number < n_parameters:
            raise HloError(f"allocation {one.index} is for no parameter of the program")
    traces = tuple(
        _trace(part, logical) for part in message.heap_simulator_traces if part.events
    )
    return BufferAssignment(logical=logical, allocations=allocations, traces=traces)


def _logical(message: Any, instructions: dict[int, Instruction]) -> LogicalBuffer:
    defined = message.defined_at
    index = tuple(defined.shape_index)
    if defined.instruction_id not in instructions:
        raise HloError(f"logical buffer {message.id} is defined by no instruction")
    if message.size < 0:
        raise HloError(f"logical buffer {message.id} has {message.size} bytes")
    instructions[defined.instruction_id].shape.at(index)
    return LogicalBuffer(
        id=message.id,
        bytes=message.size,
        instruction=defined.instruction_id,
        index=index,
        color=message.color,
    )


def _allocation(message: Any, logical: dict[int, LogicalBuffer]) -> Allocation:
    slices = tuple(
        Slice(buffer=part.logical_buffer_id, offset=part.offset, bytes=part.size)
        for part in message.assigned
    )
    for part in slices:
        if part.buffer not in logical:
            raise HloError(f"allocation {message.index} holds an unknown buffer")
        if min(part.offset, part.bytes) < 0 or part.offset + part.bytes > message.size:
            raise HloError(
                f"allocation {message.index} of {message.size} bytes cannot hold "
                f"{part.bytes} bytes at {part.offset}"
            )
    return Allocation(
        index=message.index,
        bytes=message.size,
        color=message.color,
        is_parameter=message.is_entry_computation_parameter,
        parameter_number=message.parameter_number,
        is_output=message.maybe_live_out,
        is_constant=message.is_constant,
        is_thread_local=message.is_thread_local,
        slices=slices,
    )


def _trace(message: Any, logical: dict[int, LogicalBuffer]) -> HeapTrace:
    events = tuple(
        HeapEvent(
            kind=part.kind,
            buffer=part.buffer_id,
            shared_with=part.share_with_canonical_id,
            instruction=part.instruction_name,
            computation=part.computation_name,
        )
        for part in message.events
    )
    for event in events:
        known = event.buffer in logical and (
            event.kind != SHARE or event.shared_with in logical
        )
        if not known or not 0 <= event.kind <= SHARE:
            raise HloError("a heap trace speaks of a buffer that is not there")
    return HeapTrace(events=events)
