"""What a traced step moves to host memory, before XLA touched it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from remat._jax_compat import is_literal, open_jaxpr, source_line, subjaxprs


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """One value that a traced step puts into host memory."""

    name: str
    """Its checkpoint name; empty where it has none."""
    source: str | None
    """The line that names it, `model.py:12`."""
    offloaded_bytes: int
    """Its bytes over all runs of the loops around it. Global size."""
    n_loops: int
    """Scans around it."""


def expected_offload(closed_jaxpr: Any) -> tuple[Offload, ...]:
    """Finds what a traced step moves to the host.

    Args:
        closed_jaxpr: As `jax.make_jaxpr` gives.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layer = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ x)),
        ...                        policy=remat.policies.offload_dots)
        >>> step = jax.grad(lambda x: layer(x).sum())
        >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> [one.offloaded_bytes for one in expected_offload(jax.make_jaxpr(step)(x))]
        [64]
    """
    return tuple(_found(open_jaxpr(closed_jaxpr), 1, 0))


def _found(jaxpr: Any, times: int, n_loops: int) -> Iterator[Offload]:
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "device_put":
            for operand, var in zip(eqn.invars, eqn.outvars, strict=True):
                if _is_on_host(var.aval):
                    maker = None if is_literal(operand) else made.get(operand)
                    yield _offload(maker, var.aval, times, n_loops)
            continue
        is_scan = name == "scan"
        n = times * (eqn.params["length"] if is_scan else 1)
        for sub in subjaxprs(eqn.params):
            yield from _found(open_jaxpr(sub), n, n_loops + is_scan)


def _offload(maker: Any, aval: Any, times: int, n_loops: int) -> Offload:
    named = maker if maker is not None and maker.primitive.name == "name" else None
    return Offload(
        name=named.params["name"] if named else "",
        source=source_line(maker) if maker is not None else None,
        offloaded_bytes=times * int(np.prod(aval.shape)) * aval.dtype.itemsize,
        n_loops=n_loops,
    )


def _is_on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host
