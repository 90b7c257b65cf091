"""Make the backward pass read the named value, whatever the derivative rule reads.

A checkpoint name is a copy: `v = name[x](v_)`. The rule of the equation that made
`v_` knows nothing of the copy. `tanh`'s reads its own result, `top_k`'s its own
indices, a flash kernel's (a `custom_vjp`) its own statistics, so that keeping `v` keeps
a twin of what the backward pass reads, and the equation runs again all the same.

Here the equation gets another rule: the same one, traced, with the names put inside
it. What it reads is then the named value itself. The equation becomes a
`custom_jvp_call`, which JAX takes apart again where it differentiates; programs and
numbers stay what they were. One mechanism serves primitives, `custom_jvp` and
`custom_vjp` functions, of whose code nothing needs to change.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat import _jax_compat as compat
from remat._jaxprs._custom_jvp import custom_jvp_equation
from remat._jaxprs._equations import single_equation, variables, with_outvars
from remat._regions._rewrite import inline

READS_ONLY_OPERANDS = frozenset(
    "abs add all_gather all_to_all and broadcast_in_dim clamp concatenate "
    "conv_general_dilated convert_element_type copy copy_p cos cumsum div dot_general "
    "dynamic_slice dynamic_update_slice eq expand_dims gather ge gt imag integer_pow "
    "iota le log log1p lt mul name ne neg not optimization_barrier or pad ppermute "
    "psum psum_invariant pvary ragged_dot ragged_dot_general real reduce_and "
    "reduce_or reduce_precision reduce_scatter reduce_sum rem reshape rev "
    "scatter-add scatter_add select_n sharding_constraint sign sin slice split "
    "square squeeze stop_gradient sub transpose xor".split()
)
"""Primitives whose rules read operands alone (0.10 - 0.12): naming is enough there.
One that is missing costs a little tracing; none that reads its result may stand
here."""

NameResult = Callable[[int], str | None]
"""From the position of a result to the checkpoint name it gets, if any."""
NameInner = Callable[[jec.JaxprEqn, int], str | None]
"""From an equation inside a rule and a result of it to its name, if any."""


def needs_settling(eqn: jec.JaxprEqn) -> bool:
    """Whether the derivative rule of an equation may read what the rule computes."""
    return (
        eqn.primitive.name not in READS_ONLY_OPERANDS
        and not eqn.effects
        and any(is_inexact(atom.aval) for atom in eqn.invars)
        and any(is_inexact(var.aval) for var in eqn.outvars)
    )


def is_inexact(aval: Any) -> bool:
    """Whether values of this type have derivatives."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def settle(
    eqn: jec.JaxprEqn, name_result: NameResult, name_inner: NameInner | None = None
) -> jec.JaxprEqn:
    """The equation with names inside its derivative rule.

    Args:
        eqn: An equation without effects that is no call and no loop.
        name_result: The name of each result.
        name_inner: The name of each other value that the rule computes from the
            operands alone, such as what a `custom_vjp` keeps for its backward pass.
            Asked when JAX differentiates.
    """
    operands = variables(eqn)
    body = single_equation(eqn, operands)

    @functools.cache
    def rule(*zeros: bool) -> tuple[jec.Jaxpr, Sequence[Any], list[bool]]:
        traced = _trace_rule(body, zeros)
        n_results = len(eqn.outvars)
        depends = _depends(traced.jaxpr, n_operands=len(operands))
        zero = [
            compat.is_literal(atom) or atom not in depends or not is_inexact(atom.aval)
            for atom in traced.jaxpr.outvars[n_results:]
        ]
        named = _name_known(traced.jaxpr, depends, n_results, name_result, name_inner)
        tangents = [
            atom
            for atom, is_zero in zip(named.outvars[n_results:], zero, strict=True)
            if not is_zero
        ]
        named = with_outvars(named, [*named.outvars[:n_results], *tangents])
        return named, traced.consts, zero

    settled = custom_jvp_equation(eqn, body, rule)
    return settled.replace(invars=operands)


def _trace_rule(body: Any, zeros: Sequence[bool]) -> Any:
    """From the operands and their nonzero tangents to results and tangents."""
    avals = [var.aval for var in compat.open_jaxpr(body).invars]
    varying = [i for i, zero in enumerate(zeros) if not zero]
    differentiated = [i for i in varying if is_inexact(avals[i])]

    def both(primals: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        tangent_of = dict(zip(varying, tangents, strict=True))

        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(differentiated, inputs, strict=True))
            return compat.evaluate(
                body, [given.get(i, p) for i, p in enumerate(primals)]
            )

        return jax.jvp(
            function,
            [primals[i] for i in differentiated],
            [tangent_of[i] for i in differentiated],
        )

    tangents = [avals[i].to_tangent_aval() for i in varying]
    traced = compat.trace(both, avals, tangents)[0]
    opened = _open_mixed_calls(compat.open_jaxpr(traced), n_operands=len(avals))
    return compat.with_open(traced, opened)


def _open_mixed_calls(jaxpr: jec.Jaxpr, n_operands: int) -> jec.Jaxpr:
    """Put calls that compute results and tangents alike in line, to tell them apart."""
    while True:
        depends = _depends(jaxpr, n_operands)
        mixed = next((eqn for eqn in jaxpr.eqns if _is_mixed(eqn, depends)), None)
        if mixed is None:
            return jaxpr
        at = jaxpr.eqns.index(mixed)
        body, results = inline(mixed)
        env = dict(zip(mixed.outvars, results, strict=True))
        rest = [_substitute(eqn, env) for eqn in jaxpr.eqns[at + 1 :]]
        outvars = [_read(atom, env) for atom in jaxpr.outvars]
        jaxpr = jaxpr.replace(eqns=[*jaxpr.eqns[:at], *body, *rest], outvars=outvars)


def _substitute(eqn: jec.JaxprEqn, env: dict[jec.Var, Any]) -> jec.JaxprEqn:
    return eqn.replace(invars=[_read(atom, env) for atom in eqn.invars])


def _read(atom: Any, env: dict[jec.Var, Any]) -> Any:
    return atom if compat.is_literal(atom) else env.get(atom, atom)


def _is_mixed(eqn: jec.JaxprEqn, depends: frozenset[jec.Var]) -> bool:
    if eqn.primitive.name not in compat.CALL_PRIMITIVES:
        return False
    if not any(var in depends for var in eqn.outvars):
        return False
    called = next(compat.subjaxprs(eqn.params))
    return len(called.eqns) > 0 and not getattr(called, "consts", ())


def _depends(jaxpr: jec.Jaxpr, n_operands: int) -> frozenset[jec.Var]:
    """The variables that depend on a tangent."""
    depends = set(jaxpr.invars[n_operands:])
    for eqn in jaxpr.eqns:
        if any(not compat.is_literal(v) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    return frozenset(depends)


def _name_known(
    jaxpr: jec.Jaxpr,
    depends: frozenset[jec.Var],
    n_results: int,
    name_result: NameResult,
    name_inner: NameInner | None,
) -> jec.Jaxpr:
    """Name what a traced rule computes from the operands alone."""
    inputs = set(jaxpr.invars)
    result_names: dict[Any, str] = {}
    for position, atom in enumerate(jaxpr.outvars[:n_results]):
        name = None if compat.is_literal(atom) else name_result(position)
        if name is not None and atom not in inputs:
            result_names.setdefault(atom, name)

    def name_of(eqn: jec.JaxprEqn, position: int) -> str | None:
        var = eqn.outvars[position]
        if var in depends or compat.is_dropped(var):
            return None
        if var in result_names:
            return result_names[var]
        return name_inner(eqn, position) if name_inner else None

    equations: list[jec.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        names = [name_of(eqn, position) for position in range(len(eqn.outvars))]
        equations.extend(name_outputs(eqn, names))
    return jaxpr.replace(eqns=equations)


def name_outputs(eqn: jec.JaxprEqn, names: Sequence[str | None]) -> list[jec.JaxprEqn]:
    """The equation, followed by one `name` equation for each result with a name."""
    outvars, naming = list(eqn.outvars), []
    for position, name in enumerate(names):
        if name is None:
            continue
        var = eqn.outvars[position]
        outvars[position] = jec.Var(var.aval)
        naming.append(
            jec.new_jaxpr_eqn(
                [outvars[position]],
                [var],
                compat.name_p,
                dict(name=name),
                set(),
                eqn.source_info,
            )
        )
    return [eqn.replace(outvars=outvars), *naming] if naming else [eqn]
