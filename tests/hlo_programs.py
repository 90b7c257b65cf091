"""Compiled programs that the tests of the reader, report and cost share.

Shapes are large, so that TPU compilers keep arrays in device memory and not on the
chip; nothing is ever allocated or run. TPU programs come from the quarter-second
probe.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from remat._compile._compile import Program, compile_lowered, lower
from remat._hlo import Module, parse
from remat._hlo._buffers import BufferAssignment
from remat._hlo._schema import HloProto
from remat._targets._target import target

LAYERS, WIDTH, ROWS = 8, 2048, 16384
TARGETS = ("cpu", "v5e", "h100")


def shape(*dimensions, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def stacked_loss(w, x):
    """Scan over checkpointed layers; the carry is the only residual."""

    def layer(h, wi):
        return jnp.tanh(jnp.sin(h @ wi))

    def step(h, wi):
        return jax.checkpoint(layer)(h, wi), None

    return (jax.lax.scan(step, x, w)[0] ** 2).mean()


def sgd_step(w, x):
    gradient = jax.grad(stacked_loss)(w, x)
    return w - 0.1 * gradient


def compile_for(name, fn, *args, donate_argnums=(), probe=None, options=None):
    """A program for a target, on TPU by probe unless told otherwise."""
    device = target(name)
    lowered = lower(fn, args, {}, device, donate_argnums=donate_argnums)
    probe = device.kind == "tpu" if probe is None else probe
    return compile_lowered(lowered, device, probe=probe, compiler_options=options)


@functools.cache
def stacked(name: str) -> Program:
    """Value and gradient of `stacked_loss`."""
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    return compile_for(name, jax.value_and_grad(stacked_loss), *args)


@functools.cache
def donated(name: str) -> Program:
    """A step whose new parameters are written over the old ones."""
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    return compile_for(name, sgd_step, *args, donate_argnums=(0,))


def proto_of(program: Program) -> bytes:
    assert program.hlo_proto is not None
    return program.hlo_proto


def module_of(program: Program) -> Module:
    return parse(proto_of(program))


def buffers_of(module: Module) -> BufferAssignment:
    assert module.buffers is not None
    return module.buffers


F32 = 11


class Hlo:
    """Builds small HLO protos by hand, entry computation only."""

    def __init__(self):
        self.proto = HloProto()
        self.module = self.proto.hlo_module
        self.module.name = "by_hand"
        self.module.entry_computation_id = 1
        self.entry = self.module.computations.add(id=1, name="main")
        self.buffers = self.proto.buffer_assignment

    def add(self, opcode, dimensions, *operands, op_name="", **fields):
        """Adds an instruction of float32 array shape and makes it the root."""
        id = len(self.entry.instructions) + 1
        one = self.entry.instructions.add(
            id=id, name=f"{opcode}.{id}", opcode=opcode, operand_ids=operands, **fields
        )
        one.shape.element_type = F32
        one.shape.dimensions.extend(dimensions)
        one.metadata.op_name = op_name
        self.entry.root_id = id
        return id

    def buffer(self, instruction, size=None, color=0):
        """Adds a logical buffer for an instruction's result."""
        dimensions = self.entry.instructions[instruction - 1].shape.dimensions
        size = 4 * int(np.prod(dimensions)) if size is None else size
        id = len(self.buffers.logical_buffers) + 1
        one = self.buffers.logical_buffers.add(id=id, size=size, color=color)
        one.defined_at.instruction_id = instruction
        return id

    def allocate(self, size, *slices, color=0, **flags):
        """Adds an allocation holding (buffer, offset) pairs."""
        index = len(self.buffers.buffer_allocations)
        one = self.buffers.buffer_allocations.add(
            index=index, size=size, color=color, **flags
        )
        for buffer, offset in slices:
            size = self.buffers.logical_buffers[buffer - 1].size
            one.assigned.add(logical_buffer_id=buffer, offset=offset, size=size)

    def trace(self, *events):
        """Adds a heap trace of ("alloc" | "free", buffer) or ("share", new, old)."""
        trace = self.buffers.heap_simulator_traces.add()
        for kind, buffer, *shared in events:
            trace.events.add(
                kind=("alloc", "free", "share").index(kind),
                buffer_id=buffer,
                share_with_canonical_id=shared[0] if shared else 0,
                computation_name="main",
                instruction_name=self._name(buffer),
            )

    def _name(self, buffer):
        defined = self.buffers.logical_buffers[buffer - 1].defined_at.instruction_id
        return self.entry.instructions[defined - 1].name

    def bytes(self):
        return self.proto.SerializeToString()
