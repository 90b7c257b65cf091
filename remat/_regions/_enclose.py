"""Make a region of some equations of a jaxpr, to stand in their place."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._region_equation import region_equation
from remat._regions._boundary import is_boundary

_CALLS = compat.CALL_PRIMITIVES | {"xla_metadata_call"}
ENTERED = frozenset({"scan", "cond", "shard_map"}) | _CALLS
"""Primitives whose programs JAX differentiates through, other than regions."""

_WORK = frozenset(
    "dot_general ragged_dot ragged_dot_general scaled_dot scaled_matmul_wrapper "
    "conv_general_dilated pallas_call custom_vjp_call custom_vjp_call_jaxpr "
    "ffi_call custom_call".split()
)
"""Primitives that a region is worth making for where another region holds the rest."""


def enclose(
    eqns: Sequence[jec.JaxprEqn],
    read_outside: Collection[Any],
    *,
    prevent_cse: bool,
    n_frames: int = 0,
    function: compat.AnyJaxpr | None = None,
) -> jec.JaxprEqn | None:
    """The region that computes what some equations of one jaxpr compute.

    Args:
        eqns: The equations, in order, with none between them that needs them.
        read_outside: Variables that others read, or that the program returns.
        prevent_cse: As `jax.checkpoint` takes it.
        n_frames: Frames of their name stacks that the region itself stands in.
        function: A jaxpr whose function's name is the region's.

    Returns:
        The equation; None where nothing reads what they compute.
    """
    made = {var: None for eqn in eqns for var in eqn.outvars}
    results = [v for v in made if v in read_outside and not compat.is_dropped(v)]
    if not results:
        return None
    return region_equation(
        eqns,
        list(dict.fromkeys(v for v in reads(eqns) if v not in made)),
        results,
        prevent_cse=prevent_cse,
        n_frames=n_frames,
        function=function,
    )


def reads(eqns: Sequence[jec.JaxprEqn]) -> Iterator[Any]:
    """The variables that equations read, as often as they do."""
    for eqn in eqns:
        yield from (atom for atom in eqn.invars if not compat.is_literal(atom))


def is_region_already(eqns: Sequence[jec.JaxprEqn]) -> bool:
    """Whether the equations' work is done in regions, so that one more adds nothing."""
    found = [_work(eqn) for eqn in eqns]
    return any(in_region for in_region, _ in found) and not any(w for _, w in found)


def holds_region(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is a region or holds one."""
    return _work(eqn)[0]


def works(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation does, in a region or not, what is worth a region."""
    return any(_work(eqn))


def _work(eqn: jec.JaxprEqn) -> tuple[bool, bool]:
    """Whether an equation is or holds a region, and whether it works outside of one."""
    if eqn.primitive.name in compat.REGION_PRIMITIVES:
        if not is_boundary(eqn.params["policy"]):
            return True, False
    elif eqn.primitive.name not in ENTERED:
        return False, eqn.primitive.name in _WORK
    found = [
        _work(inner)
        for sub in compat.subjaxprs(eqn.params)
        for inner in compat.open_jaxpr(sub).eqns
    ]
    return any(r for r, _ in found), any(w for _, w in found)
