"""The equation of a region, made of the equations that it is to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._equations import fresh_like, new_closed_jaxpr, unnamed


def region_equation(
    eqns: Sequence[jec.JaxprEqn],
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    prevent_cse: bool,
    n_frames: int = 0,
    function: Any = None,
) -> jec.JaxprEqn:
    """An equation of `jax.checkpoint` that computes what some equations compute.

    Args:
        eqns: The equations, in order.
        operands: The variables that they read and do not define.
        results: Those of the variables they define that others read.
        prevent_cse: As `jax.checkpoint` takes it.
        n_frames: How many frames of their name stacks the equations have in common;
            the region stands in those, the equations in it in the rest.
        function: A jaxpr of the function that they come from, for its name.
    """
    env: dict[Any, Any] = {var: jec.Var(var.aval) for var in operands}
    inside = []
    for eqn in eqns:
        outvars = [fresh_like(var) for var in eqn.outvars]
        new = eqn.replace(
            invars=[v if compat.is_literal(v) else env[v] for v in eqn.invars],
            outvars=outvars,
            source_info=_name_stack_part(eqn, slice(n_frames, None)),
        )
        env.update(zip(eqn.outvars, outvars, strict=True))
        inside.append(new.replace(effects=_moved(eqn.effects, env)))
    body = compat.open_jaxpr(
        new_closed_jaxpr([env[v] for v in operands], [env[v] for v in results], inside)
    )
    if function is not None:
        body = body.replace(debug_info=unnamed(compat.open_jaxpr(function).debug_info))
    # What happens to a reference that is made inside is no effect outside.
    body = body.replace(effects=_moved(body.effects, {v: v for v in body.invars}))
    outside = dict(zip(body.invars, operands, strict=True))
    params = dict(
        jaxpr=body, policy=None, prevent_cse=prevent_cse, differentiated=False
    )
    return eqns[0].replace(
        primitive=compat.remat_p,
        invars=list(operands),
        outvars=list(results),
        params=params,
        effects=_moved(body.effects, outside),
        source_info=_name_stack_part(eqns[0], slice(0, n_frames)),
    )


def _name_stack_part(eqn: jec.JaxprEqn, part: slice) -> Any:
    info = eqn.source_info
    return info.replace(name_stack=info.name_stack[part])


def _moved(effects: Any, env: Mapping[Any, Any]) -> Any:
    """Effects with the variables that they are about replaced; others are dropped."""
    moved = set()
    for effect in effects:
        about = getattr(effect, "input", None)
        if about is None:
            moved.add(effect)
        elif about in env:
            moved.add(effect.replace(input=env[about]))
    return moved
