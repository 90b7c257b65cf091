"""Decide how a traced scan is cut, and make the equation that takes its place."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._nest import Nest, ScanBody, segmented
from remat._scan_sizes import StepSizes, step_sizes
from remat._segments import Lengths, Segments, SegmentsError, kept, lengths_for
from remat.policies import Policy, as_policy

AUTO = "auto"
"""The default policy: make a region of the body where that is needed."""

ScanPolicy = Policy | str | Callable[..., Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    """How scans are to be cut, whatever the scan."""

    policy: ScanPolicy
    """A policy for the body, None for no region there, or `AUTO`."""
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
        is_policy = not (policy is None or policy is AUTO or policy == AUTO)
        return ScanOptions(
            policy=as_policy(policy) if is_policy else policy,
            segments=segments,
            max_saved=max_saved,
            offload_carry=offload_carry,
        )

    def lengths(self, n_steps: int, sizes: StepSizes) -> Lengths:
        """The nest for a scan whose steps have these sizes."""
        lengths = lengths_for(
            n_steps, self.segments, max_saved=self.max_saved, costs=sizes.costs
        )
        # What waits on the host is the input of a segment, if only of one step.
        return (n_steps, 1) if self.offload_carry and len(lengths) == 1 else lengths


def segmented_equation(eqn: jec.JaxprEqn, options: ScanOptions) -> jec.JaxprEqn:
    """What takes the place of a `scan` equation: a call of the same scan, cut.

    Returns:
        The equation itself where the options ask for nothing else.
    """
    body = ScanBody.of(eqn)
    avals = [var.aval for var in eqn.invars]
    nest = choose_nest(body, avals, options)
    if nest.is_plain:
        return eqn
    traced, _ = compat.trace(jax.jit(segmented(body, nest)), *avals)
    (call,) = compat.open_jaxpr(traced).eqns
    return call.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def choose_nest(body: ScanBody, avals: Sequence[Any], options: ScanOptions) -> Nest:
    """Into which segments a scan is cut, and whether its steps are regions."""
    if body.length == 0:
        return Nest(lengths=(0,))
    plain = Nest(lengths=(body.length,))
    if isinstance(options.policy, str):
        return _choose_region(body, avals, options, plain)
    if options.policy is not None:
        plain = dataclasses.replace(plain, is_region=True, policy=options.policy)
    return _cut(plain, options, step_sizes(body, avals, plain))


def _choose_region(
    body: ScanBody, avals: Sequence[Any], options: ScanOptions, plain: Nest
) -> Nest:
    """The rule for the default policy, as the docstring of `remat.scan` has it."""
    sizes = step_sizes(body, avals, plain)
    region = dataclasses.replace(plain, is_region=True)
    if sizes.inner <= sizes.carry:
        nest = _cut(plain, options, sizes)
        region_scan = body.length * sizes.carry + sizes.step
        if kept(body.length, nest.lengths, sizes.costs) <= region_scan:
            return nest
    return _cut(region, options, step_sizes(body, avals, region))


def _cut(nest: Nest, options: ScanOptions, sizes: StepSizes) -> Nest:
    return dataclasses.replace(
        nest,
        lengths=options.lengths(sum(nest.lengths), sizes),
        offload_carry=options.offload_carry,
    )
