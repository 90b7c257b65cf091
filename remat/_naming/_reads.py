"""Which equations of a region read one of its inputs, such as a weight.

A product with a weight reads an input of the region; the products of attention, and
whatever else is made of two activations, do not. Dimension numbers cannot tell: an
expert's product has batch dimensions as attention's have.

An input counts in another dtype or layout too. It is followed through calls, nested
regions, `scan` (not its carry, which is an input once only) and `cond`.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat

_SAME_VALUE = frozenset(
    """
    bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p
    dynamic_slice name reshape sharding_constraint slice squeeze
    stop_gradient transpose
    """.split()
)
"""Primitives whose result is their first operand, cast, moved or cut."""
_CALLS = compat.CALL_PRIMITIVES | compat.REGION_PRIMITIVES | {"shard_map"}


def reading_inputs(jaxpr: jec.Jaxpr) -> frozenset[int]:
    """The equations that read an input of the region.

    Args:
        jaxpr: The region's open jaxpr.

    Returns:
        The `id` of each such equation, those of inner jaxprs included.
    """
    found: set[int] = set()
    _follow(jaxpr, [True] * len(jaxpr.invars), found)
    return frozenset(found)


def _follow(jaxpr: jec.Jaxpr, given: Sequence[bool], found: set[int]) -> list[bool]:
    """Collects the equations that read an input; says which results are inputs."""
    inputs = {
        var for var, is_input in zip(jaxpr.invars, given, strict=True) if is_input
    }
    for eqn in jaxpr.eqns:
        reads = [_is_in(atom, inputs) for atom in eqn.invars]
        if any(reads):
            found.add(id(eqn))
            passed_on = _passed_on(eqn, reads, found)
            inputs.update(v for v, p in zip(eqn.outvars, passed_on, strict=True) if p)
    return [_is_in(atom, inputs) for atom in jaxpr.outvars]


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not compat.is_literal(atom) and atom in variables


def _passed_on(
    eqn: jec.JaxprEqn, reads: Sequence[bool], found: set[int]
) -> Sequence[bool]:
    """Which results of an equation are inputs of the region themselves."""
    primitive = eqn.primitive.name
    none = [False] * len(eqn.outvars)
    if primitive in _SAME_VALUE:
        return [reads[0]] * len(eqn.outvars)
    inner = [compat.open_jaxpr(jaxpr) for jaxpr in compat.subjaxprs(eqn.params)]
    if primitive in _CALLS:
        return _follow(inner[0], reads, found)
    if primitive == "scan":
        carried = compat.scan_binders(eqn).init
        _follow(inner[0], [r and i not in carried for i, r in enumerate(reads)], found)
    if primitive == "cond":
        for branch in inner:
            _follow(branch, reads[1:], found)
    return none
