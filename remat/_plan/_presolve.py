"""Make a region's graph small before it is solved, without losing an optimum.

Each step keeps the least price at every budget:

- what needs nothing and costs nothing, in price or FLOPs, is always there;
- a result that costs nothing to make from one value, and is no smaller, is that value;
- an equation whose only result is read by one other equation alone, and is not worth
  keeping, is part of that other. It is not worth keeping when it has no name, or when
  the other's only result is no larger: keeping that one instead spares more.
"""

import dataclasses
from collections.abc import Iterable

from remat._plan._graph import Graph
from remat._plan._prices import Prices


@dataclasses.dataclass(slots=True)
class Node:
    """One or more equations that run together."""

    price: float
    flops: float
    forward: bool
    operands: set[int]
    results: set[int]

    @property
    def is_free(self) -> bool:
        return not self.price and not self.flops


@dataclasses.dataclass(slots=True)
class Item:
    """A value that may be kept, or must be made again.

    Its price is of keeping it, beside that of its bytes.
    """

    bytes: int
    producer: int
    can_keep: bool
    price: float
    required: bool
    readers: set[int]


@dataclasses.dataclass(slots=True)
class Problem:
    """What is left to decide: nodes and items by number."""

    nodes: dict[int, Node]
    items: dict[int, Item]


def presolve(graph: Graph, prices: Prices) -> Problem:
    """The problem of a graph, with the same optima and fewer unknowns."""
    problem = _whole(graph, prices)
    _drop_free(problem)
    _drop_unread(problem)
    pending = set(problem.items)
    while pending:
        number = pending.pop()
        if number in problem.items:
            pending |= _alias(problem, number) or _merge(problem, number)
    return problem


def _whole(graph: Graph, prices: Prices) -> Problem:
    required = set(graph.required)
    nodes = {
        n: Node(
            price=prices.of(equation),
            flops=equation.flops,
            forward=equation.forward,
            operands=set(equation.operands),
            results=set(equation.results),
        )
        for n, equation in enumerate(graph.equations)
    }
    items = {
        v: Item(
            bytes=value.bytes,
            producer=value.producer,
            can_keep=value.id is not None,
            price=prices.second * value.keep_s,
            required=v in required,
            readers=set(),
        )
        for v, value in enumerate(graph.values)
        if value.producer is not None
    }
    for n, node in nodes.items():
        node.operands &= items.keys()
        node.results &= items.keys()
        for v in node.operands:
            items[v].readers.add(n)
    return Problem(nodes=nodes, items=items)


def _drop_free(problem: Problem) -> None:
    pending = list(problem.nodes)
    while pending:
        n = pending.pop()
        node = problem.nodes.get(n)
        if node is None or node.operands or not node.is_free:
            continue
        for v in node.results:
            for reader in problem.items.pop(v).readers:
                problem.nodes[reader].operands.discard(v)
                pending.append(reader)
        del problem.nodes[n]


def _drop_unread(problem: Problem) -> None:
    """Drop what nothing needs, from the ends backward."""
    pending = list(problem.items)
    while pending:
        v = pending.pop()
        item = problem.items.get(v)
        if item is None or item.required or item.readers:
            continue
        node = problem.nodes[item.producer]
        node.results.discard(v)
        del problem.items[v]
        if not node.results:
            for operand in node.operands:
                problem.items[operand].readers.discard(item.producer)
            pending.extend(node.operands)
            del problem.nodes[item.producer]


def _alias(problem: Problem, w: int) -> set[int]:
    """Replace a value by the one it is a free view of; returns what to look at next."""
    item = problem.items[w]
    node = problem.nodes[item.producer]
    if not node.is_free or len(node.operands) != 1 or node.results != {w}:
        return set()
    (u,) = node.operands
    source = problem.items[u]
    if item.can_keep and not _no_worse_kept(source, item):
        return set()
    source.required |= item.required
    source.readers.discard(item.producer)
    source.readers |= item.readers
    for reader in item.readers:
        problem.nodes[reader].operands.discard(w)
        problem.nodes[reader].operands.add(u)
    del problem.nodes[item.producer], problem.items[w]
    return {u, *_around(problem, source.readers)}


def _merge(problem: Problem, u: int) -> set[int]:
    """Make the equation that makes a value part of the only one that reads it."""
    item = problem.items[u]
    first = item.producer
    maker = problem.nodes[first]
    if item.required or len(item.readers) != 1 or maker.results != {u}:
        return set()
    (second,) = item.readers
    reader = problem.nodes[second]
    if second == first or not _one_pass(maker, reader):
        return set()
    if item.can_keep and not _better_kept_after(problem, item, reader):
        return set()
    reader.price += maker.price
    reader.flops += maker.flops
    reader.operands = (reader.operands - {u}) | maker.operands
    for v in maker.operands:
        problem.items[v].readers.discard(first)
        problem.items[v].readers.add(second)
    del problem.nodes[first], problem.items[u]
    return reader.operands | reader.results


def _one_pass(maker: Node, reader: Node) -> bool:
    """Whether both run in the same passes, or the first may run in any number."""
    return maker.forward == reader.forward or maker.is_free


def _better_kept_after(problem: Problem, item: Item, reader: Node) -> bool:
    if len(reader.results) != 1:
        return False
    (w,) = reader.results
    return _no_worse_kept(problem.items[w], item)


def _no_worse_kept(one: Item, other: Item) -> bool:
    return one.can_keep and one.bytes <= other.bytes and one.price <= other.price


def _around(problem: Problem, nodes: Iterable[int]) -> set[int]:
    return {v for n in nodes for v in problem.nodes[n].results}
