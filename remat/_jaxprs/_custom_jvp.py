"""Equations of `jax.custom_jvp` functions, their rules read and replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import custom_jvp_call_p

from remat import _jax_compat as compat


class CustomRule:
    """A derivative rule in the form that a `custom_jvp_call` equation holds one.

    JAX keeps a lifted Python function there, of which it uses these two members.
    """

    def __init__(self, rule: Callable[..., Any], debug_info: Any):
        self.call_wrapped = rule
        self.debug_info = debug_info


def is_custom_jvp(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation calls a `jax.custom_jvp` function."""
    return eqn.primitive is custom_jvp_call_p


def with_mapped_rule(
    params: Mapping[str, Any], fn: Callable[[jec.Jaxpr], jec.Jaxpr]
) -> dict[str, Any]:
    """A `custom_jvp_call`'s parameters with `fn` applied to its rule's jaxpr.

    JAX traces the rule when it differentiates, and `fn` is called then.
    """
    rule = params["jvp_jaxpr_fun"]

    @functools.cache
    def mapped(*zeros: bool) -> tuple[jec.Jaxpr, Sequence[Any], list[bool]]:
        with compat.remat3_off():
            jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        return fn(jaxpr), consts, out_zeros

    return {**params, "jvp_jaxpr_fun": CustomRule(mapped, rule.debug_info)}


def custom_jvp_equation(
    eqn: jec.JaxprEqn,
    body: ClosedJaxpr,
    rule: Callable[..., tuple[jec.Jaxpr, Sequence[Any], list[bool]]],
) -> jec.JaxprEqn:
    """An equation that computes `body` and is differentiated by `rule`.

    Args:
        eqn: The equation to replace; operands, results and source are kept.
        body: From the operands to the results.
        rule: Called with one bool per operand (whether its tangent is zero), it
            returns an open jaxpr from the operands and the other tangents to the
            results and their tangents, its constants, and one bool per result
            (whether its tangent is zero, and left out).
    """
    params = dict(
        call_jaxpr=body,
        jvp_jaxpr_fun=CustomRule(rule, compat.open_jaxpr(body).debug_info),
        num_consts=0,
        symbolic_zeros=True,
    )
    return eqn.replace(primitive=custom_jvp_call_p, params=params)
