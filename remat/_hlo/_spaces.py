"""Memory spaces: where a compiled program's buffers live."""

from remat._hlo._module import Module

DEVICE, HOST, ON_CHIP = "device", "host", "on-chip"

_HOST = 5
# XLA:GPU numbers further parts of the same device memory (collectives, temporaries).
_DEVICE = {"gpu": frozenset({0, 1, 2}), "tpu": frozenset({0})}


def memory_space(color: int, kind: str) -> str:
    """The memory space that XLA's number stands for.

    Args:
        color: `S(n)` in a layout, the color of a buffer.
        kind: Platform: "cpu", "gpu" or "tpu".

    Returns:
        "device", "host" (number 5 on TPU and GPU) or "on-chip".
    """
    if kind == "cpu":
        return DEVICE
    if color == _HOST:
        return HOST
    return DEVICE if color in _DEVICE[kind] else ON_CHIP


def guess_kind(module: Module) -> str:
    """The platform a module was compiled for, told by how its backend writes configs.

    Args:
        module: A compiled module whose origin is not stated.

    Returns:
        "cpu", "gpu" or "tpu".
    """
    for instruction in module.instructions.values():
        config = instruction.backend_config
        if b"flag_configs" in config or b"aliasing_operands" in config:
            return "tpu"
        if b"fusion_backend_config" in config or b"operation_queue_id" in config:
            return "gpu"
    return "cpu"
