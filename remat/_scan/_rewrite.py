"""Decide how a traced scan is cut, and make the equation that takes its place."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._scan._nest import Nest, ScanBody, segmented
from remat._scan._segments import Lengths, Segments, SegmentsError, kept, lengths_for
from remat._scan._sizes import StepSizes, step_sizes
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

    def lengths(self, n_steps: int, sizes: StepSizes) -> Lengths:
        """The nest for a scan whose steps have these sizes."""
        costs = sizes.costs
        if self.offload_carry:
            costs = dataclasses.replace(costs, carry=costs.carry * HOST_PRICE)
        lengths = lengths_for(
            n_steps, self.segments, max_saved=self.max_saved, costs=costs
        )
        # What waits on the host is the input of a segment, if only of one step.
        return (n_steps, 1) if self.offload_carry and len(lengths) == 1 else lengths


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a scan is to be run, and what that is good for."""

    nest: Nest
    saved_bytes: float = 0.0
    """How much less is kept than by the scan as it stands."""
    failure: str | None = None
    """Why that is not known, where it is not."""


def segmented_equation(
    eqn: jec.JaxprEqn,
    options: ScanOptions,
    is_worth_it: Callable[[Choice], bool] = lambda choice: True,
) -> jec.JaxprEqn:
    """What takes the place of a `scan` equation: a call of the same scan, cut.

    Args:
        eqn: The equation.
        options: How to cut it.
        is_worth_it: Refuses a choice.

    Returns:
        The equation itself where the options ask for nothing else.
    """
    body = ScanBody.of(eqn)
    avals = [var.aval for var in eqn.invars]
    choice = choose_nest(body, avals, options)
    if choice.nest.is_plain or not is_worth_it(choice):
        return eqn
    traced, _ = compat.trace(jax.jit(segmented(body, choice.nest)), *avals)
    (call,) = compat.open_jaxpr(traced).eqns
    return call.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def choose_nest(body: ScanBody, avals: Sequence[Any], options: ScanOptions) -> Choice:
    """Into which segments a scan is cut, and whether its steps are regions."""
    plain = Nest(lengths=(body.length,))
    if body.length == 0:
        return Choice(nest=plain)
    as_is = step_sizes(body, avals, plain)
    chosen = _without_region(body.length, options, plain, as_is)
    sizes = as_is
    if chosen is None:
        region = dataclasses.replace(plain, is_region=True, policy=options.policy)
        sizes = step_sizes(body, avals, region)
        chosen = _cut(region, options, sizes)
    saved = body.length * as_is.step - kept(body.length, chosen.lengths, sizes.costs)
    return Choice(nest=chosen, saved_bytes=saved, failure=as_is.failure)


def _without_region(
    n_steps: int, options: ScanOptions, plain: Nest, sizes: StepSizes
) -> Nest | None:
    """The nest whose steps are no regions, where the policy has it so.

    The rule for the default policy is as the docstring of `remat.scan` says.
    """
    if options.policy == none:
        return _cut(plain, options, sizes)
    if not options.is_auto or sizes.inner > sizes.carry:
        return None
    nest = _cut(plain, options, sizes)
    scan_of_regions = n_steps * sizes.carry + sizes.step
    is_least = kept(n_steps, nest.lengths, sizes.costs) <= scan_of_regions
    return nest if is_least else None


def _cut(nest: Nest, options: ScanOptions, sizes: StepSizes) -> Nest:
    return dataclasses.replace(
        nest,
        lengths=options.lengths(sum(nest.lengths), sizes),
        offload_carry=options.offload_carry,
    )
