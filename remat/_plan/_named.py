"""The named policies as candidates: what each would keep and cost on these regions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from remat import policies as catalogue
from remat._plan._choose import Allotment
from remat._plan._kinds import Kind, same
from remat.policies import Policy, PolicyError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """What named policies that keep the same have in common."""

    names: tuple[str, ...]
    """Their names."""
    allotment: Allotment
    """What they keep."""


def named_candidates(
    kinds: Sequence[Kind], policies: Mapping[str, Policy] | None = None
) -> tuple[Named, ...]:
    """Every named policy on the regions, those that keep the same together.

    Policies that need to know the layer, or that cannot decide on these regions, have
    no place here.
    """
    if policies is None:
        policies = {name: catalogue.get(name) for name in catalogue.names()}
    found: dict[Any, list[str]] = {}
    allotments: dict[Any, Allotment] = {}
    for name, policy in policies.items():
        if "layer" in policy.needs:
            continue
        try:
            taken = same(kinds, lambda kind, policy=policy: kind.choice_of(policy))
        except PolicyError:
            continue
        key = taken.key
        found.setdefault(key, []).append(name)
        allotments[key] = taken
    return tuple(
        Named(names=tuple(names), allotment=allotments[key])
        for key, names in found.items()
    )
