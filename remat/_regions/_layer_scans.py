"""Which scans run layers: those that carry a value through their steps and change it.

A scan of one step is none: XLA takes it apart, and so it is looked into. Nor is one
that only adds to what it carries (microbatches, the chunks of a loss), or carries
nothing, as `jax.lax.map`.
"""

from collections.abc import Iterator

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat import _jax_compat as compat
from remat._regions._boundary import is_segment
from remat._regions._enclose import ENTERED, reads

_ADDS = frozenset({"add", "add_any", "convert_element_type"})


def runs_layers(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is a scan whose every step changes what the last one made."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return False
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    return any(
        _is_changed(body, body.invars[i], body.outvars[o])
        for i, o in _carries(eqn)
        if _is_inexact(body.invars[i])
    )


def outermost_layer_scans(jaxpr: compat.AnyJaxpr) -> Iterator[jec.JaxprEqn]:
    """The scans of a program whose steps are layers, and that stand in no other.

    Where there are none inside, a scan that only adds to what it carries is one too.
    Scans in regions and in derivative rules are left out.
    """
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if runs_layers(eqn) and not _runs_segments(eqn):
            yield eqn
            continue
        inside = [scan for sub in _entered(eqn) for scan in outermost_layer_scans(sub)]
        if not inside and _accumulates(eqn):
            yield eqn
        yield from inside


def all_scans(jaxpr: compat.AnyJaxpr) -> Iterator[jec.JaxprEqn]:
    """Every scan of a program, to tell what there is."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for sub in compat.subjaxprs(eqn.params):
            yield from all_scans(sub)


def _entered(eqn: jec.JaxprEqn) -> Iterator[compat.AnyJaxpr]:
    if eqn.primitive.name in ENTERED or _is_segment(eqn):
        yield from compat.subjaxprs(eqn.params)


def _carries(eqn: jec.JaxprEqn) -> list[tuple[int, int]]:
    binders = compat.scan_binders(eqn)
    return list(zip(binders.init, binders.carry_out, strict=True))


def _is_changed(body: jec.Jaxpr, before: jec.Var, after: object) -> bool:
    """Whether a step reads a carried value for more than to add to it."""
    summed = {before}
    for eqn in body.eqns:
        if not any(atom in summed for atom in reads([eqn])):
            continue
        if eqn.primitive.name not in _ADDS:
            return after is not before
        summed.update(eqn.outvars)
    return False


def _accumulates(eqn: jec.JaxprEqn) -> bool:
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return False
    if _runs_segments(eqn):
        return False
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    return any(
        body.outvars[o] is not body.invars[i] and _is_inexact(body.invars[i])
        for i, o in _carries(eqn)
    )


def _is_inexact(var: jec.Var) -> bool:
    dtype = getattr(var.aval, "dtype", jnp.dtype("int32"))
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(
        dtype, jnp.inexact
    )


def _runs_segments(eqn: jec.JaxprEqn) -> bool:
    return any(map(_is_segment, compat.open_jaxpr(eqn.params["jaxpr"]).eqns))


def _is_segment(eqn: jec.JaxprEqn) -> bool:
    is_checkpoint = eqn.primitive.name in compat.REGION_PRIMITIVES
    return is_checkpoint and is_segment(eqn.params["policy"])
