"""What one equation costs: FLOPs by its shapes, seconds by a device's peak rates.

Matrix products take the longer of arithmetic and memory traffic. The rest is priced by
passes over memory, since compilers fuse element-wise work into its neighbours: a
recomputed chain rarely touches memory, a reduction reads its operand.

The passes are those that fit the estimates of compiled steps (`MemoryReport`, by which
a plan is judged) of GPT-2 under its named policies, on v5e and on h100: there matrix
products took what is stated here, element-wise work next to nothing, and a kept byte
3.4 and 4.5 passes in a layer scan.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._cost._jaxpr import equation_cost as counted_cost

_FREE = frozenset(
    "name reshape squeeze expand_dims broadcast_in_dim iota stop_gradient copy_p "
    "bitcast_convert_type reduce_precision optimization_barrier pvary split "
    "sharding_constraint create_token axis_index".split()
)
"""Nothing to compute, and no copy once fused."""
_MOVES = frozenset(
    "transpose slice dynamic_slice convert_element_type concatenate pad rev copy "
    "device_put real imag select_n gather dynamic_update_slice scatter".split()
)
"""Nothing to compute, but bytes to move."""
_SLOW_MOVES = frozenset(
    "gather scatter scatter-add scatter_add sort top_k argsort dynamic_update_slice "
    "random_bits threefry2x32 cumsum cumprod cummax cummin cumlogsumexp "
    "reduce_window_sum reduce_window_max select_and_scatter_add fft".split()
)
"""Not fused into neighbours: they read and write memory themselves."""
_COSTLY = frozenset(
    "exp exp2 expm1 log log1p tanh logistic erf erf_inv erfc lgamma digamma sin cos "
    "tan asin acos atan atan2 sinh cosh asinh acosh atanh pow cbrt rsqrt sqrt div "
    "rem".split()
)
_PASSES = {"element-wise": 0.03, "transcendental": 0.06, "move": 0.01}
"""Shares of one pass over the result, once fused: it mostly hides behind the traffic of
its neighbours, and is not free, so that of two choices the one that runs less wins."""
_REDUCTION_PASSES = {"tpu": 1.0, "gpu": 0.0}
"""Passes over a reduction's operand. XLA for GPUs makes one kernel of a softmax, which
reads its operand in any case; keeping its statistics takes that kernel apart."""
_OTHER_REDUCTION_PASSES = 0.5
KEEP_PASSES = 2.0
"""Passes over device memory that keeping a value takes: one to write, one to read."""
SCANNED_KEEP_PASSES = 4.0
"""The same in a scan: the value is made, copied to the stack of all steps' values, and
read back from there."""


class Rates(Protocol):
    """The figures of a target that times are computed from; see `remat.Target`."""

    @property
    def kind(self) -> str: ...
    @property
    def bandwidth_bytes_s(self) -> float: ...
    @property
    def flops_bf16(self) -> float: ...
    @property
    def flops_fp32(self) -> float: ...
    @property
    def host_link_bytes_s(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EquationCost:
    """What one run of an equation costs."""

    flops: float
    """All arithmetic."""
    matmul_flops: float
    """Matrix products, convolutions and kernels only."""
    bytes: float
    """Operands and results."""


def equation_cost(eqn: jec.JaxprEqn) -> EquationCost:
    """FLOPs and bytes of one run of an equation, programs inside it included.

    FLOPs are counted as in `jaxpr_cost`, by which a plan's recompute is judged.
    """
    n_bytes = float(sum(map(_bytes, (*eqn.invars, *eqn.outvars))))
    inside = _inside_cost(eqn)
    if inside is not None:
        return dataclasses.replace(inside, bytes=max(n_bytes, inside.bytes))
    counted = counted_cost(eqn)
    return EquationCost(
        flops=counted.flops, matmul_flops=counted.matmul_flops, bytes=n_bytes
    )


def equation_seconds(eqn: jec.JaxprEqn, rates: Rates) -> float:
    """Seconds that one more run of an equation adds to a compiled program."""
    name = eqn.primitive.name
    cost = equation_cost(eqn)
    bandwidth = rates.bandwidth_bytes_s
    if cost.matmul_flops or any(True for _ in compat.subjaxprs(eqn.params)):
        return max(cost.flops / _peak(eqn, rates), cost.bytes / bandwidth)
    written = sum(map(_bytes, eqn.outvars))
    if name in _FREE:
        return 0.0
    if name in _SLOW_MOVES:
        return cost.bytes / bandwidth
    if name.startswith(("reduce", "arg")):
        passes = _REDUCTION_PASSES.get(rates.kind, _OTHER_REDUCTION_PASSES)
        return passes * sum(map(_bytes, eqn.invars)) / bandwidth
    kind = "transcendental" if name in _COSTLY else "element-wise"
    return _PASSES["move" if name in _MOVES else kind] * written / bandwidth


def _peak(eqn: jec.JaxprEqn, rates: Rates) -> float:
    avals: list[Any] = [atom.aval for atom in eqn.invars if _is_array(atom)]
    widths = [aval.dtype.itemsize for aval in avals]
    return rates.flops_fp32 if min(widths, default=4) >= 4 else rates.flops_bf16


def _inside_cost(eqn: jec.JaxprEqn) -> EquationCost | None:
    """The cost of the programs in an equation: a branch, a loop body, a kernel."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:  # a Pallas kernel that says
        flops = float(estimate.flops)
        bytes_accessed = float(estimate.bytes_accessed)
        return EquationCost(flops=flops, matmul_flops=flops, bytes=bytes_accessed)
    programs = [compat.open_jaxpr(sub) for sub in compat.subjaxprs(eqn.params)]
    if not programs or eqn.primitive.name.startswith("reduce"):
        return None
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    runs = math.prod(n for n in grid if isinstance(n, int))
    runs *= eqn.params.get("length", 1)
    if eqn.primitive.name == "shard_map":
        runs *= compat.n_shards(eqn)
    costs = [_sum(map(equation_cost, program.eqns)) for program in programs]
    if eqn.primitive.name == "cond":
        return max(costs, key=lambda cost: (cost.flops, cost.bytes))
    total = _sum(costs)
    return EquationCost(
        flops=runs * total.flops, matmul_flops=runs * total.matmul_flops, bytes=0.0
    )


def _sum(costs: Any) -> EquationCost:
    costs = list(costs)
    return EquationCost(
        flops=sum(c.flops for c in costs),
        matmul_flops=sum(c.matmul_flops for c in costs),
        bytes=sum(c.bytes for c in costs),
    )


def _is_array(atom: Any) -> bool:
    return hasattr(atom.aval, "shape") and hasattr(atom.aval, "dtype")


def _bytes(atom: Any) -> int:
    return array_bytes(atom.aval) if _is_array(atom) else 0


def array_bytes(aval: Any) -> int:
    """Bytes of an array of this type; 0 for what is no array."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * dtype.itemsize
