"""The regions of a loss that can be planned, equal ones together."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from remat import _jax_compat as compat
from remat._naming._naming import decisions
from remat._plan._choose import Allotment, Share, Stack, choose
from remat._plan._costs import Rates
from remat._plan._frontier import Frontier, frontier
from remat._plan._graph import Graph, GraphError, build_graph
from remat._plan._prices import Prices, least_recompute, least_time
from remat._plan._solve import BudgetError, Choice, Solver, choice_of, evaluate
from remat._regions._region import Region
from remat._regions._split_layers import Layers
from remat._targets._target import Target
from remat.policies import Policy

MAX_POINTS = 24
"""Points of a frontier that `choose` picks from; the rest is refined exactly."""

SOLVE_S = 10.0
"""Most seconds for one region at one budget; the best found so far counts then."""


LEAST_HOST_BYTES = 2**20
"""Values of less are not worth a copy to the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class AssumedRates:
    """Figures of a device whose own are unknown: a few cores of a CPU."""

    kind: str = "cpu"
    bandwidth_bytes_s: float = 2e10
    flops_bf16: float = 2e11
    flops_fp32: float = 2e11
    host_link_bytes_s: float = 0.0


def rates_of(target: Target) -> Rates:
    """The target's figures, or assumed ones where it has none (the CPU)."""
    return AssumedRates() if math.isnan(target.bandwidth_bytes_s) else target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Regions of equal program that run equally often."""

    regions: tuple[Region, ...]
    """In program order."""
    n_layers: int = 1
    """How many layers each region stands for, in a scan that can be split; else 1."""
    loops: tuple[Hashable, ...]
    """For each region, what tells the loop body that it stands in from others."""
    graph: Graph
    """What can be kept of one."""
    rates: Rates
    """Figures of the target."""
    host_bytes: int
    """What the host link can move while one computes; 0 allows no offload."""

    @property
    def n_copies(self) -> int:
        """Regions and layers that can be given different choices."""
        return len(self.regions) * self.n_layers

    @property
    def times(self) -> int:
        """How often each copy runs in one step."""
        return self.regions[0].times // self.n_layers

    @property
    def is_scanned(self) -> bool:
        """Whether a loop runs them."""
        return self.regions[0].times > 1

    def copies(self) -> Iterator[int]:
        """The index of each copy's region, in the order in which they run."""
        for _, group in itertools.groupby(
            zip(self.loops, self.regions, strict=True), key=lambda pair: pair[0]
        ):
            body = [region.index for _, region in group]
            yield from body * self.n_layers

    @property
    def prices(self) -> Prices:
        """What a plan minimizes: the time of what runs twice, and of transfers."""
        return least_recompute(self.rates)

    @functools.cached_property
    def solver(self) -> Solver:
        """The integer program of one region."""
        return Solver(self.graph, self.prices)

    @functools.cached_property
    def everything(self) -> Choice:
        """The choice that recomputes nothing, all of it in device memory."""
        size = sum(value.bytes for value in self.graph.values)
        all_kept = evaluate(self.graph, self.prices, self.graph.ids())
        return self.solver.solve(size, max_flops=all_kept.recompute_flops)

    @functools.cached_property
    def curve(self) -> Frontier:
        """The choices of one region at all budgets."""
        return frontier(
            self.graph,
            self.prices,
            max_points=MAX_POINTS,
            host_bytes=self.host_bytes,
            least_host_bytes=LEAST_HOST_BYTES,
        )

    @property
    def stack(self) -> Stack:
        """The copies and their choices."""
        return Stack(
            frontier=self.curve,
            n_copies=self.n_copies,
            times=self.times,
            # Each more is one more program for the compiler.
            max_kinds=2 if self.n_layers > 1 else None,
        )

    def solve(self, budget_bytes: int) -> Choice:
        """The best choice of one region within a budget."""
        return self.solver.solve(
            budget_bytes,
            host_bytes=self.host_bytes,
            least_host_bytes=LEAST_HOST_BYTES,
            time_limit_s=SOLVE_S,
        )

    @functools.cached_property
    def time_solver(self) -> Solver:
        """As `solver`, for the time that keeping takes as well."""
        return Solver(self.graph, least_time(self.rates, scanned=self.is_scanned))

    def faster(self, than: Choice) -> Choice:
        """The fastest choice that keeps no more bytes and recomputes no more FLOPs.

        Keeping has a price here, so it may keep far less than another choice does.
        """
        host_bytes = min(self.host_bytes, than.host_bytes)
        return self._fastest(than.bytes, host_bytes, than.recompute_flops)

    def lighter(self, than: Choice) -> Choice | None:
        """The fastest that leaves to the host what it takes, at no more FLOPs."""
        n_bytes = than.bytes + than.host_bytes - self.host_bytes
        if not self.host_bytes or n_bytes < 0:
            return None
        try:
            return self._fastest(n_bytes, self.host_bytes, than.recompute_flops)
        except BudgetError:
            return None

    def _fastest(self, n_bytes: int, host_bytes: int, max_flops: float) -> Choice:
        found = self.time_solver.solve(
            n_bytes,
            host_bytes=host_bytes,
            least_host_bytes=LEAST_HOST_BYTES,
            max_flops=max_flops,
            time_limit_s=SOLVE_S,
        )
        moved = self.prices.host_byte * found.host_bytes
        price = found.recompute_s + found.keep_s + moved
        return dataclasses.replace(found, price=price)

    def seconds_of(self, choice: Choice) -> float:
        """Time of recomputing and of keeping in one run, by the model."""
        prices = self.time_solver.prices
        kept = prices.kept_byte * (choice.bytes + choice.host_bytes)
        moved = prices.host_byte * choice.host_bytes
        return choice.recompute_s + choice.keep_s + kept + moved

    def choice_of(self, policy: Policy) -> Choice:
        """What follows from a named policy."""
        region = self.regions[0]
        table = decisions(policy, region.jaxpr, region_path=region.path)
        return choice_of(self.graph, self.prices, table)

    def alike(self, choice: Choice) -> tuple[Share, ...]:
        """All copies with one choice."""
        return (Share(choice=choice, n_copies=self.n_copies),)


def find_kinds(
    regions: Sequence[Region],
    layers: Sequence[Layers],
    target: Target,
    *,
    allow_offload: bool,
    n_devices: int = 1,
) -> tuple[tuple[Kind, ...], dict[int, str]]:
    """Group the regions that can be planned, and say why the others cannot.

    Args:
        regions: All regions of a loss.
        layers: Of these, those in layer scans that can be split.
        target: For times.
        allow_offload: Whether values may wait in host memory.
        n_devices: Devices that share the step; figures are of one of them.

    Returns:
        The kinds, and by index of each outer region left as it is, the reason.
    """
    rates = rates_of(target)
    # A CPU's memory is the host's: an offload moves nothing and frees nothing.
    can_move = allow_offload and target.kind != "cpu"
    link = rates.host_link_bytes_s if can_move else 0.0
    left: dict[int, str] = {}
    known = {one.region.index: one for one in layers}
    groups: dict[tuple[str, int, int], list[Region]] = {}
    for region in regions:
        if region.depth:
            continue
        if reason := _why_not(region):
            left[region.index] = reason
        else:
            one = known.get(region.index)
            n_layers = 1 if one is None else one.n_layers
            key = (region.fingerprint, region.times, n_layers)
            groups.setdefault(key, []).append(region)
    kinds = []
    for (_, _, n_layers), group in groups.items():
        try:
            with compat.traced_as(group[0].eqn):
                graph = build_graph(group[0].jaxpr, rates)
        except GraphError as error:
            left.update((region.index, str(error)) for region in group)
            continue
        shards = compat.n_shards_around(group[0].eqn)
        graph = graph.share(max(n_devices // shards, 1))
        hidden = int(link * graph.forward_s) if math.isfinite(link) else 0
        kinds.append(
            Kind(
                regions=tuple(group),
                n_layers=n_layers,
                loops=tuple(_loop(region, known) for region in group),
                graph=graph,
                rates=rates,
                host_bytes=hidden,
            )
        )
    return tuple(kinds), left


def _loop(region: Region, layers: Mapping[int, Layers]) -> Hashable:
    one = layers.get(region.index)
    return region.index if one is None else one.loop


def _why_not(region: Region) -> str | None:
    if not region.reachable:
        return "it is reached only through a custom_vjp, or differentiated already"
    if region.in_rule:
        return "it stands in the derivative rule of a custom_jvp function"
    return None


def allotment(kinds: Sequence[Kind], shares: Sequence[Sequence[Share]]) -> Allotment:
    """The sums of what each kind does."""
    runs = [
        (kind.times * share.n_copies, share.choice)
        for kind, taken in zip(kinds, shares, strict=True)
        for share in taken
    ]
    return Allotment(
        shares=tuple(map(tuple, shares)),
        bytes=sum(n * choice.bytes for n, choice in runs),
        host_bytes=sum(n * choice.host_bytes for n, choice in runs),
        price=sum(n * choice.price for n, choice in runs),
    )


def solve_all(kinds: Sequence[Kind], budget_bytes: int) -> Allotment:
    """The best choices of all regions whose bytes together fit a budget.

    One lone kind with one choice for all is solved exactly. Points taken from each
    kind's frontier, with more than one for a kind of several copies, are better where
    what they leave of the budget, given to one kind after another, each solved exactly
    at what it may have, makes them so.
    """
    alike = None
    if len(kinds) == 1:
        (kind,) = kinds
        choice = kind.solve(budget_bytes // (kind.n_copies * kind.times))
        alike = allotment(kinds, [kind.alike(choice)])
        if kind.n_copies == 1:
            return alike
    found = choose([kind.stack for kind in kinds], budget_bytes, time_limit_s=SOLVE_S)
    found = _refined(kinds, found, budget_bytes)
    return found if alike is None or found.price < alike.price else alike


def _refined(kinds: Sequence[Kind], found: Allotment, budget_bytes: int) -> Allotment:
    shares = [list(taken) for taken in found.shares]
    left = budget_bytes - found.bytes
    for kind, taken in zip(kinds, shares, strict=True):
        for i, share in enumerate(taken):
            runs = kind.times * share.n_copies
            choice = kind.solve(share.choice.bytes + left // runs)
            if choice.price < share.choice.price:
                left -= runs * (choice.bytes - share.choice.bytes)
                taken[i] = dataclasses.replace(share, choice=choice)
    return allotment(kinds, shares)


def faster(kinds: Sequence[Kind], than: Allotment) -> Allotment:
    """Each region's fastest choice within the bytes and FLOPs of another one.

    By the model that prices keeping too: never slower, nor more recompute.
    """
    shares = [
        [
            dataclasses.replace(share, choice=kind.faster(share.choice))
            for share in taken
        ]
        for kind, taken in zip(kinds, than.shares, strict=True)
    ]
    return allotment(kinds, shares)


def estimated_s(kinds: Sequence[Kind], found: Allotment) -> float:
    """Seconds of recomputing and of keeping in one step, by the model."""
    return sum(
        kind.times * share.n_copies * kind.seconds_of(share.choice)
        for kind, shares in zip(kinds, found.shares, strict=True)
        for share in shares
    )


def by_layer(
    kinds: Sequence[Kind], found: Allotment
) -> Mapping[int, tuple[Choice, ...]]:
    """The choices of each region's layers, as they run, by the region's index.

    Later layers get the larger choices: their residuals are freed first, and at the
    start of the backward pass, where all residuals are still held, they recompute less.
    """
    table: dict[int, list[Choice]] = {}
    for kind, taken in zip(kinds, found.shares, strict=True):
        remaining = kind.copies()
        for share in sorted(taken, key=lambda share: share.choice.bytes):
            for _ in range(share.n_copies):
                table.setdefault(next(remaining), []).append(share.choice)
    return {index: tuple(choices) for index, choices in table.items()}


def same(kinds: Sequence[Kind], pick: Callable[[Kind], Any]) -> Allotment:
    """Every kind with one choice for all its copies."""
    return allotment(kinds, [kind.alike(pick(kind)) for kind in kinds])


def by_kind_sum(kinds: Sequence[Kind], found: Allotment, field: str) -> float:
    """A figure of choices, summed over all runs of all regions."""
    return sum(
        kind.times * share.n_copies * getattr(share.choice, field)
        for kind, shares in zip(kinds, found.shares, strict=True)
        for share in shares
    )
