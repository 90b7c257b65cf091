"""Whether checkpoint names alone can say what a plan keeps of a region."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat import _jax_compat as compat
from remat import policies
from remat._cost._cost import jaxpr_cost
from remat._naming._naming import keep
from remat._naming._settle import is_inexact
from remat._plan._apply import Table


def policy_by_name(saved: Sequence[str], offloaded: Sequence[str]) -> policies.Policy:
    """The policy that keeps the values with these checkpoint names."""
    if not saved and not offloaded:
        return policies.get("nothing")
    return policies.save_and_offload_names(saved, offloaded)


def names_suffice(jaxpr: jec.Jaxpr, table: Table, policy: policies.Policy) -> bool:
    """Whether a policy by names does for a region what a table of ids does.

    A name does not stand for all that it seems to: the backward pass may read the
    value from before it was named. So both gradients are traced and their work counted.

    Args:
        jaxpr: The region's open jaxpr.
        table: What is to be kept.
        policy: The policy by names.
    """
    marked, keep_marked = keep(jaxpr, dict(table))
    return _work(jaxpr, policy) == _work(marked, keep_marked)


def _work(jaxpr: jec.Jaxpr, policy: Callable[..., Any]) -> float:
    """FLOPs of a region's value and gradient under a policy."""
    avals = [var.aval for var in jaxpr.invars]
    varying = [i for i, aval in enumerate(avals) if is_inexact(aval)]
    closed = compat.ClosedJaxpr(jaxpr, ())
    region = jax.checkpoint(lambda *flat: compat.evaluate(closed, flat), policy=policy)

    def total(*flat: Any) -> Any:
        results = [y for y in region(*flat) if is_inexact(y.aval)]
        return sum(jnp.sum(y.astype(jnp.float32)) for y in results)

    traced, _ = compat.trace(jax.grad(total, varying), *avals)
    return jaxpr_cost(traced).flops
