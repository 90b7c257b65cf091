"""The named policies as candidates: what each would keep and cost on these regions."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat import policies as catalogue
from remat._plan._choose import Allotment
from remat._plan._judge import FULL
from remat._plan._kinds import Kind, same
from remat._plan._modelled import Modelled
from remat.policies import Policy, PolicyError

ERROR = 0.03
"""How far off a prediction may be, as a share of the budget, once there is a compiled
point near it."""


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


def near_budget(
    kinds: Sequence[Kind],
    named: Sequence[Named],
    *,
    budget_bytes: int,
    predict: Callable[[int], float],
    beside: Sequence[Modelled],
    is_used: bool,
) -> list[tuple[Named, float]]:
    """Named policies that may use a budget as well as a plan does.

    Args:
        kinds: The regions.
        named: Those that are not compiled yet.
        budget_bytes: The budget.
        predict: From the bytes that regions keep to the peak.
        beside: What is compiled and fits. Who is worse than one of these, by the
            model, is left out, unless the budget may be its very peak.
        is_used: Whether the budget is the peak of a policy that is compiled. Who is
            predicted to take more is left out then.

    Returns:
        The policies and their peaks, the one nearest to the budget first.
    """
    room = sum(kind.host_bytes * kind.n_copies * kind.times for kind in kinds)
    most = 1 if is_used else 1 + ERROR
    found = []
    for one in named:
        peak = predict(one.allotment.bytes)
        share = peak / budget_bytes
        if one.allotment.host_bytes > room or not FULL - ERROR <= share <= most:
            continue
        modelled = Modelled.of(kinds, one.allotment)
        is_beaten = any(other.no_worse(modelled) for other in beside)
        if share >= 1 - ERROR / 2 or not is_beaten:
            found.append((one, peak))
    return sorted(found, key=lambda pair: abs(budget_bytes - pair[1]))
