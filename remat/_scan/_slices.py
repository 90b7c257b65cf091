"""Slices of xs: read by index, inside the region that needs them.

The transpose of reading slice i of a constant adds a slice into the constant's
cotangent. Were the xs constants of nested loops, each inner loop would start that
cotangent at zero, as large as all of the xs, and the loop around it would add the
two. So each step reads the value from the constant, and the tangent from a
*shadow*: the same array, passed along as part of the carry. Its cotangent is then
part of the carry of the backward loops, and XLA adds slices to it in place. Nothing
reads the shadow's value, so it is never kept and never copied.

The rules below answer one differentiation so; what they return are plain reads of
the constant, which a second differentiation treats as JAX does.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat import _jax_compat as compat
from remat._jaxprs._equations import new_closed_jaxpr, single_equation
from remat._jaxprs._read_slice import plain_slice, read_slice

Arrays = tuple[Any, ...]


class Slice(NamedTuple):
    """One slice of an array, not yet read."""

    array: Any
    shadow: Any
    """What its tangent is read from; None for an array that has none."""
    i: Any

    def read(self) -> Any:
        """The slice's value."""
        if self.shadow is None:
            return read_slice(self.array, self.i)
        return _read(self.array, self.shadow, self.i)


def constants(xs: Arrays) -> Arrays:
    """What values are read from."""
    return tuple(_constant(x) if _has_tangent(x) else x for x in xs)


def shadows(xs: Arrays) -> Arrays:
    """What tangents are read from; None for arrays that have none."""
    return tuple(x if _has_tangent(x) else None for x in xs)


def pass_on(shadow: Any) -> Any:
    """The shadow for the next step."""
    return None if shadow is None else _opaque(shadow)


def _has_tangent(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.custom_jvp
def _constant(array: Any) -> Any:
    """The array, without its first tangent."""
    return array


def _constant_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    del tangents
    return primals[0], SymbolicZero.from_primal_value(primals[0])


_constant.defjvp(_constant_jvp, symbolic_zeros=True)


@jax.custom_jvp
def _read(array: Any, shadow: Any, i: Any) -> Any:
    """Slice `i` of `array`, whose first derivative is taken through `shadow`."""
    del shadow
    return read_slice(array, i)


def _read_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    array, _, i = primals
    tangent = tangents[1]
    if isinstance(tangent, SymbolicZero):
        return read_slice(array, i), tangent
    return read_slice(array, i), plain_slice(tangent, i)


_read.defjvp(_read_jvp, symbolic_zeros=True)


@jax.custom_jvp
def _opaque(shadow: Any) -> Any:
    """The identity, which `lax.scan` cannot see through.

    Seeing an unchanged carry, it would make a constant of the shadow.
    """
    return shadow


@_opaque.defjvp
def _opaque_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _opaque(*primals), tangents[0]


# --- reading late


def evaluate_reading(closed: compat.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr on inputs some of which are slices.

    A slice that a region takes is read inside the region, which then keeps its
    position and not its value. No barrier is put before the array it is read from:
    it may be all the weights of a model.
    """
    jaxpr = compat.open_jaxpr(closed)
    slices = {v for v, x in zip(jaxpr.invars, inputs, strict=True) if _is_slice(x)}
    if not any(_is_region(eqn) and slices & _operands(eqn) for eqn in jaxpr.eqns):
        return compat.evaluate(closed, list(map(_value, inputs)))
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    for eqn in jaxpr.eqns:
        run = _run_region if _is_region(eqn) else _run
        env.update(zip(eqn.outvars, run(eqn, env), strict=True))
    return [_value(_lookup(env, atom)) for atom in jaxpr.outvars]


def _run(eqn: jec.JaxprEqn, env: dict[Any, Any]) -> list[Any]:
    operands = list(dict.fromkeys(_operands(eqn)))
    program = single_equation(eqn, operands)
    return compat.evaluate(program, [_value(env[var]) for var in operands])


def _run_region(eqn: jec.JaxprEqn, env: dict[Any, Any]) -> Any:
    inside = compat.open_jaxpr(eqn.params["jaxpr"])
    body = new_closed_jaxpr(inside.invars, inside.outvars, inside.eqns)

    def region(*operands: Any) -> list[Any]:
        return compat.evaluate(body, list(map(_value, operands)))

    region.__name__ = compat.function_name(inside) or "region"
    given = [_lookup(env, atom) for atom in eqn.invars]
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, bool):
        prevent_cse = [prevent_cse] * len(given)
    barriers = [
        on and not _is_slice(x) for on, x in zip(prevent_cse, given, strict=True)
    ]
    checkpointed = jax.checkpoint(
        region,
        prevent_cse=tuple(barriers) if any(barriers) else False,
        policy=eqn.params["policy"],
    )
    with contextlib.ExitStack() as stack:
        for scope in compat.scopes(eqn):
            stack.enter_context(jax.named_scope(scope))
        return checkpointed(*given)


def _is_region(eqn: jec.JaxprEqn) -> bool:
    is_checkpoint = eqn.primitive.name in compat.REGION_PRIMITIVES
    return is_checkpoint and not eqn.params["differentiated"]


def _operands(eqn: jec.JaxprEqn) -> set[Any]:
    return {atom for atom in eqn.invars if not compat.is_literal(atom)}


def _lookup(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if compat.is_literal(atom) else env[atom]


def _is_slice(value: Any) -> bool:
    return isinstance(value, Slice)


def _value(value: Any) -> Any:
    return value.read() if isinstance(value, Slice) else value
