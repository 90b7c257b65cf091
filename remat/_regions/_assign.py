"""Which policy each region gets, from what a user passed as `policy`."""

import collections
import dataclasses
import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from remat._regions._errors import MissingNamesWarning as MissingNamesWarning
from remat._regions._errors import NoNamesFound as NoNamesFound
from remat._regions._errors import RegionError, listed, near
from remat._regions._name_check import check_names
from remat._regions._place_check import check_places
from remat._regions._region import Region
from remat._regions._split_layers import Layers, Part
from remat.policies import Policy, PolicyMap, as_policy, none

HOW_TO_MAKE_A_REGION = (
    "Wrap a layer with jax.checkpoint, flax.linen.remat, flax.nnx.remat, "
    "equinox.filter_checkpoint or remat.remat to make one; the layer that a scan or "
    "a loop repeats is the usual place. Or make them from outside, by regions= or "
    '--regions: "scan", or a pattern of module paths such as "Block_*".'
)


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """Policies by region pattern; the first pattern that matches counts."""

    rules: tuple[tuple[str, Policy], ...]
    by_pattern: bool
    """Whether the user gave patterns, which must match and may leave regions out."""

    @staticmethod
    def of(policy: Any) -> "Assignment":
        """From a Policy, a name, a JAX callable, or a mapping of those by pattern.

        Raises:
            PolicyError: `policy` is None or something else that is not a policy.
        """
        policy = as_policy(policy)
        if isinstance(policy, PolicyMap):
            return Assignment(policy.by_pattern, by_pattern=True)
        return Assignment((("*", policy),), by_pattern=False)

    def policies_of(self, regions: Sequence[Region]) -> list[Policy | None]:
        """The policy that each region gets; None leaves it as it is.

        Raises:
            RegionError: there is no region, none can be changed, or a pattern
                matches none.
            NoNamesFound: a policy names only checkpoint names that are not emitted.
        """
        check_some_reachable(regions)
        reachable = [region for region in regions if region.reachable]
        if self.by_pattern:
            for pattern, _ in self.rules:
                _check_pattern(pattern, reachable)
        for policy in dict.fromkeys(policy for _, policy in self.rules):
            given = [r for r in reachable if self._rule(r) == policy]
            check_names(policy, given)
            check_places(policy, given)
        layers = _layers(reachable)
        chosen = [
            _for_layer(self._rule(region), region, layers.get(region.index))
            for region in regions
        ]
        return _bound_once(regions, chosen)

    @property
    def is_by_layer(self) -> bool:
        """Whether a policy among them chooses by layer."""
        return any("layer" in policy.needs for _, policy in self.rules)

    def by_layer(self, layers: Sequence[Layers]) -> dict[int, list[Policy]]:
        """The policy of each layer of the scans whose policy chooses by layer.

        A loop body may hold several layers: regions whose paths differ in numbers at
        most. They count in turn, step by step.
        """
        stacks: dict[Any, list[Layers]] = collections.defaultdict(list)
        for one in layers:
            if one.region.depth == 0:
                path = re.sub(r"\d+", "#", one.region.path)
                stacks[one.loop, path].append(one)
        chosen: dict[int, list[Policy]] = {}
        for stack in stacks.values():
            n = len(stack)
            for position, one in enumerate(stack):
                policy = self._rule(one.region)
                if policy is not None and "layer" in policy.needs:
                    chosen[one.region.index] = [
                        policy.for_layer(step * n + position, one.n_layers * n)
                        for step in range(one.n_layers)
                    ]
        return chosen

    def _rule(self, region: Region) -> Policy | None:
        for pattern, policy in self.rules:
            if fnmatch.fnmatchcase(region.path, pattern):
                return policy
        return None


def removes(policy: Policy) -> bool:
    """Whether a policy stands for no region at all."""
    return policy == none


def check_some_reachable(regions: Sequence[Region]) -> None:
    """Refuse a function without a region that a rewrite can change."""
    if not regions:
        raise RegionError(f"The function has no region. {HOW_TO_MAKE_A_REGION}")
    if not any(region.reachable for region in regions):
        raise RegionError(
            f"None of the function's {len(regions)} regions can be changed: they are "
            "reached only through a custom_vjp, or were differentiated already. Give "
            "the loss to with_policy before jax.grad; inside a custom_vjp, set the "
            "policy where the region is made."
        )


def marked_outside(
    regions: Sequence[Region], chosen: Sequence[Policy | None]
) -> list[bool]:
    """Whether a region around each one marks, by the same policy, what both keep."""
    return [
        policy is not None and policy.needs_binding and policy in around
        for policy, around in zip(chosen, _around(regions, chosen), strict=True)
    ]


def _bound_once(
    regions: Sequence[Region], chosen: Sequence[Policy | None]
) -> list[Policy | None]:
    """Leave regions alone that a policy would mark in a region marked by another.

    What the outermost region keeps counts, and it would see the inner one's marks.
    """
    return [
        policy
        if policy is None
        or not policy.needs_binding
        or policy in around
        or not any(outer is None or outer.needs_binding for outer in around)
        else None
        for policy, around in zip(chosen, _around(regions, chosen), strict=True)
    ]


def _around(
    regions: Sequence[Region], chosen: Sequence[Policy | None]
) -> list[tuple[Policy | None, ...]]:
    """What was chosen for the regions around each one that stay regions."""
    stack: list[tuple[Policy | None, ...]] = [()]
    found = []
    for region, policy in zip(regions, chosen, strict=True):
        del stack[region.depth + 1 :]
        found.append(stack[-1])
        stays = policy is None or not removes(policy)
        stack.append((*stack[-1], policy) if stays else stack[-1])
    return found


# --- layers


def _layers(regions: Sequence[Region]) -> dict[int, tuple[int, int]]:
    """Region index → (which layer of a stack it is, how many layers the stack has).

    A stack is the regions whose paths differ in numbers at most. A region that is
    alone in that is a layer only where no region has company.
    """
    stacks: dict[str, list[Region]] = collections.defaultdict(list)
    for region in regions:
        if region.depth == 0 and region.times == 1:
            stacks[re.sub(r"\d+", "#", region.path)].append(region)
    alone = not any(len(stack) > 1 for stack in stacks.values())
    return {
        region.index: (layer, len(stack))
        for stack in stacks.values()
        if len(stack) > 1 or alone
        for layer, region in enumerate(stack)
    }


def _for_layer(
    policy: Policy | None, region: Region, layer: tuple[int, int] | None
) -> Policy | None:
    if policy is None or "layer" not in policy.needs or not region.reachable:
        return policy
    if isinstance(region.policy, Part):
        assert isinstance(region.policy.label, Policy)
        return region.policy.label
    if region.depth > 0:
        return None  # the outermost region's policy counts
    if layer is not None:
        return policy.for_layer(*layer)
    if region.times > 1:
        raise RegionError(
            f"{policy!r} chooses by layer, but the region {region.path!r} is one "
            f"program that runs {region.times} times in a loop that cannot be split: "
            "one that remat.scan has cut into segments, that only adds to what it "
            "carries, or in a custom_jvp function. Give it a policy that does not "
            "depend on the layer."
        )
    raise RegionError(
        f"{policy!r} chooses by layer, but the region {region.path!r} belongs to no "
        f"stack of layers; give it a policy of its own: {{{region.path!r}: policy}}."
    )


# --- what would change nothing


def _check_pattern(pattern: str, regions: Sequence[Region]) -> None:
    paths = list(dict.fromkeys(region.path for region in regions))
    if any(fnmatch.fnmatchcase(path, pattern) for path in paths):
        return
    raise RegionError(
        f"No region matches the pattern {pattern!r}. The regions are: "
        f"{listed(paths)}.{near([pattern], paths)}"
    )
