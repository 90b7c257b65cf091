"""FLOPs of single HLO instructions."""

import json
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from remat._hlo._module import Instruction, Module

TRANSCENDENTAL = frozenset(
    {
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "tanh",
        "sine",
        "cosine",
        "tan",
        "power",
        "rsqrt",
        "sqrt",
        "cbrt",
        "logistic",
        "erf",
        "atan2",
    }
)
ARITHMETIC = frozenset(
    {
        "add",
        "subtract",
        "multiply",
        "divide",
        "remainder",
        "maximum",
        "minimum",
        "negate",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round-nearest-afz",
        "round-nearest-even",
        "compare",
        "select",
        "clamp",
        "and",
        "or",
        "xor",
        "not",
        "shift-left",
        "shift-right-logical",
        "shift-right-arithmetic",
        "is-finite",
    }
)


def matmul_flops(module: Module, instruction: Instruction) -> float | None:
    """FLOPs of a matrix product or convolution, None for any other instruction.

    Matrix products are `dot` everywhere, convolutions on TPU, and calls of libraries
    on CPU and GPU.
    """
    if instruction.opcode == "dot":
        return _dot(module, instruction)
    if instruction.opcode == "ragged-dot":
        return _ragged_dot(module, instruction)
    if instruction.opcode == "convolution":
        return _convolution(module, instruction)
    if instruction.opcode == "custom-call":
        return _library_call(module, instruction)
    return None


def elementwise_flops(module: Module, instruction: Instruction) -> float:
    """FLOPs of arithmetic and reductions, one an element and step."""
    opcode = instruction.opcode
    if opcode in ARITHMETIC:
        return instruction.shape.size
    if opcode == "reduce" and instruction.operands:
        n_arrays = len(instruction.operands) // 2
        inputs = module.operand(instruction, 0).shape.size
        leaf = next((s for _, s in instruction.shape.leaves()), instruction.shape)
        return max(0, inputs - leaf.size) * n_arrays
    if opcode in ("reduce-window", "select-and-scatter"):
        window = [d.size for d in instruction.message.window.dimensions]
        leaf = next((s for _, s in instruction.shape.leaves()), instruction.shape)
        return leaf.size * max(0, math.prod(window) - 1)
    return 0


def transcendentals(instruction: Instruction) -> float:
    """Elements of transcendental functions."""
    return instruction.shape.size if instruction.opcode in TRANSCENDENTAL else 0


def _dot(module: Module, dot: Instruction) -> float:
    contracted = dot.message.dot_dimension_numbers.lhs_contracting_dimensions
    return 2.0 * dot.shape.size * _sizes(module.operand(dot, 0), contracted)


def _ragged_dot(module: Module, dot: Instruction) -> float:
    numbers = dot.message.ragged_dot_dimension_numbers
    contracted = numbers.dot_dimension_numbers.lhs_contracting_dimensions
    # Each row of the left side meets one group's matrix: as many FLOPs as a plain dot.
    return 2.0 * dot.shape.size * _sizes(module.operand(dot, 0), contracted)


def _sizes(instruction: Instruction, positions: Any) -> int:
    return math.prod(instruction.shape.dimension(i) for i in positions)


def _convolution(module: Module, convolution: Instruction) -> float:
    """Multiply-adds at valid positions only: padding and holes cost nothing.

    XLA:TPU writes batched matrix products as convolutions whose window runs over the
    batch with almost everything in the padding; counting the window's size instead
    would be off by the batch size.
    """
    message = convolution.message
    numbers = message.convolution_dimension_numbers
    inputs, kernel = (module.operand(convolution, i).shape for i in (0, 1))
    valid = 1
    for window, i, o in zip(
        message.window.dimensions,
        numbers.input_spatial_dimensions,
        numbers.output_spatial_dimensions,
        strict=False,
    ):
        valid *= _valid_positions(
            inputs.dimension(i),
            convolution.shape.dimension(o),
            window.size,
            window.stride or 1,
            window.padding_low,
            window.window_dilation or 1,
            window.base_dilation or 1,
        )
    features = inputs.dimension(numbers.input_feature_dimension)
    batch = inputs.dimension(numbers.input_batch_dimension)
    outputs = kernel.dimension(numbers.kernel_output_feature_dimension)
    n_groups = max(1, message.feature_group_count) * max(1, message.batch_group_count)
    return 2.0 * features * batch * outputs * valid / n_groups


@lru_cache(maxsize=4096)
def _valid_positions(
    n_in: int, n_out: int, size: int, stride: int, low: int, dilation: int, base: int
) -> int:
    """Pairs of output position o and window position k that meet an input element.

    They do where at = o * stride - low + k * dilation is a multiple of `base` from 0 to
    (n_in - 1) * base.
    """
    if size > _MAX_WINDOW or max(n_in, n_out, stride, abs(low), dilation, base) > 2**31:
        return min(n_in, size) * n_out
    offset = np.arange(size, dtype=np.int64) * dilation - low
    first = np.maximum(0, -(offset // stride))
    last = np.minimum(n_out - 1, ((n_in - 1) * base - offset) // stride)
    # o * stride + offset = 0 (mod base), solved for o.
    common = math.gcd(stride, base)
    period = base // common
    inverse = pow(stride // common, -1, period) if period > 1 else 0
    phase = (-(offset // common) * inverse) % period
    first += (phase - first) % period
    counts = np.maximum(0, (last - first) // period + 1)
    return int(counts[offset % common == 0].sum())


_MAX_WINDOW = 2**22


def _library_call(module: Module, call: Instruction) -> float | None:
    target = call.custom_call_target
    if target.startswith("__cublas") and len(call.operands) >= 2:
        return _gemm(module, call)
    if target.startswith("__cudnn$conv") and len(call.operands) >= 2:
        return _cudnn_convolution(module, call)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(module, call)
    if target.startswith("__onednn$matmul") and len(call.operands) >= 2:
        return _product_of_sizes(module, call)
    if target.startswith("__cub$") or _HELPER.fullmatch(target):
        return 0.0
    return _stated_flops(call)


# XLA's own helpers (AllocateBuffer, Sharding, TopK, ...) move or mark data; kernels
# of libraries and users are written otherwise (tpu_custom_call, __gpu$xla.gpu.triton).
_HELPER = re.compile(r"[A-Z][A-Za-z0-9]*|annotate_device_placement|\w*_callback")


def _gemm(module: Module, call: Instruction) -> float:
    config = _config(call).get("gemm_backend_config", {})
    numbers = (
        config.get("dot_dimension_numbers", {}) if isinstance(config, dict) else {}
    )
    contracted = numbers.get("lhs_contracting_dimensions")
    if not contracted:
        return _product_of_sizes(module, call)
    out = next((shape for _, shape in call.shape.leaves()), call.shape)
    positions = [int(i) for i in contracted]
    return 2.0 * out.size * _sizes(module.operand(call, 0), positions)


def _product_of_sizes(module: Module, call: Instruction) -> float:
    """2MKN from the three sizes alone: MK x KN x MN = (MKN)^2, a batch apart."""
    left, right = (module.operand(call, i).shape for i in (0, 1))
    out = next((shape for _, shape in call.shape.leaves()), call.shape)
    batch = math.prod(out.dimensions[:-2]) if len(right.dimensions) > 2 else 1
    return 2.0 * math.sqrt(left.size * right.size * out.size / max(batch, 1))


def _cudnn_convolution(module: Module, call: Instruction) -> float:
    """Each gradient costs what the forward convolution does."""
    numbers = call.message.convolution_dimension_numbers
    first, second = (module.operand(call, i).shape for i in (0, 1))
    result = next((shape for _, shape in call.shape.leaves()), call.shape)
    target = call.custom_call_target
    if "BackwardInput" in target:
        outputs, kernel = first, second
    elif "BackwardFilter" in target:
        outputs, kernel = second, result
    else:
        outputs, kernel = result, second
    features = kernel.dimension(numbers.kernel_output_feature_dimension)
    return 2.0 * outputs.size * kernel.size / max(features, 1)


def _cudnn_attention(module: Module, call: Instruction) -> float | None:
    """Two products of query and key sizes forward, five backward."""
    if len(call.operands) < 3:
        return None
    query, key = (module.operand(call, i).shape for i in (0, 1))
    if len(query.dimensions) != 4 or len(key.dimensions) != 4:
        return None
    # Heads and length are the middle two, in either order; length is the longer one.
    length = max(key.dimensions[1:3])
    n_products = 5 if "Backward" in call.custom_call_target else 2
    return 2.0 * n_products * query.size * length


def _stated_flops(call: Instruction) -> float | None:
    """What a Pallas kernel's author says it costs."""
    config = _config(call).get("custom_call_config", {})
    estimate = config.get("cost_estimate") if isinstance(config, dict) else None
    if not isinstance(estimate, dict) or "flops" not in estimate:
        return None
    try:
        return float(estimate["flops"])
    except (TypeError, ValueError):
        return None


def _config(instruction: Instruction) -> dict[str, Any]:
    try:
        config = json.loads(instruction.backend_config)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
