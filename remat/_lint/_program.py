"""A program as the lint rules see it: its regions, each with the policy it gets."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._cost._jaxpr import jaxpr_cost
from remat._finding import Finding, Severity
from remat._lint._flow import RegionFlow, region_flow
from remat._naming._naming import bind
from remat._regions._assign import Assignment, MissingNamesWarning, NoNamesFound
from remat._regions._nnx import recorded
from remat._regions._region import Region, is_region
from remat._regions._sites import survey_jaxpr
from remat._targets._target import Target
from remat.policies import Policy, PolicyMap, as_policy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Linted:
    """One region, and what becomes of it."""

    region: Region
    """Where it stands."""
    policy: Policy | None
    """What it gets; None recomputes everything, as JAX does."""
    as_written: bool
    """Whether that is the program's own choice, applied by JAX alone."""
    outer: "Linted | None"
    """The region around it."""
    flow: RegionFlow
    """What is kept and what runs again. An inner region's policy does not count."""

    def finding(
        self,
        code: str,
        severity: Severity,
        message: str,
        fix: str,
        source: str | None = None,
    ) -> Finding:
        """A finding about this region."""
        return Finding(
            code=code,
            severity=severity,
            message=message,
            fix=fix,
            where=self.region.path,
            source=source or self.region.source,
        )

    def primitive(self, position: int) -> str:
        """What one of its equations is; empty for a loop's hand-over of a value."""
        equation = self.flow.equation(position)
        return "" if equation.moves else equation.eqn.primitive.name

    def source(self, position: int) -> str | None:
        """The line of one of its equations."""
        return compat.source_line(self.flow.equation(position).eqn)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A traced program and the policy asked for."""

    jaxpr: jec.Jaxpr
    """The program."""
    policy: Policy | None
    """The policy asked for; None: each region its own."""
    regions: tuple[Linted, ...]
    """The regions that a policy can change."""
    target: Target | None
    """Where it is to run, if that was said."""

    @property
    def outermost(self) -> list[Linted]:
        """The regions that stand in no other."""
        return [linted for linted in self.regions if linted.outer is None]

    @property
    def flops(self) -> float:
        """Arithmetic of the forward pass."""
        return jaxpr_cost(self.jaxpr).flops


def program_of(
    fn: Callable[..., Any],
    policy: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target | None,
) -> Program:
    """Trace a function, and work out what its regions do under a policy."""
    with recorded(fn, args, kwargs) as recording:
        closed = recording.closed
    wanted = None if policy is None else as_policy(policy)
    sites = [s for s in survey_jaxpr(closed, is_region, Region).sites if s.reachable]
    return Program(
        jaxpr=compat.open_jaxpr(closed),
        policy=wanted,
        regions=tuple(_linted(sites, wanted)),
        target=target,
    )


def _linted(regions: Sequence[Region], wanted: Policy | None) -> list[Linted]:
    policies = _policies(regions, wanted)
    flows: dict[Any, RegionFlow | None] = {}
    found: list[Linted] = []
    around: list[Linted | None] = []
    for region, policy in zip(regions, policies, strict=True):
        outer = around[region.depth - 1] if region.depth else None
        by_region = policy is not None and "region_path" in policy.needs
        key = (id(region.eqn.params["jaxpr"]), policy, by_region and region.path)
        if key not in flows:
            flows[key] = _flow(region, policy)
        flow = flows[key]
        linted = flow and Linted(
            region=region,
            policy=policy,
            as_written=wanted is None,
            outer=outer,
            flow=flow,
        )
        around[region.depth :] = [linted]
        if linted:
            found.append(linted)
    return found


def _policies(
    regions: Sequence[Region], wanted: Policy | None
) -> Sequence[Policy | None]:
    own = [region.policy and as_policy(region.policy) for region in regions]
    if wanted is None or not regions:
        return own
    return [a or b for a, b in zip(_assigned(regions, wanted), own, strict=True)]


def _assigned(regions: Sequence[Region], wanted: Policy) -> Sequence[Policy | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingNamesWarning)  # the rules say it
        try:
            return Assignment.of(wanted).policies_of(regions)
        except NoNamesFound:
            if isinstance(wanted, PolicyMap):
                return [wanted.for_region(region.path) for region in regions]
            return [wanted] * len(regions)


def _flow(region: Region, policy: Policy | None) -> RegionFlow | None:
    if policy is not None and policy.needs_binding:
        return region_flow(*bind(policy, region.jaxpr, region_path=region.path))
    return region_flow(region.jaxpr, policy)
