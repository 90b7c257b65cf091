"""What the derivative rules of `custom_jvp` and `custom_vjp` functions hold.

When such a function is differentiated, its rule runs and its own program does not.
The rule is Python, traced when JAX needs it; here it is traced to be read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from remat import _jax_compat as compat
from remat._jaxprs._custom_jvp import is_custom_jvp
from remat._jaxprs._equations import single_equation, variables
from remat._regions._sites import CUSTOM_VJP, Place, Select, Site, survey_jaxpr


def is_custom_rule(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is differentiated by a rule of its own."""
    return is_custom_jvp(eqn) or eqn.primitive.name in CUSTOM_VJP


def hidden_sites(
    closed: compat.AnyJaxpr,
    select: Select,
    make_site: Callable[..., Any] = Site,
    first_index: int = 0,
) -> tuple[Any, ...]:
    """The equations that only the rules of a `custom_vjp` reach.

    Args:
        closed: The program.
        select: Which equations are wanted.
        make_site: The class of site to make.
        first_index: The index of the first one.

    Returns:
        One site for each, not reachable. Where a rule cannot be traced by itself,
        those that the function holds.
    """
    calls = survey_jaxpr(closed, lambda eqn: eqn.primitive.name in CUSTOM_VJP).sites
    programs: dict[Any, jec.Jaxpr] = {}
    sites: list[Any] = []
    for call in calls:
        key = identity(call.eqn)
        if key not in programs:
            own = compat.open_jaxpr(next(compat.subjaxprs(call.eqn.params)))
            programs[key] = backward_program(call.eqn) or own
        place = Place(
            scopes=(call.path,),
            times=call.times,
            context=call.context,
            reachable=False,
        )
        survey = survey_jaxpr(
            programs[key],
            select,
            make_site,
            place=place,
            first_index=first_index + len(sites),
        )
        sites.extend(survey.sites)
    return tuple(sites)


def identity(eqn: jec.JaxprEqn) -> tuple[Any, ...]:
    """Equal for calls of one function on equal types, whose rules read the same."""
    function = next(compat.subjaxprs(eqn.params))
    types = tuple(str(atom.aval) for atom in eqn.invars)
    return compat.function_source(function), types


def forward_program(eqn: jec.JaxprEqn) -> jec.Jaxpr | None:
    """What runs in the forward pass when an equation with a rule is differentiated.

    None where the rule cannot be traced by itself.
    """

    def forward(function: Any, primals: Any, tangents: Any, _: Any) -> Any:
        return jax.jvp(function, primals, tangents)

    return _traced(eqn, forward)


def backward_program(eqn: jec.JaxprEqn) -> jec.Jaxpr | None:
    """What runs in both passes when an equation with a rule is differentiated.

    None where the rule cannot be traced by itself.
    """

    def both(function: Any, primals: Any, _: Any, cotangents: Any) -> Any:
        results, pull_back = jax.vjp(function, *primals)
        return results, pull_back(cotangents)

    return _traced(eqn, both)


def _traced(eqn: jec.JaxprEqn, differentiate: Callable[..., Any]) -> jec.Jaxpr | None:
    operands = variables(eqn)
    body = single_equation(eqn, operands)
    primals = [var.aval for var in operands]
    varying = [i for i, aval in enumerate(primals) if _is_inexact(aval)]
    tangents = [primals[i].to_tangent_aval() for i in varying]
    results: list[Any] = [var.aval for var in eqn.outvars]
    cotangents = [aval.to_tangent_aval() for aval in results if _is_inexact(aval)]

    def program(primals: list[Any], tangents: list[Any], cotangents: list[Any]) -> Any:
        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(varying, inputs, strict=True))
            flat = [given.get(i, primal) for i, primal in enumerate(primals)]
            return compat.evaluate(body, flat)

        fill = iter(cotangents)
        all_cotangents = [
            next(fill) if _is_inexact(aval) else np.zeros(aval.shape, jax.dtypes.float0)
            for aval in results
        ]
        inputs = [primals[i] for i in varying]
        return differentiate(function, inputs, tangents, all_cotangents)

    try:
        closed, _ = compat.trace(program, primals, tangents, cotangents)
    except Exception:
        # A rule may need a mesh axis of the shard_map around it, or refuse to be
        # differentiated by some operand: whatever it raises, it cannot be read.
        return None
    return compat.open_jaxpr(closed)


def _is_inexact(aval: Any) -> bool:
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)
