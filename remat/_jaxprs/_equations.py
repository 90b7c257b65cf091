"""Make equations, and programs of some equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat


def fresh_like(var: Any) -> Any:
    """A new variable of the same type as `var` (a dropped one stays dropped)."""
    return jec.DropVar(var.aval) if compat.is_dropped(var) else jec.Var(var.aval)


def variables(eqn: jec.JaxprEqn) -> list[Any]:
    """The variables among an equation's operands, each once."""
    return list(dict.fromkeys(v for v in eqn.invars if not compat.is_literal(v)))


def single_equation(eqn: jec.JaxprEqn, operands: Sequence[jec.Var]) -> Any:
    """A closed program of one equation, from `operands` to its results."""
    invars = [jec.Var(var.aval) for var in operands]
    inside: dict[Any, Any] = dict(zip(operands, invars, strict=True))
    results = [jec.Var(var.aval) for var in eqn.outvars]
    info = eqn.source_info
    body = eqn.replace(
        invars=[v if compat.is_literal(v) else inside[v] for v in eqn.invars],
        outvars=results,
        # The equation that holds the program is in these scopes already.
        source_info=info.replace(name_stack=type(info.name_stack)()),
    )
    return new_closed_jaxpr(invars, results, [body])


def new_closed_jaxpr(
    invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[jec.JaxprEqn]
) -> Any:
    """A closed jaxpr without constants."""
    template = jax.make_jaxpr(lambda: ())()
    effects = set().union(*(eqn.effects for eqn in eqns)) if eqns else set()
    new = compat.open_jaxpr(template).replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=unnamed(compat.open_jaxpr(template).debug_info),
    )
    return compat.with_open(template, new)


def with_outvars(jaxpr: jec.Jaxpr, outvars: Sequence[Any]) -> jec.Jaxpr:
    """The jaxpr with other results."""
    return jaxpr.replace(outvars=list(outvars), debug_info=unnamed(jaxpr.debug_info))


def unnamed(debug_info: Any) -> Any:
    """The same without the names of arguments and results: JAX checks their number."""
    return debug_info.with_unknown_names()


def under_name_stack(inner: jec.JaxprEqn, outer: jec.JaxprEqn) -> Any:
    """The source info of `inner` when it takes the place of `outer`."""
    name_stack = outer.source_info.name_stack + inner.source_info.name_stack
    return inner.source_info.replace(name_stack=name_stack)


def in_scope(eqn: jec.JaxprEqn, scope: str) -> jec.JaxprEqn:
    """The equation under one more `jax.named_scope`, its innermost."""
    info = eqn.source_info
    info = info.replace(name_stack=info.name_stack.extend(scope))
    return eqn.replace(source_info=info)
