"""Whether a region needs a barrier against common-subexpression elimination.

Where the forward pass and the recomputation stand in one computation, XLA sees that
they are the same and keeps the values instead of computing them again: the region is
undone. A loop that stays one keeps them apart (the forward pass is in one loop, the
recomputation in another), and a barrier there only stands in the way of fusion.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from remat._regions._region import Region


def needs_barriers(regions: Sequence[Region]) -> list[bool]:
    """Whether each region of a program needs a barrier, by where it runs.

    It does unless it is in the body of a rolled scan of more than one step; and, in
    another region, unless that scan is in it too: the outer region's recomputation
    runs the inner one's forward pass next to its backward pass.

    Args:
        regions: All regions, in program order, an outer one before those inside it.
    """
    around: list[Region] = []
    needed = []
    for region in regions:
        del around[region.depth :]
        outer = around[-1] if around else None
        shares_loop = outer is not None and outer.times == region.times
        needed.append(region.context != "scan" or shares_loop)
        around.append(region)
    return needed


def with_barrier(eqn: jec.JaxprEqn, needed: bool) -> dict[str, Any]:
    """A region's parameters with the barrier it needs.

    One that spares some operands stays so: those are stacked weights.
    """
    before = eqn.params["prevent_cse"]
    spares_some = not isinstance(before, bool) and any(before)
    barrier = before if needed and spares_some else needed
    return {**eqn.params, "prevent_cse": barrier}
