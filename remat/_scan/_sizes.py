"""What one step of a scan keeps for the backward pass, read from its jaxpr."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from remat import _jax_compat as compat
from remat._scan._nest import Nest, ScanBody, segmented
from remat._scan._segments import StepCosts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Bytes that one step adds to what a loop keeps."""

    carry: int
    """What of the carry the backward pass reads."""
    step: int
    """What a step keeps, as the body stands."""
    inner: int
    """The part of `step` that was made inside the body, without the position."""
    failure: str | None = None
    """Why nothing is known: what went wrong as the body was differentiated."""

    @property
    def costs(self) -> StepCosts:
        """In the unit of the arithmetic of segments; nothing there is free."""
        return StepCosts(carry=max(1.0, self.carry), step=max(1.0, self.step))


class Sizes:
    """The sizes of a scan's steps, measured as they are asked for."""

    def __init__(self, body: ScanBody, avals: Sequence[Any]) -> None:
        self.body = body
        self._avals = avals
        self._known: dict[tuple[bool, Any], StepSizes] = {}

    def of(self, nest: Nest) -> StepSizes:
        """Those of a step run as the nest says, whatever its lengths."""
        kind = (nest.is_region, nest.policy)
        if kind not in self._known:
            self._known[kind] = step_sizes(self.body, self._avals, nest)
        return self._known[kind]


_POSITION = 4
"""Bytes of the number that says which slice of xs to read."""


def step_sizes(body: ScanBody, avals: Sequence[Any], nest: Nest) -> StepSizes:
    """Measure a scan's step by differentiating four steps of it, on shapes alone.

    Everything that has a derivative is taken to be differentiated.

    Args:
        body: The traced scan.
        avals: The types of its operands.
        nest: Whether a step is a region, and its policy; lengths are not looked at.
    """
    four = dataclasses.replace(body, length=4, unroll=1)
    loop = dataclasses.replace(nest, lengths=(4,), offload_carry=False)
    cut = dataclasses.replace(loop, lengths=(2, 2))
    try:
        by_loop = list(_stacked(four, loop, avals))
        by_segments = list(_stacked(four, cut, avals))
    except Exception as error:  # A body without a derivative can still be run.
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return StepSizes(carry=0, step=0, inner=0, failure=why)
    return StepSizes(
        carry=sum(n for n, is_carry in by_segments if is_carry),
        step=sum(n for n, _ in by_loop),
        inner=sum(n for n, is_carry in by_loop if not (is_carry or n == _POSITION)),
    )


def _stacked(
    body: ScanBody, nest: Nest, avals: Sequence[Any]
) -> Iterator[tuple[int, bool]]:
    """Bytes a step of each stacked residual, and whether it is a carry as it came in.

    Residuals that are no stack do not grow with the number of steps.
    """

    def residuals(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(segmented(body, nest), *arrays)[1])

    jaxpr = compat.open_jaxpr(compat.trace(residuals, *avals)[0])
    kept = {var for var in jaxpr.outvars if not compat.is_literal(var)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        binders = compat.scan_binders(eqn)
        step = compat.open_jaxpr(eqn.params["jaxpr"])
        carry_in = {step.invars[i] for i in binders.init}
        for i in binders.ys:
            if eqn.outvars[i] in kept and not _on_host(eqn.outvars[i].aval):
                yield _nbytes(step.outvars[i].aval), step.outvars[i] in carry_in


def _on_host(aval: Any) -> bool:
    return aval.memory_space == jax.memory.Space.Host


def _nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape)) * aval.dtype.itemsize
