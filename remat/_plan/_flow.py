"""A jaxpr as one flat dataflow: calls looked through, scan bodies opened.

Values are numbered. A value made in the body of a `scan` stands for all of its slices
together: it counts as often as the loop runs, unless it depends on nothing that changes
from step to step. `while`, `cond`, kernels and other programs within an equation stay
whole.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat

_CALLS = (
    compat.CALL_PRIMITIVES
    | compat.REGION_PRIMITIVES
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr"}
    | {"xla_metadata_call"}
)
"""Equations whose first jaxpr takes their operands and gives their results."""


@dataclasses.dataclass(slots=True)
class FlowValue:
    """One array of the program, or all slices of one in a loop."""

    aval: Any
    """Type of the array, or of a slice."""
    level: int
    """How many loops it changes in."""
    copies: int
    """How many slices there are."""


@dataclasses.dataclass(slots=True)
class FlowEquation:
    """One computation of the program."""

    eqn: jec.JaxprEqn
    """The equation as traced."""
    scopes: tuple[str, ...]
    """Name scopes around it, those of the calls it is in included."""
    operands: tuple[int, ...]
    """Values it reads, each once."""
    read: tuple[int | None, ...]
    """The value of each operand of `eqn`; None for a literal."""
    results: tuple[int, ...]
    """Values it makes."""
    times: int
    """How often it runs."""
    needs: tuple[frozenset[int], ...] | None = None
    """For each result, the values it depends on; None: all operands."""
    moves: bool = False
    """Whether it is only the hand-over of a value from or to a loop."""


@dataclasses.dataclass(slots=True)
class Flow:
    """A program as values and equations, in an order in which they can run.

    Only the hand-over of a loop's carry stands before what it reads.
    """

    values: list[FlowValue]
    equations: list[FlowEquation]
    inputs: tuple[int, ...]
    """The values of the program's arguments."""
    outputs: tuple[int | None, ...]
    """The values of the program's results; None for a literal."""

    def reachable(self, start: Iterable[int]) -> set[int]:
        """The values that depend on those of `start`, these included."""
        reached = set(start)
        readers: dict[int, list[FlowEquation]] = {}
        for equation in self.equations:
            for operand in equation.operands:
                readers.setdefault(operand, []).append(equation)
        pending = list(reached)
        while pending:
            value = pending.pop()
            for equation in readers.get(value, ()):
                for i, result in enumerate(equation.results):
                    depends = equation.needs is None or value in equation.needs[i]
                    if depends and result not in reached:
                        reached.add(result)
                        pending.append(result)
        return reached

    def ancestors(self, ends: Iterable[int]) -> set[int]:
        """The positions of the equations that values in `ends` are computed by."""
        producer = self.producers()
        pending, found = list(ends), set()
        while pending:
            position = producer.get(pending.pop())
            if position is None or position in found:
                continue
            found.add(position)
            pending.extend(self.equations[position].operands)
        return found

    def producers(self) -> dict[int, int]:
        """The position of the equation that makes each value; none for inputs."""
        return {
            result: position
            for position, equation in enumerate(self.equations)
            for result in equation.results
        }


def flow_of(closed: Any) -> Flow:
    """Flatten a closed jaxpr."""
    jaxpr = compat.open_jaxpr(closed)
    builder = _Builder()
    inputs = [builder.new(var.aval, level=0) for var in jaxpr.invars]
    frame = _Frame(scopes=(), loops=(1,))
    outputs = builder.body(jaxpr, inputs, frame)
    return Flow(builder.values, builder.equations, tuple(inputs), tuple(outputs))


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    scopes: tuple[str, ...]
    loops: tuple[int, ...]
    """How often each enclosing loop's body runs in all, outermost first."""
    devices: int = 1
    """Devices that run it side by side: figures are of all of them together."""

    def inside(self, eqn: jec.JaxprEqn, steps: int | None = None) -> "_Frame":
        loops = self.loops if steps is None else (*self.loops, self.loops[-1] * steps)
        return _Frame(self.scopes + compat.scopes(eqn), loops, self.devices)


class _Builder:
    def __init__(self) -> None:
        self.values: list[FlowValue] = []
        self.equations: list[FlowEquation] = []

    def new(self, aval: Any, level: int, copies: int = 1) -> int:
        self.values.append(FlowValue(aval=aval, level=level, copies=copies))
        return len(self.values) - 1

    def body(
        self, jaxpr: jec.Jaxpr, inputs: Sequence[int | None], frame: _Frame
    ) -> list[int | None]:
        """Add a jaxpr's equations; returns the values of its results."""
        env: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.new(var.aval, level=0)
        for eqn in jaxpr.eqns:
            operands = [self._read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._add(eqn, operands, frame), strict=True))
        return [self._read(env, atom) for atom in jaxpr.outvars]

    @staticmethod
    def _read(env: Mapping[Any, int | None], atom: Any) -> int | None:
        return None if compat.is_literal(atom) else env[atom]

    def _add(
        self, eqn: jec.JaxprEqn, operands: list[int | None], frame: _Frame
    ) -> Sequence[int | None]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, operands, frame)
        if name == "shard_map":
            n = frame.devices * compat.n_shards(eqn)
            inner = dataclasses.replace(frame.inside(eqn), devices=n)
            return self.body(_called(eqn), operands, inner)
        if name in _CALLS:
            return self.body(_called(eqn), operands, frame.inside(eqn))
        return self._leaf(eqn, operands, frame)

    def _leaf(
        self, eqn: jec.JaxprEqn, operands: Sequence[int | None], frame: _Frame
    ) -> tuple[int, ...]:
        read = tuple(dict.fromkeys(v for v in operands if v is not None))
        level = max((self.values[v].level for v in read), default=0)
        results = tuple(
            self.new(var.aval, level, frame.loops[level] * frame.devices)
            for var in eqn.outvars
        )
        self.equations.append(
            FlowEquation(
                eqn=eqn,
                scopes=frame.scopes + compat.scopes(eqn),
                operands=read,
                read=tuple(operands),
                results=results,
                times=frame.loops[-1] * frame.devices,
                needs=_cond_needs(eqn, operands),
            )
        )
        return results

    def _scan(
        self, eqn: jec.JaxprEqn, operands: list[int | None], frame: _Frame
    ) -> list[int | None]:
        binders = compat.scan_binders(eqn)
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        inner = frame.inside(eqn, steps=eqn.params["length"])
        level = len(frame.loops)
        copies = inner.loops[-1] * inner.devices
        inputs = list(operands)
        for position in (*binders.init, *binders.xs):
            inputs[position] = self.new(body.invars[position].aval, level, copies)
        for position in binders.xs:
            self._hand_over(eqn, [operands[position]], inputs[position], inner)
        carry_at = len(self.equations)
        results = self.body(body, inputs, inner)
        for position, out in zip(binders.init, binders.carry_out, strict=True):
            sources = [operands[position], results[out]]
            self._hand_over(eqn, sources, inputs[position], inner, at=carry_at)
        outputs: list[int | None] = list(results)
        for out, var in enumerate(eqn.outvars):
            outer = len(frame.loops) - 1
            copies = frame.loops[-1] * frame.devices
            outputs[out] = self.new(var.aval, outer, copies)
            self._hand_over(eqn, [results[out]], outputs[out], frame)
        return outputs

    def _hand_over(
        self,
        eqn: jec.JaxprEqn,
        sources: Sequence[int | None],
        target: int | None,
        frame: _Frame,
        at: int | None = None,
    ) -> None:
        assert target is not None
        move = FlowEquation(
            eqn=eqn,
            scopes=frame.scopes,
            operands=tuple(dict.fromkeys(v for v in sources if v is not None)),
            read=tuple(sources),
            results=(target,),
            times=frame.loops[-1] * frame.devices,
            moves=True,
        )
        self.equations.insert(len(self.equations) if at is None else at, move)


def _called(eqn: jec.JaxprEqn) -> jec.Jaxpr:
    return compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))


def _cond_needs(
    eqn: jec.JaxprEqn, operands: Sequence[int | None]
) -> tuple[frozenset[int], ...] | None:
    """What each result of a `cond` depends on: its branches mix several things."""
    if eqn.primitive.name != "cond":
        return None
    index, rest = operands[0], operands[1:]
    needs = [set() if index is None else {index} for _ in eqn.outvars]
    for branch in eqn.params["branches"]:
        flow = flow_of(branch)
        for position, value in enumerate(rest):
            if value is None:
                continue
            reached = flow.reachable([flow.inputs[position]])
            for result, out in enumerate(flow.outputs):
                if out in reached:
                    needs[result].add(value)
    return tuple(map(frozenset, needs))
