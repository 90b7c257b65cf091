"""Which policy each region gets, from what a user passed as `policy`."""

import dataclasses
import difflib
import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from remat.policies import Policy, PolicyError, as_policy


class RegionError(ValueError):
    """A function has no region that can be changed as asked."""


class NoNamesFound(RegionError):
    """None of the checkpoint names a policy spells out is emitted."""


class MissingNamesWarning(UserWarning):
    """Some of the checkpoint names a policy spells out are not emitted."""

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RegionLike(Protocol):
    """What an assignment reads of a region."""

    @property
    def path(self) -> str: ...
    @property
    def reachable(self) -> bool: ...
    @property
    def emitted_names(self) -> tuple[str, ...]: ...


HOW_TO_MAKE_A_REGION = (
    "Wrap a layer with jax.checkpoint, flax.linen.remat, flax.nnx.remat, "
    "equinox.filter_checkpoint or remat.remat to make one; the layer that a scan or "
    "a loop repeats is the usual place."
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
        if not isinstance(policy, Mapping):
            return Assignment((("*", as_policy(policy)),), by_pattern=False)
        if not policy:
            raise PolicyError("a policy is needed, got an empty mapping")
        rules = tuple((pattern, as_policy(value)) for pattern, value in policy.items())
        return Assignment(rules, by_pattern=True)

    def policy_of(self, region: RegionLike) -> Policy | None:
        """The policy that a region gets; None leaves it as it is."""
        for pattern, policy in self.rules:
            if fnmatch.fnmatchcase(region.path, pattern):
                return policy
        return None

    def check(self, regions: Sequence[RegionLike]) -> None:
        """Refuse what would change nothing.

        Raises:
            RegionError: there is no region, none can be changed, or a pattern
                matches none.
        """
        check_some_reachable(regions)
        reachable = [region for region in regions if region.reachable]
        if self.by_pattern:
            for pattern, _ in self.rules:
                _check_pattern(pattern, reachable)
        for policy in dict.fromkeys(policy for _, policy in self.rules):
            chosen = [r for r in reachable if self.policy_of(r) == policy]
            _check_names(policy, chosen)


def removes(policy: Policy) -> bool:
    """Whether a policy stands for no region at all."""
    return policy.name == "none"


def check_some_reachable(regions: Sequence[RegionLike]) -> None:
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


def _check_pattern(pattern: str, regions: Sequence[RegionLike]) -> None:
    paths = list(dict.fromkeys(region.path for region in regions))
    if any(fnmatch.fnmatchcase(path, pattern) for path in paths):
        return
    raise RegionError(
        f"No region matches the pattern {pattern!r}. The regions are: "
        f"{_listed(paths)}.{_near([pattern], paths)}"
    )


def _check_names(policy: Policy, regions: Sequence[RegionLike]) -> None:
    """Refuse checkpoint names that nothing emits; warn where only some are."""
    wanted = policy.checkpoint_names
    if not wanted or not regions:
        return
    emitted = list(dict.fromkeys(n for region in regions for n in region.emitted_names))
    missing = sorted(set(wanted) - set(emitted))
    if not missing:
        return
    what = (
        f"The regions emit: {_listed(emitted)}.{_near(missing, emitted)}"
        if emitted
        else "The regions emit no checkpoint names; mark values with "
        "jax.ad_checkpoint.checkpoint_name(x, name)."
    )
    if len(missing) == len(wanted):
        raise NoNamesFound(
            f"{policy!r} names {_listed(missing)}, which no region emits, so it would "
            f"save nothing by name. {what}"
        )
    message = f"{policy!r} names {_listed(missing)}, which no region emits. {what}"
    warnings.warn(MissingNamesWarning(message, tuple(missing)), stacklevel=2)


def _listed(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _near(wanted: Iterable[str], known: Sequence[str]) -> str:
    near = [m for name in wanted for m in difflib.get_close_matches(name, known, n=2)]
    return f" Did you mean {_listed(dict.fromkeys(near))}?" if near else ""
