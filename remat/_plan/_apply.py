"""A loss whose regions keep what was chosen."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._naming._naming import keep, next_turn
from remat._plan._solve import Choice
from remat._regions._assign import check_some_reachable
from remat._regions._by_layer import by_layer
from remat._regions._custom_rules import hidden_sites
from remat._regions._region import Region, is_region, without_region
from remat._regions._rewrite import rewrite_equations
from remat._regions._split_layers import layers_of
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


Treatments = Mapping[int, Sequence[Treatment]]
"""By index of a region: one for all its layers, or one for each as they run."""
Treat = Callable[[Sequence[Region], Mapping[int, int]], Treatments]
"""From all regions, and how many layers those in scans that can be split stand for, to
what becomes of each; those not listed stay."""


def apply_treatments(fn: Callable[..., Any], treat: Treat) -> Callable[..., Any]:
    """The function with its regions treated as told; their scans split where need be.

    Args:
        fn: Any function that JAX can trace.
        treat: Called before anything is changed, so that it can refuse.
    """

    def decide(regions: Sequence[Region], program: compat.AnyJaxpr) -> list[Hashable]:
        check_some_reachable(regions or hidden_sites(program, is_region, Region))
        layers = {one.region.index: one.n_layers for one in layers_of(program)}
        treatments = treat(regions, layers)
        return [by_layer(treatments.get(region.index, [None])) for region in regions]

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
