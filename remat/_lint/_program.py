"""A program as the lint rules see it: its regions, each with the policy it gets."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._cost._jaxpr import jaxpr_cost
from remat._finding import Finding, Severity
from remat._lint._flow import (
    Differentiated,
    RegionFlow,
    UnreadableRegion,
    differentiate,
)
from remat._naming._naming import KeepMarked, bind
from remat._regions._assign import Assignment, MissingNamesWarning, NoNamesFound
from remat._regions._errors import UnmatchedRuleWarning
from remat._regions._nnx import recorded
from remat._regions._region import Region, is_region
from remat._regions._sites import survey_jaxpr
from remat._regions._split_layers import split_layers
from remat._targets._target import Target
from remat.policies import Policy, PolicyError, PolicyMap, as_policy, none


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

    @property
    def is_removed(self) -> bool:
        """Whether its policy leaves no region there."""
        return self.policy == none

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
    unread: Mapping[str, str]
    """Why some regions could not be looked at, by path."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A traced function, to be looked at under any number of policies."""

    jaxpr: jec.Jaxpr
    """The program."""
    regions: tuple[Region, ...]
    """The regions that a policy can change."""
    differentiated: dict[int, Differentiated]
    """The known part of each region that was looked at, by the `id` of its jaxpr."""
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
    """The function and what it was traced with."""

    @staticmethod
    def of(
        fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "Traced":
        """Trace a function."""
        with recorded(fn, args, kwargs) as recording:
            closed = recording.closed
        sites = survey_jaxpr(closed, is_region, Region).sites
        return Traced(
            jaxpr=compat.open_jaxpr(closed),
            regions=tuple(site for site in sites if site.reachable),
            differentiated={},
            call=(fn, args, kwargs),
        )

    def under(self, policy: Any, target: Target | None = None) -> Program:
        """The program under a policy; None: each region its own."""
        wanted = None if policy is None else as_policy(policy)
        if wanted is not None and "layer" in wanted.needs:
            return self._split(wanted)._under(wanted, target)
        return self._under(wanted, target)

    def _split(self, wanted: Policy) -> "Traced":
        """The same function, the scans of which are split by layer."""
        fn, args, kwargs = self.call
        by_layer = Assignment.of(wanted).by_layer
        return Traced.of(split_layers(fn, by_layer), args, kwargs)

    def _under(self, wanted: Policy | None, target: Target | None) -> Program:
        unread: dict[str, str] = {}
        return Program(
            jaxpr=self.jaxpr,
            policy=wanted,
            regions=tuple(self._linted(wanted, unread)),
            unread=unread,
            target=target,
        )

    def _linted(self, wanted: Policy | None, unread: dict[str, str]) -> list[Linted]:
        policies = _policies(self.regions, wanted)
        flows: dict[Any, RegionFlow | None] = {}
        found: list[Linted] = []
        around: list[Linted | None] = []
        for region, policy in zip(self.regions, policies, strict=True):
            outer = around[region.depth - 1] if region.depth else None
            by_region = policy is not None and bool(
                policy.needs & {"region_path", "module_path"}
            )
            key = (id(region.eqn.params["jaxpr"]), policy, by_region and region.path)
            if key not in flows:
                flows[key] = None
                try:
                    flows[key] = self._flow(region, policy)
                except UnreadableRegion as error:
                    unread[region.path] = str(error)
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

    def _flow(self, region: Region, policy: Policy | None) -> RegionFlow:
        if policy is not None and policy.needs_binding:
            jaxpr, bound = bind(policy, region.jaxpr, region_path=region.path)
            return differentiate(jaxpr).under(bound)
        key = id(region.eqn.params["jaxpr"])
        if key not in self.differentiated:
            self.differentiated[key] = differentiate(region.jaxpr)
        return self.differentiated[key].under(policy)


def _policies(
    regions: Sequence[Region], wanted: Policy | None
) -> Sequence[Policy | None]:
    own = [_own(region) for region in regions]
    if wanted is None or not regions:
        return own
    return [a or b for a, b in zip(_assigned(regions, wanted), own, strict=True)]


def _own(region: Region) -> Policy | None:
    if not region.policy:
        return None
    try:
        policy = as_policy(region.policy)
    except PolicyError:  # a rule says what is wrong with it
        return None
    if isinstance(region.policy, KeepMarked):
        policy = policy.renamed(_BOUND, _BOUND, policy.description)
    return policy


_BOUND = "the bound policy"
"""What a policy is called that stands in the region's names."""


def _assigned(regions: Sequence[Region], wanted: Policy) -> Sequence[Policy | None]:
    with warnings.catch_warnings():
        for category in (MissingNamesWarning, UnmatchedRuleWarning):
            warnings.simplefilter("ignore", category)  # the rules say it
        try:
            return Assignment.of(wanted).policies_of(regions)
        except NoNamesFound:
            if isinstance(wanted, PolicyMap):
                return [wanted.for_region(region.path) for region in regions]
            return [wanted] * len(regions)
