"""Share one budget among regions: a multiple-choice knapsack, solved to the optimum.

Equal regions are one `Stack`: their frontier is computed once, and the question is how
many of them take which point of it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize

from remat._plan._frontier import Frontier
from remat._plan._milp import milp
from remat._plan._solve import BudgetError, Choice

_SCALE = 1e3
_TIE = 1e-3
"""What all bytes together weigh beside all prices, both as in `_program`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Equal regions of a program."""

    frontier: Frontier
    """The choices that each of them has."""
    n_copies: int = 1
    """How many can be given different choices: unrolled layers, or the segments that a
    layer scan can be split into; 1 where all share one program."""
    times: int = 1
    """How often each copy runs: a scan's length where it is not split."""
    max_kinds: int | None = None
    """How many different choices its copies may have; None for no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """So many copies of a stack that take one choice."""

    choice: Choice
    n_copies: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """What each stack does with its part of the budget."""

    shares: tuple[tuple[Share, ...], ...]
    """For each stack, its shares, fewest bytes first."""
    bytes: int
    """Kept in device memory by all regions, every run counted."""
    host_bytes: int
    """Moved to host memory by all regions."""
    price: float
    """Price of all regions."""

    @property
    def key(self) -> Any:
        """What is kept, by which two allotments are the same."""
        return tuple(
            (share.choice.saved, share.choice.offloaded, share.n_copies)
            for taken in self.shares
            for share in taken
        )


Figure = Callable[[int, Choice], float]
"""From the position of a stack and a choice to what one run of it has of something."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit on the sum of something over all runs."""

    of: Figure
    most: float


def _price(stack: int, choice: Choice) -> float:
    return choice.price


def choose(
    stacks: Sequence[Stack],
    budget_bytes: int,
    *,
    limits: Sequence[Limit] = (),
    price: Figure = _price,
    time_limit_s: float = math.inf,
) -> Allotment:
    """The cheapest points for all regions whose bytes together fit a budget.

    Args:
        stacks: The regions, equal ones together; the points of each, fewest bytes
            first.
        budget_bytes: Device memory for what all of them keep.
        limits: What else is limited.
        price: What to minimize the sum of.
        time_limit_s: When to stop with the best found.

    Returns:
        The optimum over the points of the given frontiers.

    Raises:
        BudgetError: Even the smallest points do not fit, or none are within the
            limits.
    """
    least = sum(s.n_copies * s.times * s.frontier.points[0].bytes for s in stacks)
    if least > budget_bytes:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes for what regions keep is below the "
            f"{least} bytes of their smallest choices; raise the budget, make the "
            "batch smaller, or shard"
        )
    counts = _Knapsack(stacks, budget_bytes, limits, price).solve(time_limit_s)
    return _allotment(stacks, counts)


class _Knapsack:
    """One whole number for each point of each stack: the copies that take it."""

    def __init__(
        self,
        stacks: Sequence[Stack],
        budget_bytes: int,
        limits: Sequence[Limit],
        price: Figure,
    ):
        self.stacks = stacks
        self.budget_bytes = budget_bytes
        self.extra = limits
        self.columns = [
            (s, p) for s, stack in enumerate(stacks) for p in stack.frontier.points
        ]
        self.sizes = np.array([self._runs(s) * p.bytes for s, p in self.columns], float)
        self.prices = self._figures(price)
        self.limits = np.array([stacks[s].n_copies for s, _ in self.columns], float)

    def _figures(self, of: Figure) -> np.ndarray:
        """A figure of one copy at each point, all its runs counted."""
        return np.array([self._runs(s) * of(s, p) for s, p in self.columns], float)

    def _runs(self, stack: int) -> int:
        return self.stacks[stack].times

    def solve(self, time_limit_s: float) -> list[int]:
        if not self.columns:
            return []
        n = len(self.columns)
        # Second half: whether any copy takes the point at all.
        result = milp(
            np.concatenate([self._objective(), np.zeros(n)]),
            constraints=self._constraints(),
            integrality=np.ones(2 * n),
            bounds=scipy.optimize.Bounds(0, self._bounds()),
            options={"mip_rel_gap": 0.0, "time_limit": min(time_limit_s, 1e7)},
        )
        if result.x is None and self.extra:
            raise BudgetError("no mix of the points is within all limits")
        if result.x is None:
            return self._smallest()
        return [round(x) for x in result.x[:n]]

    def _smallest(self) -> list[int]:
        first = [p is self.stacks[s].frontier.points[0] for s, p in self.columns]
        return [int(n) if yes else 0 for n, yes in zip(self.limits, first, strict=True)]

    def _bounds(self) -> Any:
        return np.concatenate([self.limits, np.ones(len(self.columns))])

    def _objective(self) -> np.ndarray:
        price = self.prices * (_SCALE / (float(self.limits @ self.prices) or 1.0))
        size = self.sizes * (_TIE / (float(self.limits @ self.sizes) or 1.0))
        return price + size

    def _constraints(self) -> list[scipy.optimize.LinearConstraint]:
        n = len(self.columns)
        zeros = np.zeros((1, n))
        stack_of = np.array([s for s, _ in self.columns])
        owner = (stack_of[None, :] == np.arange(len(self.stacks))[:, None]).astype(
            float
        )
        n_copies: Any = np.array([float(stack.n_copies) for stack in self.stacks])
        kinds: Any = np.array(
            [float(stack.max_kinds or n) for stack in self.stacks], float
        )
        unit = max(self.budget_bytes, 1) / 1e3
        fits = np.concatenate([self.sizes[None, :] / unit, zeros], axis=1)
        taken = np.concatenate([np.eye(n), -np.diag(self.limits)], axis=1)
        linear = scipy.optimize.LinearConstraint
        return [
            *(self._limited(lim) for lim in self.extra if math.isfinite(lim.most)),
            linear(np.concatenate([owner, 0 * owner], axis=1), n_copies, n_copies),
            linear(fits, -np.inf, self.budget_bytes / unit * (1 + 1e-12)),
            linear(taken, -np.inf, 0),
            linear(np.concatenate([0 * owner, owner], axis=1), -np.inf, kinds),
        ]

    def _limited(self, limit: Limit) -> scipy.optimize.LinearConstraint:
        """In thousandths of the limit, as all rows."""
        row = self._figures(limit.of)
        unit = max(limit.most, 1e-3 * float(self.limits @ row), 1e-30) / 1e3
        return scipy.optimize.LinearConstraint(
            np.concatenate([row, np.zeros(len(row))])[None, :] / unit,
            -np.inf,
            limit.most / unit * (1 + 1e-9) + 1e-9,
        )


def _allotment(stacks: Sequence[Stack], counts: Sequence[int]) -> Allotment:
    remaining = iter(counts)
    shares = []
    for stack in stacks:
        taken = [
            Share(choice=point, n_copies=n)
            for point, n in zip(stack.frontier.points, remaining, strict=False)
            if n
        ]
        shares.append(tuple(taken))
    runs = [
        (stack.times * share.n_copies, share.choice)
        for stack, taken in zip(stacks, shares, strict=True)
        for share in taken
    ]
    return Allotment(
        shares=tuple(shares),
        bytes=sum(n * choice.bytes for n, choice in runs),
        host_bytes=sum(n * choice.host_bytes for n, choice in runs),
        price=sum(n * choice.price for n, choice in runs),
    )
