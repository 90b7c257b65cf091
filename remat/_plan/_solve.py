"""Choose what a region keeps, and say what follows from a choice."""

import dataclasses
import math
from collections.abc import Mapping

from remat._plan._graph import Graph
from remat._plan._presolve import presolve
from remat._plan._prices import Prices
from remat._plan._program import solve_program
from remat.policies import Decision


class BudgetError(ValueError):
    """No choice fits a budget."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a region keeps, and what follows from it."""

    saved: frozenset[str]
    """Ids of the values kept in device memory."""
    offloaded: frozenset[str] = frozenset()
    """Ids of the values moved to host memory."""
    bytes: int
    """Kept in device memory, the region's inputs not counted."""
    host_bytes: int
    """Moved to host memory."""
    recompute_flops: float
    """Arithmetic done twice."""
    recompute_matmul_flops: float
    """Of these, matrix products, convolutions and kernels."""
    recompute_s: float
    """Time of what is done twice, on the target."""
    keep_s: float = 0.0
    """Time that keeping adds, beside the traffic of the kept bytes."""
    price: float
    """What was minimized."""
    optimal: bool = False
    """Whether it is known that no other choice is better within the same budget."""


def solve(
    graph: Graph,
    prices: Prices,
    budget_bytes: int,
    *,
    host_bytes: int = 0,
    time_limit_s: float = math.inf,
) -> Choice:
    """The choice of least price whose saved values fit a budget.

    Args:
        graph: The region.
        prices: What to minimize.
        budget_bytes: Device memory for what is kept of the region.
        host_bytes: Host memory for what is kept, that is, what the link to the host
            can carry while the region computes; 0 allows no offload.
        time_limit_s: When to stop with the best choice found so far.

    Returns:
        The optimum (within a time limit, the best found).

    Raises:
        BudgetError: The budget is negative.
    """
    if budget_bytes < 0 or host_bytes < 0:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes on the device and {host_bytes} on the "
            "host: even to keep nothing takes 0; the rest of the program leaves less "
            "than nothing for this region"
        )
    return Solver(graph, prices).solve(
        budget_bytes, host_bytes=host_bytes, time_limit_s=time_limit_s
    )


class Solver:
    """A region made ready to be solved at several budgets."""

    def __init__(self, graph: Graph, prices: Prices):
        self.graph = graph
        self.prices = prices
        self.problem = presolve(graph, prices)

    def solve(
        self,
        budget_bytes: int,
        *,
        host_bytes: int = 0,
        least_host_bytes: int = 1,
        max_flops: float = math.inf,
        time_limit_s: float = math.inf,
    ) -> Choice:
        """As the function `solve`.

        Args:
            budget_bytes: Device memory.
            host_bytes: Host memory.
            least_host_bytes: Smaller values are not offloaded.
            max_flops: Most FLOPs to recompute.
            time_limit_s: When to stop.

        Raises:
            BudgetError: No choice within the budget recomputes so few FLOPs.
        """
        found = solve_program(
            self.problem,
            self.prices,
            budget_bytes=budget_bytes,
            host_bytes=host_bytes,
            least_host_bytes=least_host_bytes,
            max_flops=max_flops,
            time_limit_s=time_limit_s,
        )
        if found is None:
            raise BudgetError(
                f"no choice of {budget_bytes} bytes recomputes as little as "
                f"{max_flops:g} FLOPs; raise the budget or the limit"
            )
        saved, offloaded, proven = found
        ids = [value.id for value in self.graph.values]
        choice = evaluate(
            self.graph,
            self.prices,
            saved=frozenset(i for v in saved if (i := ids[v])),
            offloaded=frozenset(i for v in offloaded if (i := ids[v])),
        )
        return dataclasses.replace(choice, optimal=proven)


def evaluate(
    graph: Graph,
    prices: Prices,
    saved: frozenset[str],
    offloaded: frozenset[str] = frozenset(),
) -> Choice:
    """What follows from keeping a set of values, as JAX would run it.

    Args:
        graph: The region.
        prices: For `Choice.price`.
        saved: Ids; what the backward pass does not need of them is not kept.
        offloaded: Ids, likewise.
    """
    kept: set[int] = set()
    again: set[int] = set()
    seen: set[int] = set()
    pending = list(graph.required)
    while pending:
        v = pending.pop()
        value = graph.values[v]
        if v in seen or value.producer is None:
            continue
        seen.add(v)
        if value.id in saved or value.id in offloaded:
            kept.add(v)
        elif value.producer not in again:
            again.add(value.producer)
            pending.extend(graph.equations[value.producer].operands)
    in_forward = _run_forward(graph, kept)
    twice = [graph.equations[e] for e in again & in_forward]
    on_host = {v for v in kept if graph.values[v].id not in saved}
    kept_bytes = sum(graph.values[v].bytes for v in kept)
    moved = sum(graph.values[v].bytes for v in on_host)
    keep_s = sum(graph.values[v].keep_s for v in kept)
    return Choice(
        saved=frozenset(i for v in kept - on_host if (i := graph.values[v].id)),
        offloaded=frozenset(i for v in on_host if (i := graph.values[v].id)),
        bytes=kept_bytes - moved,
        host_bytes=moved,
        recompute_flops=sum(e.flops for e in twice),
        recompute_matmul_flops=sum(e.matmul_flops for e in twice),
        recompute_s=sum(e.seconds for e in twice),
        keep_s=keep_s,
        price=sum(map(prices.of, twice))
        + prices.second * keep_s
        + prices.kept_byte * kept_bytes
        + prices.host_byte * moved,
    )


def choice_of(
    graph: Graph, prices: Prices, decisions: Mapping[str, Decision]
) -> Choice:
    """What follows from a table of decisions, such as a named policy's.

    Args:
        graph: The region.
        prices: For `Choice.price`.
        decisions: By id, as from `remat._naming._naming.decisions`.
    """
    by_kind = {
        kind: frozenset(i for i, d in decisions.items() if d is kind)
        for kind in Decision
    }
    return evaluate(graph, prices, by_kind[Decision.SAVE], by_kind[Decision.OFFLOAD])


def _run_forward(graph: Graph, kept: set[int]) -> set[int]:
    """The equations that the forward pass runs when it keeps these values."""
    running = {e for e, equation in enumerate(graph.equations) if equation.forward}
    pending = list(kept)
    while pending:
        producer = graph.values[pending.pop()].producer
        if producer is not None and producer not in running:
            running.add(producer)
            pending.extend(graph.equations[producer].operands)
    return running
