"""How to run steps that are of several kinds in as few loops as can be."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Steps of one kind in a row."""

    kind: Hashable
    n_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Runs, one after another, and that several times."""

    repeats: int
    runs: tuple[Run, ...]

    @property
    def n_steps(self) -> int:
        """Steps in all."""
        return self.repeats * self.n_steps_once

    @property
    def n_steps_once(self) -> int:
        """Steps in one repetition."""
        return sum(run.n_steps for run in self.runs)


def spans(kinds: Sequence[Hashable]) -> tuple[Span, ...]:
    """The spans that run steps of these kinds, in this order.

    What counts is how often a step stands in the program: once for each run. Kinds
    that repeat with a period are one loop over it; what is left over comes after it.

    Example:
        >>> [(s.repeats, s.n_steps_once) for s in spans("aabbb")]
        [(1, 5)]
        >>> [(s.repeats, s.n_steps_once) for s in spans("ababababa")]
        [(4, 2), (1, 1)]
    """
    best = _plain(kinds)
    for period in range(2, len(kinds) // 2 + 1):
        if not all(a == b for a, b in zip(kinds, kinds[period:], strict=False)):
            continue
        repeats = len(kinds) // period
        loop = Span(repeats, _runs(kinds[:period]))
        found = (loop, *_plain(kinds[repeats * period :]))
        if _n_bodies(found) < _n_bodies(best):
            best = found
    return best


def _plain(kinds: Sequence[Hashable]) -> tuple[Span, ...]:
    return (Span(1, _runs(kinds)),) if kinds else ()


def _runs(kinds: Sequence[Hashable]) -> tuple[Run, ...]:
    grouped = itertools.groupby(kinds)
    return tuple(Run(kind, len(list(steps))) for kind, steps in grouped)


def _n_bodies(found: Sequence[Span]) -> int:
    return sum(len(span.runs) for span in found)
