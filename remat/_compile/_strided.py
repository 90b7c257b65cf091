"""Offloads that abort the TPU compiler, found before it sees them.

For v2, v3 and v4 libtpu copies to the host only what lies in one piece. A row of a
stack of vectors does not: of each tile of eight rows it is one. There libtpu ends the
process ("Strided host DMA (non iova) is not supported"; seen with 0.0.50, where v5e,
v5p and v6e compile the same programs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from remat import _jax_compat as compat
from remat._compile._errors import CompileError
from remat._targets._target import Target

CHIPS = frozenset({"v2", "v3", "v4"})


def refuse_strided_offload(jaxpr: Any, target: Target) -> None:
    """Raises where a program would end the process that compiles it.

    Raises:
        CompileError: A scan offloads a vector in each step, for one of these chips.
    """
    if target.chip not in CHIPS:
        return
    found = list(dict.fromkeys(_strided(compat.open_jaxpr(jaxpr), in_scan=False)))
    if found:
        raise CompileError(
            f"libtpu cannot offload vectors out of a scan for {target.name}, and would "
            f"end this process: {', '.join(found[:3])}. Save or recompute them, or "
            "give them a second dimension of more than 1; v5e and newer can."
        )


def _strided(jaxpr: Any, *, in_scan: bool) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put" and in_scan:
            avals = [var.aval for var in eqn.outvars]
            yield from (_described(eqn, a) for a in avals if _is_vector_on_host(a))
        inside = in_scan or eqn.primitive.name in ("scan", "while")
        for sub in compat.subjaxprs(eqn.params):
            yield from _strided(compat.open_jaxpr(sub), in_scan=inside)


def _is_vector_on_host(aval: Any) -> bool:
    on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    return on_host and sum(n > 1 for n in aval.shape) == 1


def _described(eqn: Any, aval: Any) -> str:
    where = compat.source_line(eqn)
    return f"{aval.dtype}{list(aval.shape)}" + (f" at {where}" if where else "")
