"""What it takes to keep a value that only exists within a fused kernel.

XLA for GPUs makes one kernel of a softmax or a norm: the operand is read once, and its
maximum, the differences, their sum never leave the chip. To keep one of these takes
the kernel apart, or makes it write more, beside the traffic of what is kept.

Measured on h100 (estimates of compiled steps; GPT-2 with `minimal`, one more value kept
in each layer), in passes over what the reduction reads: the maximum of a softmax 2.8,
its sum 1.3, statistics of a layer norm -1.4 to 1.0; the differences and exponentials
between the two 0.2 to 0.7, the masked scores before them 1.3; the product of queries
and keys that the kernel reads, and the quotient that it writes, 0.
"""

from collections.abc import Collection, Sequence

from remat import _jax_compat as compat
from remat._plan._costs import Rates, array_bytes
from remat._plan._flow import Flow, FlowEquation

_STATISTIC_PASSES = {"gpu": 2.0}
"""Passes over the operand of a reduction whose result is kept."""
_INSIDE_PASSES = {"gpu": 0.5}
"""Passes over a kept value of a reduction's operand's size."""


def apart_seconds(
    flow: Flow, linear: Collection[int], rates: Rates
) -> dict[int, float]:
    """Seconds that keeping adds, beside the traffic of the kept bytes themselves.

    Args:
        flow: A region's program, differentiated.
        linear: The values that depend on a tangent.
        rates: Figures of the target.

    Returns:
        By number, a reduction's result and what is made of it without growing (a
        maximum made finite, a sum's reciprocal), and what the kernel holds between its
        operands and the reduction.
    """
    if rates.kind not in _STATISTIC_PASSES:
        return {}
    equations = [e for e in flow.equations if not any(r in linear for r in e.results)]
    sizes = [value.copies * array_bytes(value.aval) for value in flow.values]
    statistics = _statistics(equations, sizes)
    byte_s = _INSIDE_PASSES[rates.kind] / rates.bandwidth_bytes_s
    found = {v: byte_s * sizes[v] for v in _inside(equations, statistics)}
    byte_s = _STATISTIC_PASSES[rates.kind] / rates.bandwidth_bytes_s
    return found | {number: byte_s * read for number, read in statistics.items()}


def _statistics(equations: Sequence[FlowEquation], sizes: list[int]) -> dict[int, int]:
    """Results of reductions and what keeps their size, with the bytes read for them."""
    found: dict[int, int] = {}
    for equation in equations:
        own = _bytes_reduced(equation, sizes)
        for result in equation.results:
            passed_on = (
                found[operand]
                for operand in equation.operands
                if operand in found and sizes[result] <= sizes[operand]
            )
            most = max((own, *passed_on))
            if most:
                found[result] = most
    return found


def _bytes_reduced(equation: FlowEquation, sizes: list[int]) -> int:
    """What an equation reads that makes much of it little."""
    if not _reduces(equation):
        return 0
    read = sum(sizes[operand] for operand in equation.operands)
    made = sum(sizes[result] for result in equation.results)
    return read if made < read else 0


def _inside(equations: Sequence[FlowEquation], statistics: Collection[int]) -> set[int]:
    """Values made element by element that a reduction reads, in one kernel with it.

    Of one value alone, as a scaled product is, the kernel before makes them; what else
    reads them too, without being made of another statistic, is in memory in any case.
    """
    behind = _made_of(equations, statistics)
    read, read_elsewhere = _read_by_reductions(equations)
    found: set[int] = set()
    for equation in equations:
        is_name = equation.eqn.primitive is compat.name_p
        combines = _is_element_wise(equation) and len(equation.operands) > 1
        if combines or (is_name and not found.isdisjoint(equation.operands)):
            found.update(r for r in equation.results if r not in read_elsewhere)
        if _is_element_wise(equation):
            found.update(r for r in equation.results if r in behind)
    return {v for v in found if v in read and v not in statistics}


def _made_of(
    equations: Sequence[FlowEquation], statistics: Collection[int]
) -> set[int]:
    """Values made element by element of a statistic, and others."""
    found = set(statistics)
    for equation in equations:
        if _is_element_wise(equation) and not found.isdisjoint(equation.operands):
            found.update(equation.results)
    return found


def _read_by_reductions(equations: Sequence[FlowEquation]) -> tuple[set[int], set[int]]:
    """What reductions read, element-wise work between; what anything else reads."""
    read: set[int] = set()
    elsewhere: set[int] = set()
    for equation in reversed(equations):
        leads_on = _is_element_wise(equation) and not read.isdisjoint(equation.results)
        into = read if leads_on or _reduces(equation) else elsewhere
        into.update(equation.operands)
    return read, elsewhere


def _reduces(equation: FlowEquation) -> bool:
    return equation.eqn.primitive.name.startswith("reduce_")


def _is_element_wise(equation: FlowEquation) -> bool:
    name = equation.eqn.primitive.name
    whole = name in ("dot_general", "conv_general_dilated") or _reduces(equation)
    return not whole and not any(True for _ in compat.subjaxprs(equation.eqn.params))
