"""Decide how a traced scan is cut, and make the equation that takes its place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._scan._nest import Nest, ScanBody, segmented
from remat._scan._segments import (
    Lengths,
    Segments,
    SegmentsError,
    StepCosts,
    kept,
    lengths_for,
)
from remat._scan._sizes import Sizes
from remat.policies import Policy, as_policy, none

HOST_PRICE = 0.25
"""What a byte in host memory counts against one on the device, where "sqrt" weighs
kept carries against kept steps."""

ScanPolicy = Policy | str | Callable[..., Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    """How scans are to be cut, whatever the scan."""

    policy: ScanPolicy
    """A policy for the body, `none` for no region there, or None to decide by sizes."""
    segments: Segments
    """As `_segments.lengths_for` takes it."""
    max_saved: int | None
    """As `_segments.lengths_for` takes it."""
    offload_carry: bool
    """Whether carries into the outermost segments wait in host memory."""

    @staticmethod
    def of(
        policy: ScanPolicy,
        segments: Segments,
        max_saved: int | None,
        offload_carry: bool,
    ) -> "ScanOptions":
        """Check what can be checked before there is a scan.

        Raises:
            PolicyError: The policy is none.
            SegmentsError: `max_saved` is below 1.
        """
        if max_saved is not None and max_saved < 1:
            raise SegmentsError(f"max_saved is at least 1 carry, got {max_saved}")
        return ScanOptions(
            policy=None if policy is None else as_policy(policy),
            segments=segments,
            max_saved=max_saved,
            offload_carry=offload_carry,
        )

    @property
    def is_auto(self) -> bool:
        """Whether the sizes of a step decide if it is a region."""
        return self.policy is None

    @property
    def needs_sizes(self) -> bool:
        """Whether the lengths follow from the sizes of a step."""
        return self.segments == "sqrt"

    def lengths(self, n_steps: int, costs: StepCosts) -> Lengths:
        """The nest for a scan whose steps cost this much."""
        if self.offload_carry:
            costs = dataclasses.replace(costs, carry=costs.carry * HOST_PRICE)
        lengths = lengths_for(
            n_steps, self.segments, max_saved=self.max_saved, costs=costs
        )
        # What waits on the host is the input of a segment, if only of one step.
        return (n_steps, 1) if self.offload_carry and len(lengths) == 1 else lengths


def segmented_equation(
    eqn: jec.JaxprEqn,
    options: ScanOptions,
    is_worth_it: Callable[[Nest, Sizes], bool] | None = None,
) -> jec.JaxprEqn:
    """What takes the place of a `scan` equation: a call of the same scan, cut.

    Args:
        eqn: The equation.
        options: How to cut it.
        is_worth_it: Refuses a nest.

    Returns:
        The equation itself where the options ask for nothing else.
    """
    body = ScanBody.of(eqn)
    avals = [var.aval for var in eqn.invars]
    sizes = Sizes(body, avals)
    nest = choose_nest(body, options, sizes)
    if nest.is_plain or (is_worth_it and not is_worth_it(nest, sizes)):
        return eqn
    traced, _ = compat.trace(jax.jit(segmented(body, nest)), *avals)
    (call,) = compat.open_jaxpr(traced).eqns
    return call.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def choose_nest(body: ScanBody, options: ScanOptions, sizes: Sizes) -> Nest:
    """Into which segments a scan is cut, and whether its steps are regions.

    The rule for the default policy is as the docstring of `remat.scan` says.
    """
    plain = Nest(lengths=(body.length,))
    if body.length == 0:
        return plain
    region = dataclasses.replace(plain, is_region=True, policy=options.policy)
    if options.policy == none:
        return _cut(plain, options, sizes)
    if not options.is_auto or sizes.of(plain).inner > sizes.of(plain).carry:
        return _cut(region, options, sizes)
    nest = _cut(plain, options, sizes)
    is_least = kept_bytes(nest, sizes) <= _kept_by_scan_of_regions(nest, sizes)
    return nest if is_least else _cut(region, options, sizes)


def kept_bytes(nest: Nest, sizes: Sizes) -> float:
    """The most that a nest keeps at once."""
    n_steps = sizes.body.length
    return kept(n_steps, nest.lengths, sizes.of(nest).costs) if n_steps else 0.0


def _kept_by_scan_of_regions(nest: Nest, sizes: Sizes) -> float:
    step = sizes.of(nest)
    return sizes.body.length * step.carry + step.step


def _cut(nest: Nest, options: ScanOptions, sizes: Sizes) -> Nest:
    costs = sizes.of(nest).costs if options.needs_sizes else StepCosts()
    lengths = options.lengths(sizes.body.length, costs)
    return dataclasses.replace(
        nest, lengths=lengths, offload_carry=options.offload_carry
    )
