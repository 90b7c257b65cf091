"""The whole curve of a region: least price at each number of bytes kept."""

import dataclasses
import itertools

from remat._plan._graph import Graph
from remat._plan._prices import Prices
from remat._plan._solve import Choice, Solver


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """Choices that no other one beats in both bytes and price, fewest bytes first."""

    points: tuple[Choice, ...]
    """Each is the optimum at its own number of bytes."""
    complete: bool
    """Whether there are no more between them."""

    def at(self, budget_bytes: int) -> Choice:
        """The cheapest of the points that fit a budget; the smallest if none does."""
        fitting = [c for c in self.points if c.bytes <= budget_bytes]
        return fitting[-1] if fitting else self.points[0]


def frontier(
    graph: Graph,
    prices: Prices,
    *,
    max_points: int = 64,
    max_bytes: int | None = None,
    host_bytes: int = 0,
    least_host_bytes: int = 1,
) -> Frontier:
    """The non-dominated choices of a region.

    An optimum that keeps fewer bytes than its budget allows settles all budgets in
    between. The next budget solved is the middle of the unsettled range where most can
    be gained (bytes times price), so that few points show the curve's shape, and enough
    of them all of it. Each point is an exact optimum.

    Args:
        graph: The region.
        prices: What to minimize.
        max_points: How many points to stop at.
        max_bytes: The largest budget of interest; None for no limit.
        host_bytes: Host memory that each point may use, as in `solve`.
        least_host_bytes: Values smaller than this are not offloaded.
    """
    solver = Solver(graph, prices)
    limit = sum(v.bytes for v in graph.values) if max_bytes is None else max_bytes
    search = _Search(solver, host_bytes, least_host_bytes)
    search.solve(limit)
    search.solve(0)
    while len(search.by_bytes) < max_points:
        budget = search.next_budget()
        if budget is None:
            break
        search.solve(budget)
    return Frontier(
        points=search.non_dominated(), complete=search.next_budget() is None
    )


class _Search:
    """Optima found so far, and the ranges of budget that they settle."""

    def __init__(self, solver: Solver, host_bytes: int, least_host_bytes: int):
        self.solver = solver
        self.host_bytes = host_bytes
        self.least_host_bytes = least_host_bytes
        self.by_bytes: dict[int, Choice] = {}
        self.solved: list[tuple[int, int]] = []
        """(bytes of an optimum, budget it was found at): nothing is left between."""

    def solve(self, budget_bytes: int) -> None:
        choice = self.solver.solve(
            budget_bytes,
            host_bytes=self.host_bytes,
            least_host_bytes=self.least_host_bytes,
        )
        self.by_bytes[choice.bytes] = choice
        self.solved.append((choice.bytes, budget_bytes))

    def next_budget(self) -> int | None:
        """The middle of the range where most may be gained; None if all is settled."""
        self.solved.sort()
        best, budget = 0.0, None
        for (kept, settled), (above, _) in itertools.pairwise(self.solved):
            fewer, more = self.by_bytes[kept], self.by_bytes[above]
            gain = (above - 1 - settled) * (fewer.price - more.price)
            if gain > best:
                best, budget = gain, (settled + above) // 2
        return budget

    def non_dominated(self) -> tuple[Choice, ...]:
        points: list[Choice] = []
        for kept in sorted(self.by_bytes):
            choice = self.by_bytes[kept]
            if not points or choice.price < points[-1].price:
                points.append(choice)
        return tuple(points)
