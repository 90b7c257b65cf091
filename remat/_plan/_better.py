"""Which mix to compile next, to beat the best that is compiled."""

import dataclasses
import math

from remat._plan._choose import Allotment
from remat._plan._judge import no_worse, step_s
from remat._plan._meter import Measured
from remat._plan._modelled import Modelled
from remat._plan._pool import Pool
from remat._plan._search import Search

WORTH = 1e-3
"""Share of its recompute or time that a mix must spare to be compiled."""
LATE = 1.2
"""How much of the time that a mix was too slow by the next one must spare."""
THINNER = 1e-3
"""Share of the budget that a mix aims below it, made of one that was just over; four
times as much for each other that was over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Better:
    """Looks for mixes."""

    search: Search
    """What is known."""
    pool: Pool
    """What mixes are made of."""

    def than(self, best: Measured, *, within: int | None) -> Allotment | None:
        """A mix that recomputes less than the best, or as much in less time.

        Args:
            best: What to beat.
            within: Bytes that regions can keep within the budget, by the peaks so far.
        """
        goal = self._modelled(best)
        found = self._thinner(best, goal)
        if found is not None:
            return found
        most = Modelled(
            flops=self._most_flops(best, goal), seconds=self._most_seconds(best, goal)
        )
        for kept in (best.candidate.allotment.bytes, within):
            found = None if kept is None else self.pool.mix(kept, most)
            if found is None or found.key in self.search.tried():
                continue
            if not goal.no_worse(self.search.modelled(found), within=WORTH):
                return found
        return None

    def _modelled(self, measured: Measured) -> Modelled:
        return self.search.modelled(measured.candidate.allotment)

    def _mixes(self) -> list[Measured]:
        return [m for m in self.search.meter.measured if not m.candidate.is_named]

    def _most_seconds(self, best: Measured, goal: Modelled) -> float:
        """By the model: less than of mixes that turned out slower than the best."""
        late = [
            self._modelled(m).seconds - LATE * (step_s(m) - step_s(best))
            for m in self._mixes()
            if step_s(m) > step_s(best) and m.flops <= best.flops
        ]
        return min([goal.seconds, *late])

    def _most_flops(self, best: Measured, goal: Modelled) -> float:
        """By the model: less than of mixes that turned out to recompute more."""
        more = [
            modelled.flops - (m.flops - best.flops)
            for m in self._mixes()
            if (modelled := self._modelled(m)).flops <= goal.flops
            if m.flops > best.flops
        ]
        return min([goal.flops, *more])

    def _thinner(self, best: Measured, goal: Modelled) -> Allotment | None:
        """As what would be better than the best if it fitted, in fewer bytes."""
        over = [m for m in self._mixes() if not self.search.fits(m)]
        good = [m for m in over if no_worse(m, best)]
        if not good:
            return None
        nearest = min(good, key=lambda m: m.peak_bytes)
        aim = (1 - THINNER * 4 ** (len(over) - 1)) * self.search.budget_bytes
        kept = nearest.candidate.allotment.bytes - int(nearest.peak_bytes - aim)
        least = self._modelled(nearest).flops
        for share in (0.0, 0.25, 0.5, 1.0):  # of the FLOPs that it spares
            flops = least + share * max(goal.flops - least, 0.0)
            most = Modelled(flops=flops, seconds=math.inf)
            found = self.pool.mix(kept, most, fastest=True)
            if found is not None and found.key not in self.search.tried():
                return found
        return None
