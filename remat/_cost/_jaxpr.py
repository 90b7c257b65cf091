"""The cost of a jaxpr: what the program asks for before any compiler touched it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from remat._cost._figures import NO_COST, Cost
from remat._cost._filled import Filled, n_added
from remat._jax_compat import n_shards, open_jaxpr, subjaxprs

_TRANSCENDENTAL = frozenset(
    """exp exp2 expm1 log log1p tanh sin cos tan asin acos atan sinh cosh asinh acosh
    atanh atan2 pow rsqrt sqrt cbrt logistic erf erfc erf_inv lgamma digamma""".split()
)
_ARITHMETIC = frozenset(
    """add sub mul div rem max min neg abs sign floor ceil round square integer_pow
    eq ne lt le gt ge select_n clamp and or xor not add_any is_finite nextafter
    shift_left shift_right_logical shift_right_arithmetic""".split()
)
_REDUCTIONS = frozenset(
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin
    cumsum cumprod cummax cummin cumlogsumexp""".split()
)
_KERNELS = frozenset({"pallas_call", "custom_call", "ffi_call", "tpu_custom_call"})
# Reducers and scatter updates come as jaxprs too, of scalars: those are not calls.
_NOT_CALLS = ("reduce", "scatter", "sort", "select_and_scatter", "argm")
_NO_TIMES = dict.fromkeys(
    ("estimated_s", "compute_s", "cycles_s", "host_s", "collective_s"), math.nan
)


def jaxpr_cost(closed_jaxpr: Any) -> Cost:
    """Counts what one evaluation of a jaxpr computes.

    Exact for matrix products, convolutions and arithmetic: a scan counts as often as
    it runs, the body of a `shard_map` for every shard, of `cond`'s branches the most
    expensive counts. Nothing is known of seconds. Sizes in a jaxpr are global: divide
    by the devices for one of them.

    Args:
        closed_jaxpr: As `jax.make_jaxpr` gives.

    Returns:
        The cost. `n_unknown_loops` counts `while` loops (their body is counted once),
        `n_uncounted` kernels whose authors state no cost.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> jaxpr_cost(jax.make_jaxpr(lambda x: x @ x)(x)).flops
        128.0
    """
    return replace(_Memo().jaxpr(open_jaxpr(closed_jaxpr)), **_NO_TIMES)


def equation_cost(eqn: Any) -> Cost:
    """The cost of one equation, what it calls included."""
    return replace(_Memo().equation(eqn), **_NO_TIMES)


class _Memo:
    """Costs of jaxprs, each object once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Cost]] = {}
        self._filled = Filled()

    def jaxpr(self, jaxpr: Any) -> Cost:
        if id(jaxpr) not in self._done:
            total = NO_COST
            filled = self._filled.of(jaxpr)
            for eqn in jaxpr.eqns:
                cost = self.equation(eqn)
                if eqn.primitive.name == "add_any":
                    cost = replace(cost, flops=float(n_added(eqn, filled)))
                total = total + cost
            self._done[id(jaxpr)] = (jaxpr, total)
        return self._done[id(jaxpr)][1]

    def equation(self, eqn: Any) -> Cost:
        name = eqn.primitive.name
        if name in _KERNELS:
            return _kernel(eqn)
        inner = [self.jaxpr(open_jaxpr(sub)) for sub in subjaxprs(eqn.params)]
        if name == "scan":
            return _sum(inner).times(eqn.params["length"])
        if name == "while":
            cost = _sum(inner)
            return replace(cost, n_unknown_loops=cost.n_unknown_loops + 1)
        if name == "cond":
            return max(inner, key=lambda cost: (cost.flops, cost.bytes_accessed))
        if name == "shard_map":  # its body is what one shard does
            return _sum(inner).times(n_shards(eqn))
        if name.startswith("custom_jvp_call") or name.startswith("custom_vjp_call"):
            return inner[0] if inner else NO_COST
        if inner and not name.startswith(_NOT_CALLS):
            return _sum(inner)
        return _plain(eqn)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = NO_COST
    for cost in costs:
        total = total + cost
    return total


def _plain(eqn: Any) -> Cost:
    name = eqn.primitive.name
    out = _size(eqn.outvars[0]) if eqn.outvars else 0
    if name == "dot_general":
        return _matmul(_dot(eqn), eqn)
    if name == "ragged_dot" or name == "ragged_dot_general":
        return _matmul(2.0 * out * eqn.invars[0].aval.shape[-1], eqn)
    if name == "conv_general_dilated":
        return _matmul(_convolution(eqn), eqn)
    flops = transcendentals = 0.0
    if name in _TRANSCENDENTAL:
        transcendentals = out
    elif name in _ARITHMETIC:
        flops = out
    elif name in _REDUCTIONS:
        flops = max(
            0, _size(eqn.invars[0]) - (out if not name.startswith("cum") else 0)
        )
    return replace(
        NO_COST,
        flops=float(flops),
        transcendentals=float(transcendentals),
        bytes_accessed=_bytes(eqn),
    )


def _matmul(flops: float, eqn: Any) -> Cost:
    return replace(NO_COST, flops=flops, matmul_flops=flops, bytes_accessed=_bytes(eqn))


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * _size(eqn.outvars[0]) * math.prod(left[i] for i in contracted)


def _convolution(eqn: Any) -> float:
    """Every window position counts, also those in the padding."""
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    # The kernel's input features are those of one group already.
    features = kernel[numbers.rhs_spec[1]]
    window = math.prod(kernel[i] for i in numbers.rhs_spec[2:])
    # Holes between the inputs, which the gradient of a strided convolution has.
    holes = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * _size(eqn.outvars[0]) * features * window / holes


def _kernel(eqn: Any) -> Cost:
    estimate = eqn.params["cost_estimate"] if "cost_estimate" in eqn.params else None
    if estimate is None:
        moved = _bytes(eqn)
        return replace(
            NO_COST,
            n_kernels=1,
            n_uncounted=1,
            bytes_accessed=moved,
            kernel_bytes=moved,
        )
    return replace(
        NO_COST,
        flops=float(estimate.flops),
        transcendentals=float(estimate.transcendentals),
        bytes_accessed=float(estimate.bytes_accessed),
        n_kernels=1,
        kernel_bytes=float(estimate.bytes_accessed),
    )


def _size(atom: Any) -> int:
    shape = getattr(atom.aval, "shape", ())
    return math.prod(int(d) for d in shape)


def _bytes(eqn: Any) -> float:
    return float(sum(_atom_bytes(atom) for atom in (*eqn.invars, *eqn.outvars)))


def _atom_bytes(atom: Any) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None:
        return 0
    try:
        return _size(atom) * np.dtype(dtype).itemsize
    except TypeError:  # PRNG keys and other extended types
        return _size(atom) * getattr(dtype, "itemsize", 0)
