"""A policy for each region, by a pattern of its path."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._policy import Policy
from remat.policies._rules import Rule
from remat.policies._selector import united
from remat.policies._value import Decision, Value


@dataclass(frozen=True, slots=True)
class ByRegion(Rule):
    """A policy for each region, by the first pattern that its path matches."""

    by_pattern: tuple[tuple[str, Policy], ...]
    """Glob patterns of region paths, with their policies."""

    def policy_of(self, path: str) -> Policy | None:
        """The policy of a region; None where no pattern matches its path."""
        for pattern, policy in self.by_pattern:
            if fnmatch.fnmatchcase(path, pattern):
                return policy
        return None

    def decide(self, value: Value) -> Decision:
        policy = self.policy_of(value.region_path or "")
        if policy is None:
            raise PolicyError(
                f"no pattern matches the region {value.region_path!r}; patterns: "
                f"{', '.join(repr(pattern) for pattern, _ in self.by_pattern)}"
            )
        return policy.decide(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        needs = (policy.rule.needs(negated) for _, policy in self.by_pattern)
        return frozenset({"region_path"}).union(*needs)

    def primitives(self) -> frozenset[str] | None:
        kept: frozenset[str] | None = frozenset()
        for _, policy in self.by_pattern:
            kept = united(kept, policy.primitives)
        return kept

    def names(self) -> frozenset[str]:
        return frozenset().union(*(p.checkpoint_names for _, p in self.by_pattern))

    def mentions(self, name: str) -> bool:
        return any(policy.mentions(name) for _, policy in self.by_pattern)

    def offloads(self) -> bool:
        return any(policy.offloads for _, policy in self.by_pattern)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PolicyMap(Policy, Mapping[str, Policy]):
    """A policy for each region, by a pattern of its path; also a mapping of them.

    The first pattern that matches counts; a region that none matches is left as it
    is. Made by `as_policy({pattern: policy})`.

    Example:
        >>> from remat import policies
        >>> by_region = policies.as_policy({"*/attn": "save_dots", "*": "nothing"})
        >>> by_region.for_region("h_0/attn")
        save_dots
    """

    @property
    def by_pattern(self) -> tuple[tuple[str, Policy], ...]:
        """Glob patterns of region paths, with their policies."""
        assert isinstance(self.rule, ByRegion)
        return self.rule.by_pattern

    def for_region(self, path: str) -> Policy | None:
        """The policy of a region; None where no pattern matches its path."""
        assert isinstance(self.rule, ByRegion)
        return self.rule.policy_of(path)

    def __getitem__(self, pattern: str) -> Policy:
        return dict(self.by_pattern)[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.by_pattern))

    def __len__(self) -> int:
        return len(self.by_pattern)


def policy_map(by_pattern: Mapping[str, Any]) -> PolicyMap:
    """A policy for each region, from patterns and what stands for a policy."""
    # Late: `as_policy` makes these of mappings, and its parts are policies again.
    from remat.policies._coerce import as_policy

    if not by_pattern:
        raise PolicyError(
            "a mapping for a policy holds region patterns, got an empty one; for every "
            "region alike, give one policy"
        )
    for pattern in by_pattern:
        if not isinstance(pattern, str):
            raise PolicyError(
                f"a mapping for a policy has region patterns as keys, got {pattern!r}"
            )
    given = tuple((key, as_policy(policy)) for key, policy in by_pattern.items())
    rule = ByRegion(given)
    listed = ", ".join(f"{pattern!r}: {policy.code}" for pattern, policy in given)
    what = "; ".join(f"in {pattern} as {policy.name}" for pattern, policy in given)
    return PolicyMap(
        rule=rule,
        name=f"{{{listed}}}",
        code=f"as_policy({{{listed}}})",
        description=Description(
            saves=what,
            offloads=what if rule.offloads() else "nothing",
            recomputes=what,
            when="regions differ in what is worth keeping",
        ),
    )
