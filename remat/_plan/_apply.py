"""A loss whose regions keep what was chosen."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._naming._naming import keep, next_turn
from remat._plan._solve import Choice
from remat._regions._assign import check_some_reachable
from remat._regions._custom_rules import hidden_sites
from remat._regions._region import Region, is_region, without_region
from remat._regions._rewrite import rewrite_equations
from remat.policies import Decision

Table = tuple[tuple[str, Decision], ...]
"""What is kept of a region: ids and what becomes of them, in order of the ids."""
Treatment = Table | Literal["remove"] | None
"""A table; "remove" for no region at all; None to leave it as it is."""


def table_of(choice: Choice) -> Table:
    """A choice as a table."""
    kept = {id_: Decision.SAVE for id_ in choice.saved}
    kept |= {id_: Decision.OFFLOAD for id_ in choice.offloaded}
    return tuple(sorted(kept.items()))


def apply_treatments(
    fn: Callable[..., Any],
    treat: Callable[[Sequence[Region]], Mapping[int, Treatment]],
) -> Callable[..., Any]:
    """The function with its regions treated as told.

    Args:
        fn: Any function that JAX can trace.
        treat: From all regions to what becomes of each, by index; those not listed
            stay. Called before anything is changed, so that it can refuse.
    """

    def decide(regions: Sequence[Region], program: compat.AnyJaxpr) -> list[Treatment]:
        check_some_reachable(regions or hidden_sites(program, is_region, Region))
        treatments = treat(regions)
        return [treatments.get(region.index) for region in regions]

    return rewrite_equations(
        fn, select=is_region, decide=decide, edit=_edit, make_site=Region
    )


def _edit(
    region: Region, eqn: jec.JaxprEqn, treatment: Treatment
) -> jec.JaxprEqn | None:
    if treatment is None:
        return eqn
    if treatment == "remove":
        return without_region(eqn)
    jaxpr, policy = keep(
        eqn.params["jaxpr"], dict(treatment), turn=next_turn(region.policy)
    )
    return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "policy": policy})
