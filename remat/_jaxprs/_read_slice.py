"""Reading one layer of stacked arrays, told apart from the model's own slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jec
from jax.interpreters import ad, batching, mlir

from remat import _jax_compat as compat
from remat._jaxprs._custom_jvp import is_custom_jvp
from remat.policies._value import READ_SLICE

read_slice_p = jec.Primitive(READ_SLICE)
"""Reads `array[i]`, as `dynamic_slice` does. A primitive of its own, so that a policy
can tell it from the model's own slices: its result is never worth keeping."""


def plain_slice(array: Any, i: Any) -> Any:
    """`array[i]` by JAX's own primitives."""
    return jax.lax.dynamic_index_in_dim(array, i, keepdims=False)


def read_slice(array: Any, i: Any) -> Any:
    """`array[i]`, which no policy keeps."""
    return read_slice_p.bind(array, i)


def is_read(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation does nothing but read a slice."""
    if eqn.primitive is read_slice_p:
        return True
    if not is_custom_jvp(eqn):
        return False
    body = compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))
    return bool(body.eqns) and all(map(is_read, body.eqns))


def _read_slice_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    array, i = primals
    tangent = tangents[0]
    result = read_slice(array, i)
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, plain_slice(tangent, i)


def _read_slice_vmap(operands: Any, dims: Any) -> tuple[Any, int]:
    return jax.vmap(plain_slice, tuple(dims))(*operands), 0


read_slice_p.def_impl(plain_slice)
read_slice_p.def_abstract_eval(
    # What it is also where values vary over mesh axes, or have shardings.
    lambda array, i: jax.make_jaxpr(plain_slice)(array, i).out_avals[0]
)
ad.primitive_jvps[read_slice_p] = _read_slice_jvp
batching.primitive_batchers[read_slice_p] = _read_slice_vmap
mlir.register_lowering(
    read_slice_p, mlir.lower_fun(plain_slice, multiple_results=False)
)
