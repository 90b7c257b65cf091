"""The region: a piece of program under `jax.checkpoint`."""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._read_slice import is_read
from remat._regions._boundary import KeepAllButSlices, is_boundary
from remat._regions._emitted import emitted
from remat._regions._fingerprint import fingerprint
from remat._regions._sites import Site


class Region(Site):
    """A piece of program under `jax.checkpoint`, at one place in a function.

    A region that several calls reach is listed once for each; one inside a scan is
    listed once and its `times` says how often it runs.
    """

    __slots__ = ()

    @property
    def jaxpr(self) -> jec.Jaxpr:
        """The program of the region."""
        return compat.open_jaxpr(self.eqn.params["jaxpr"])

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy it has now; None recomputes everything."""
        return self.eqn.params["policy"]

    @property
    def prevent_cse(self) -> bool:
        """Whether any of its inputs is kept from common-subexpression elimination."""
        prevent = self.eqn.params["prevent_cse"]
        return prevent if isinstance(prevent, bool) else any(prevent)

    @property
    def n_equations(self) -> int:
        """Equations in it, those of nested programs included."""
        return _n_equations(self.jaxpr)

    @property
    def emitted_names(self) -> tuple[str, ...]:
        """The checkpoint names emitted in it when it is differentiated."""
        return emitted([self.jaxpr]).names

    @property
    def fingerprint(self) -> str:
        """Equal for regions of equal program, in every version of JAX."""
        return fingerprint(self.jaxpr)


def is_region(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is a region, other than a segment of `remat.scan`."""
    if eqn.primitive.name not in compat.REGION_PRIMITIVES:
        return False
    return not is_boundary(eqn.params["policy"])


def without_region(eqn: jec.JaxprEqn) -> jec.JaxprEqn | None:
    """What takes a region's place where it is to go: None for its body.

    What reads its part of stacked arrays (`remat._scan._split`) must not keep a copy of
    it, and stays one equation, which is no region to anyone.
    """
    if not any(map(is_read, compat.open_jaxpr(eqn.params["jaxpr"]).eqns)):
        return None
    return eqn.replace(params={**eqn.params, "policy": KeepAllButSlices()})


def _n_equations(jaxpr: jec.Jaxpr) -> int:
    inside = (sub for eqn in jaxpr.eqns for sub in compat.subjaxprs(eqn.params))
    return len(jaxpr.eqns) + sum(_n_equations(compat.open_jaxpr(j)) for j in inside)
