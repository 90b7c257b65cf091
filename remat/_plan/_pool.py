"""Mixes of known choices within limits on bytes, FLOPs and time at once.

A frontier is the least time of recompute at each number of bytes. What is to beat a
certain choice must also not be slower in all, memory traffic included; where no single
choice is, some layers with one choice and the rest with another can be.
"""

import dataclasses
import functools
from collections.abc import Sequence

from remat._plan._choose import Allotment, Limit, Stack, choose
from remat._plan._frontier import Frontier
from remat._plan._kinds import SOLVE_S, Kind
from remat._plan._modelled import Modelled
from remat._plan._solve import BudgetError, Choice


class Pool:
    """Choices that mixes are made of.

    Args:
        kinds: The regions.
        named: What named policies keep; mixes may hold that too.
    """

    def __init__(self, kinds: Sequence[Kind], named: Sequence[Allotment]) -> None:
        self.kinds = kinds
        self.named = named

    @functools.cached_property
    def _stacks(self) -> list[Stack]:
        return [
            dataclasses.replace(
                kind.stack,
                frontier=Frontier(points=self._points(i, kind), complete=False),
            )
            for i, kind in enumerate(self.kinds)
        ]

    def _points(self, i: int, kind: Kind) -> tuple[Choice, ...]:
        given = [*kind.curve.points]
        given += [share.choice for one in self.named for share in one.shares[i]]
        room = [choice for choice in given if choice.host_bytes <= kind.host_bytes]
        distinct = {
            (choice.saved, choice.offloaded): choice
            for choice in (*room, *map(kind.faster, room), *map(kind.lighter, room))
            if choice is not None
        }
        return tuple(sorted(distinct.values(), key=lambda choice: choice.bytes))

    def mix(
        self, kept_bytes: int, most: Modelled, *, fastest: bool = False
    ) -> Allotment | None:
        """The mix of least recompute within limits; None where there is none.

        Args:
            kept_bytes: Most bytes for all regions to keep.
            most: Most FLOPs and seconds.
            fastest: Whether it is the one of least time instead.
        """
        if kept_bytes < 0:
            return None
        limits = [
            Limit(of=_flops, most=most.flops),
            Limit(of=self._seconds, most=most.seconds),
        ]
        try:
            return choose(
                self._stacks,
                kept_bytes,
                limits=limits,
                price=self._seconds if fastest else _flops,
                time_limit_s=SOLVE_S,
            )
        except BudgetError:
            return None

    def _seconds(self, i: int, choice: Choice) -> float:
        return self.kinds[i].seconds_of(choice)


def _flops(i: int, choice: Choice) -> float:
    return choice.recompute_flops
