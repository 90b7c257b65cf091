"""What it takes to keep a reduction's result where a fused kernel makes it.

XLA for GPUs makes one kernel of a softmax or a norm: the reduction's operand is read
once, and its maximum, sum or mean never leaves the chip. To keep such a statistic takes
the kernel apart, and the parts each read the operand from memory.

Measured on h100 (estimates of compiled steps, GPT-2 with `minimal`, one more value kept
in each layer, passes over the reduction's operand): the maximum of a softmax 2.8, its
sum 1.3, statistics of a layer norm -1.4 to 1.0.
"""

from remat._plan._costs import Rates, array_bytes
from remat._plan._flow import Flow, FlowEquation

_PASSES = {"gpu": 2.0}
"""More passes over the operand of a reduction whose result is kept."""


def apart_seconds(flow: Flow, rates: Rates) -> dict[int, float]:
    """Seconds that keeping adds, beside the traffic of the kept bytes themselves.

    Args:
        flow: A region's program.
        rates: Figures of the target.

    Returns:
        By number, the values that are a reduction's result, or are made of one without
        growing (a maximum made finite, a sum's reciprocal).
    """
    passes = _PASSES.get(rates.kind)
    found: dict[int, float] = {}
    if passes is None:
        return found
    sizes = [value.copies * array_bytes(value.aval) for value in flow.values]
    for equation in flow.equations:
        seconds = _own(equation, sizes, passes / rates.bandwidth_bytes_s)
        for result in equation.results:
            passed_on = (
                found[operand]
                for operand in equation.operands
                if operand in found and sizes[result] <= sizes[operand]
            )
            most = max((seconds, *passed_on))
            if most:
                found[result] = most
    return found


def _own(equation: FlowEquation, sizes: list[int], byte_s: float) -> float:
    """Of an equation that makes much of its operand little."""
    if not equation.eqn.primitive.name.startswith("reduce_"):
        return 0.0
    read = sum(sizes[operand] for operand in equation.operands)
    made = sum(sizes[result] for result in equation.results)
    return byte_s * read if made < read else 0.0
