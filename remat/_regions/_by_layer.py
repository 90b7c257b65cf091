"""Decisions on a region in the body of a scan, one for each layer."""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class ByLayer:
    """A decision for each layer, as they run: those of all layer scans around."""

    decisions: tuple[Hashable, ...]


def by_layer(decisions: Sequence[Hashable]) -> Hashable:
    """Decisions for all layers: one where they agree."""
    first = decisions[0]
    if all(decision == first for decision in decisions):
        return first
    return ByLayer(tuple(decisions))


def of_step(decision: Hashable, step: int, n_steps: int) -> Hashable:
    """What is decided about the layers that one step of a loop runs."""
    if not isinstance(decision, ByLayer):
        return decision
    n = len(decision.decisions) // n_steps
    assert n * n_steps == len(decision.decisions), "one decision for each layer"
    return by_layer(decision.decisions[step * n : (step + 1) * n])
