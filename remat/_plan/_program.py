"""The integer program that chooses what a region keeps.

Checkmate (Jain et al. 2020) chooses when to compute what by an integer program over
whole training steps. Here the steps are fixed, as JAX runs them (forward; recompute;
backward), which leaves one question a value and one an equation:

    x_v = 1: save v    o_v = 1: offload v to the host    y_e = 1: run e again

    for each required value r:                  x_r + o_r + y(def r) >= 1
    for each equation e and operand p of it:    y_e <= x_p + o_p + y(def p)
    sum bytes x <= device budget                sum bytes o <= host budget
    sum FLOPs y <= limit, where there is one
    minimize  sum price y  +  sum price of keeping (x + o)

What a derivative rule makes runs once whether kept or not, so it costs only where both
passes run it: `f_e` says that the forward pass does, and the price is of y_e + f_e - 1.
For given x and o the least y and f are whole numbers by themselves, so only x and o
are declared to be. HiGHS solves the rest (`scipy.optimize.milp`, gap 0).

Choices whose prices differ by less than a millionth of all there is to compute count as
equal; of these the one that keeps less is taken.
"""

import math
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from remat._plan._milp import milp
from remat._plan._presolve import Problem
from remat._plan._prices import Prices

_SCALE = 1e3
"""What all prices together are scaled to; HiGHS's tolerances (1e-6) are small then."""
_TIE = 1e-3
"""What all bytes together weigh beside that."""
_FINE = 1e5
"""A limit of so many units is one that HiGHS cannot tell from one unit more."""
_MAX_FINE = 64
"""Most choices that are solved without the presolve of HiGHS then: it drops solutions
that it finds to be over a limit by rounding, and others with them."""
_MAX_CUTS = 50
"""Solutions that may turn out over a limit by rounding, one after the other."""


def solve_program(
    problem: Problem,
    prices: Prices,
    *,
    budget_bytes: int,
    host_bytes: int,
    least_host_bytes: int,
    max_flops: float,
    time_limit_s: float,
) -> tuple[list[int], list[int], bool] | None:
    """Solve a presolved problem.

    Returns:
        The items to save, those to offload, and whether no other choice is better: when
        the time is up, it is the best found so far. None where no choice is within
        `max_flops`, or none was found in time.
    """
    program = _Program(
        problem, prices, budget_bytes, host_bytes, least_host_bytes, max_flops
    )
    return program.solve(time_limit_s)


class _Program:
    """The integer program of a problem at one budget."""

    def __init__(
        self,
        problem: Problem,
        prices: Prices,
        budget_bytes: int,
        host_bytes: int,
        least_host_bytes: int,
        max_flops: float,
    ):
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.host_bytes = host_bytes
        self.max_flops = max_flops
        items = problem.items
        self.can_save = [
            v for v, i in items.items() if i.can_keep and i.bytes <= budget_bytes
        ]
        self.can_offload = [
            v
            for v, i in items.items()
            if i.can_keep and max(least_host_bytes, 1) <= i.bytes <= host_bytes
        ]
        self.column: dict[tuple[str, int], int] = {}
        for kind, numbers in (
            ("x", self.can_save),
            ("o", self.can_offload),
            ("y", problem.nodes),
            ("f", [n for n, node in problem.nodes.items() if not node.forward]),
        ):
            for number in numbers:
                self.column[kind, number] = len(self.column)
        self.rows: list[dict[int, float]] = []
        self.at_least: list[float] = []
        self.is_fine = False
        """Whether sizes differ by less than the tolerance of HiGHS."""
        self._write_rows()
        self.objective = self._objective(prices)

    def solve(self, time_limit_s: float) -> tuple[list[int], list[int], bool] | None:
        """As `solve_program`."""
        if not self.column:
            return [], [], True
        for _ in range(_MAX_CUTS):
            result = self._milp(time_limit_s)
            # To keep nothing is a solution where FLOPs are not limited.
            if result.x is None and not math.isinf(self.max_flops):
                return None
            chosen = np.zeros(len(self.column), bool)
            if result.x is not None:
                chosen = result.x > 0.5
            saved = [v for v in self.can_save if chosen[self.column["x", v]]]
            offloaded = [v for v in self.can_offload if chosen[self.column["o", v]]]
            if not self._cut_off(saved, offloaded):
                return saved, sorted({*offloaded} - {*saved}), bool(result.success)
        return ([], [], False) if math.isinf(self.max_flops) else None

    def _milp(self, time_limit_s: float) -> scipy.optimize.OptimizeResult:
        n_whole = len(self.can_save) + len(self.can_offload)
        constraints = self._constraints()
        return milp(
            self.objective,
            constraints=constraints,
            integrality=(np.arange(len(self.column)) < n_whole).astype(int),
            bounds=scipy.optimize.Bounds(0, 1),
            options={
                "mip_rel_gap": 0.0,
                "time_limit": min(time_limit_s, 1e7),
                "presolve": not self.is_fine or n_whole > _MAX_FINE,
            },
        )

    def _cut_off(self, saved: list[int], offloaded: list[int]) -> bool:
        """Rule out what is over a limit by less than the tolerance of HiGHS."""
        is_over = False
        for kind, found, limit in (
            ("x", saved, self.budget_bytes),
            ("o", offloaded, self.host_bytes),
        ):
            if sum(self.problem.items[v].bytes for v in found) > limit:
                row = {self.column[kind, v]: -1.0 for v in found}
                self._row(row, at_least=1.0 - len(found))
                is_over = True
        return is_over

    def _write_rows(self) -> None:
        for v, item in self.problem.items.items():
            if item.required:
                self._row(self._available(v), at_least=1.0)
        for n, node in self.problem.nodes.items():
            for v in node.operands:
                self._row({**self._available(v), self.column["y", n]: -1.0})
            if not node.forward:
                self._write_forward_rows(n)

    def _write_forward_rows(self, n: int) -> None:
        runs = self.column["f", n]
        node = self.problem.nodes[n]
        for v in node.results:
            kept = self._kept(v)
            if kept:
                self._row({runs: 1.0, **{column: -1.0 for column in kept}})
        for v in node.operands:
            maker = self.problem.items[v].producer
            if ("f", maker) in self.column:
                self._row({self.column["f", maker]: 1.0, runs: -1.0})

    def _row(self, coefficients: dict[int, float], at_least: float = 0.0) -> None:
        self.rows.append(coefficients)
        self.at_least.append(at_least)

    def _kept(self, v: int) -> list[int]:
        keys = (("x", v), ("o", v))
        return [self.column[key] for key in keys if key in self.column]

    def _available(self, v: int) -> dict[int, float]:
        made = self.column["y", self.problem.items[v].producer]
        return {made: 1.0, **{column: 1.0 for column in self._kept(v)}}

    def _objective(self, prices: Prices) -> np.ndarray:
        objective = np.zeros(len(self.column))
        all_bytes = sum(item.bytes for item in self.problem.items.values()) or 1
        total = sum(node.price for node in self.problem.nodes.values())
        scale = _SCALE / (total or 1.0)
        for (kind, number), column in self.column.items():
            if kind in "yf":
                objective[column] = scale * self.problem.nodes[number].price
            else:
                item = self.problem.items[number]
                byte = prices.kept_byte + (prices.host_byte if kind == "o" else 0.0)
                kept = scale * (item.price + byte * item.bytes)
                objective[column] = kept + _TIE * item.bytes / all_bytes
        return objective

    def _constraints(self) -> list[scipy.optimize.LinearConstraint]:
        constraints = [
            *self._bytes_limit("x", self.can_save, self.budget_bytes),
            *self._bytes_limit("o", self.can_offload, self.host_bytes),
        ]
        if self.rows:
            matrix = _sparse(self.rows, len(self.column))
            lower: Any = np.array(self.at_least)
            constraints.append(scipy.optimize.LinearConstraint(matrix, lower, np.inf))
        if not math.isinf(self.max_flops):
            constraints.append(self._flop_limit())
        return constraints

    def _flop_limit(self) -> scipy.optimize.LinearConstraint:
        """FLOPs of what runs twice: y, or y + f - 1 where the forward pass may not."""
        nodes = self.problem.nodes
        row = {
            column: nodes[number].flops
            for (kind, number), column in self.column.items()
            if kind in "yf" and nodes[number].flops
        }
        once = sum(node.flops for node in nodes.values() if not node.forward)
        limit = self.max_flops + once
        unit = max(limit, 1.0) / 1e3
        scaled = {column: flops / unit for column, flops in row.items()}
        matrix = _sparse([scaled or {0: 0.0}], len(self.column))
        bound = limit / unit * (1 + 1e-9)
        return scipy.optimize.LinearConstraint(matrix, -np.inf, bound)

    def _bytes_limit(
        self, kind: str, items: list[int], limit: int
    ) -> list[scipy.optimize.LinearConstraint]:
        """Of all that is kept together: none where all of it is within the limit.

        Counted in what divides all sizes, which leaves half of that between what is
        within the limit and what is not: HiGHS would not see single bytes of a GiB.
        """
        sizes = {self.column[kind, v]: self.problem.items[v].bytes for v in items}
        if not 0 < limit < sum(sizes.values()):
            return []
        unit = math.gcd(*sizes.values())
        most = limit // unit + 0.5
        self.is_fine |= most > _FINE
        row = {column: 1e3 * (size // unit) / most for column, size in sizes.items()}
        matrix = _sparse([row], len(self.column))
        return [scipy.optimize.LinearConstraint(matrix, -np.inf, 1e3)]


def _sparse(rows: list[dict[int, float]], n_columns: int) -> scipy.sparse.csr_array:
    lengths = [len(row) for row in rows]
    return scipy.sparse.csr_array(
        (
            np.array([value for row in rows for value in row.values()]),
            np.array([column for row in rows for column in row], dtype=np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        ),
        shape=(len(rows), n_columns),
    )
