"""What the model says of a choice for all regions, to hold two against each other."""

import dataclasses
from collections.abc import Sequence

from remat._plan._choose import Allotment
from remat._plan._kinds import Kind, by_kind_sum, estimated_s

ROUNDING = 1e-6
"""Shares below this are rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Modelled:
    """What the model says of a choice for all regions."""

    flops: float
    """Arithmetic done twice."""
    seconds: float
    """Time of recomputing and of keeping."""

    @staticmethod
    def of(kinds: Sequence[Kind], allotment: Allotment) -> "Modelled":
        """The figures of an allotment."""
        flops = by_kind_sum(kinds, allotment, "recompute_flops")
        return Modelled(flops=flops, seconds=estimated_s(kinds, allotment))

    def no_worse(self, other: "Modelled", *, within: float = ROUNDING) -> bool:
        """Whether neither figure is larger by more than a share."""
        more = 1 + within
        return self.flops <= more * other.flops and self.seconds <= more * other.seconds
