"""Make regions of the module calls in an unrolled model.

Flax opens a name scope for every module call, so the equations of one call share a
frame of the name stack that no other call has, and modules are found by its path.
What one call computes is not always one piece: equations of other modules may stand
between, need it and be needed by it. Then it becomes several regions.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._naming._op_name import modules
from remat._regions._enclose import ENTERED, enclose, is_region_already, reads, works
from remat._regions._rewrite import Memo
from remat._regions._sites import Place, place_inside
from remat.policies._by_place import ends_with

_OUTSIDE = Place()
_EFFECTS = object()
"""Stands for the order in which effects happen, as a value that they hand on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One module call, as far as one jaxpr shows it."""

    frame: int
    """Identity of the frame of its scope."""
    n_frames: int
    """Frames of its equations' name stacks up to that one."""


class ModuleRegions:
    """One pass over a program that makes regions of the modules that patterns fit."""

    def __init__(self, patterns: Sequence[str], memo: Memo) -> None:
        self.patterns = tuple(patterns)
        self.memo = memo
        self.matched: set[str] = set()
        self.paths: dict[str, None] = {}

    def rewrite(
        self, jaxpr: compat.AnyJaxpr, place: Place = _OUTSIDE
    ) -> compat.AnyJaxpr:
        """The program with regions in it; itself where there are none to make."""
        entries = self.memo.entries(jaxpr)
        key = (self.patterns, place.scopes, place.context == "scan", place.depth)
        if key not in entries:
            watched = ModuleRegions(self.patterns, self.memo)
            new = compat.with_open(jaxpr, watched._rewrite_open(jaxpr, place))
            entries[key] = new, watched.matched, watched.paths
        new, matched, paths = entries[key]
        self.matched |= matched
        self.paths |= paths
        return new

    def _rewrite_open(self, jaxpr: compat.AnyJaxpr, place: Place) -> jec.Jaxpr:
        opened = compat.open_jaxpr(jaxpr)
        calls = [self._call(eqn, place) for eqn in opened.eqns]
        eqns = [
            eqn if call else self._inside(eqn, place)
            for eqn, call in zip(opened.eqns, calls, strict=True)
        ]
        if any(calls):
            nodes = _in_order(_nodes(eqns, calls))
            if place.depth and len(_at_work(nodes)) == 1:
                return opened  # a region of this one module
            eqns = list(_enclosed(opened, nodes, prevent_cse=place.context != "scan"))
        elif all(new is old for new, old in zip(eqns, opened.eqns, strict=True)):
            return opened
        return opened.replace(eqns=eqns)

    def _inside(self, eqn: jec.JaxprEqn, place: Place) -> jec.JaxprEqn:
        name = eqn.primitive.name
        if name not in ENTERED and name not in compat.REGION_PRIMITIVES:
            return eqn
        is_region = name in compat.REGION_PRIMITIVES
        inner = dataclasses.replace(place_inside(place, eqn), depth=int(is_region))
        params = compat.map_jaxprs(eqn.params, lambda sub: self.rewrite(sub, inner))
        if all(params[key] is eqn.params[key] for key in params):
            return eqn
        return eqn.replace(params=params)

    def _call(self, eqn: jec.JaxprEqn, place: Place) -> _Call | None:
        """The outermost call that an equation belongs to and a pattern fits."""
        scopes = list(place.scopes)
        for position, frame in compat.scope_frames(eqn):
            scopes.append(frame.name)
            path = module_path(scopes)
            self.paths[path] = None
            fitting = {p for p in self.patterns if ends_with(path, p)}
            if fitting:
                self.matched |= fitting
                return _Call(id(frame), position + 1)
        return None


def module_path(scopes: Sequence[str]) -> str:
    """The path of the modules that scopes stand for."""
    return "/".join(modules([part for s in scopes for part in s.split("/") if part]))


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """Equations that are to stand together."""

    number: int
    call: _Call | None
    eqns: list[jec.JaxprEqn] = dataclasses.field(default_factory=list)
    last: int = 0
    """Position of the last of them."""
    sources: set[int] = dataclasses.field(default_factory=set)
    """The nodes whose values it reads."""
    needs: int = 0
    """Those, and what they need, as bits."""


def _at_work(nodes: Sequence[_Node]) -> list[_Node]:
    return [node for node in nodes if any(works(eqn) for eqn in node.eqns)]


def _enclosed(
    jaxpr: jec.Jaxpr, nodes: Sequence[_Node], *, prevent_cse: bool
) -> Iterator[jec.JaxprEqn]:
    """The equations of one jaxpr, with those of each call made a region."""
    read_by: dict[Any, set[int]] = {}
    for node in nodes:
        for var in reads(node.eqns):
            read_by.setdefault(var, set()).add(node.number)
    returned = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    for node in nodes:
        region = None
        if node.call and not is_region_already(node.eqns):
            made = {var for eqn in node.eqns for var in eqn.outvars}
            outside = {v for v in made if read_by.get(v, set()) - {node.number}}
            region = enclose(
                node.eqns,
                outside | (made & returned),
                prevent_cse=prevent_cse,
                n_frames=node.call.n_frames,
            )
        yield from node.eqns if region is None else [region]


def _nodes(eqns: Sequence[jec.JaxprEqn], calls: Sequence[_Call | None]) -> list[_Node]:
    """Equations put together by call, as far as no node then needs itself."""
    nodes: list[_Node] = []
    made_in: dict[Any, _Node] = {}
    open_nodes: dict[int, _Node] = {}
    for position, (eqn, call) in enumerate(zip(eqns, calls, strict=True)):
        read = [*reads([eqn]), *([_EFFECTS] if eqn.effects else [])]
        sources = {made_in[v].number: made_in[v] for v in read if v in made_in}
        node = open_nodes.get(call.frame) if call else None
        if node is not None:
            sources.pop(node.number, None)
        needs = 0
        for source in sources.values():
            needs |= source.needs | 1 << source.number
        if node is None or needs >> node.number & 1:
            node = _Node(len(nodes), call)
            nodes.append(node)
            if call:
                open_nodes[call.frame] = node
        node.eqns.append(eqn)
        node.last = position
        node.sources |= set(sources)
        if len(node.eqns) > 1 and needs & ~node.needs:
            for other in nodes:
                if other.needs >> node.number & 1:
                    other.needs |= needs
        node.needs |= needs
        made_in.update((var, node) for var in eqn.outvars)
        if eqn.effects:
            made_in[_EFFECTS] = node
    return nodes


def _in_order(nodes: Sequence[_Node]) -> list[_Node]:
    """The nodes, each after those that it needs, else as their last equations were."""
    waiting = {node.number: len(node.sources) for node in nodes}
    users: dict[int, list[_Node]] = {}
    for node in nodes:
        for source in node.sources:
            users.setdefault(source, []).append(node)
    ready = [(node.last, node.number) for node in nodes if not node.sources]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(nodes[number])
        for user in users.get(number, ()):
            waiting[user.number] -= 1
            if not waiting[user.number]:
                heapq.heappush(ready, (user.last, user.number))
    assert len(ordered) == len(nodes), "regions need each other"
    return ordered
