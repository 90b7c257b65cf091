"""The graph of a region: what its backward pass needs, and how to compute it.

The region, with every value named, is differentiated by JAX itself (`jax.jvp`, which
is what `jax.checkpoint` differentiates too). What depends on a tangent is the linear
part, which the backward pass transposes; the rest is known in the forward pass. What
the linear part reads of the rest is required. Every equation that the required values
come from is one that the backward pass runs again, unless a value in between is kept.

Values that only a derivative rule makes stand in the graph as well. Their equations run
once with everything kept (in the forward pass) and once with nothing kept (in the
backward pass), so they add work only where both passes need them: `Equation.forward`
tells them apart.

What depends on no input, such as a causal mask, is the same in every layer and every
pass. Compilers fold it or make it once, so it takes no time and is never kept.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._equations import variables
from remat._naming._labels import Label
from remat._naming._naming import name_region
from remat._naming._settle import is_inexact
from remat._plan._costs import Rates, array_bytes, equation_cost, equation_seconds
from remat._plan._flow import Flow, FlowEquation, flow_of
from remat._plan._statistics import apart_seconds


class GraphError(ValueError):
    """A region cannot be looked at by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One array of a region, or all slices of one made in a loop inside it."""

    id: str | None
    """Name by which it can be kept; None where there is none."""
    bytes: int
    """Size of all slices together."""
    producer: int | None
    """Position of the equation that makes it; None for what is always there (region
    inputs, and results of equations with side effects, which run only once)."""
    keep_s: float = 0.0
    """Time that keeping it adds on the target, beside the traffic of its bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Equation:
    """One computation of a region."""

    primitive: str
    """Name of the primitive."""
    operands: tuple[int, ...]
    """Values that it reads."""
    results: tuple[int, ...]
    """Values that it makes."""
    flops: float
    """Arithmetic of all its runs."""
    matmul_flops: float
    """Of these, matrix products, convolutions and kernels."""
    seconds: float
    """Time of all its runs on the target."""
    forward: bool
    """Whether the region's own results come from it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What can be kept of a region, and what the backward pass runs again if not."""

    values: tuple[Value, ...]
    """The arrays."""
    equations: tuple[Equation, ...]
    """The computations; only those that `required` comes from."""
    required: tuple[int, ...]
    """The values that the backward pass reads."""
    labels: Mapping[str, Label] = dataclasses.field(repr=False)
    """What each id stands for."""
    readers: Mapping[int, str] = dataclasses.field(repr=False)
    """For each required value, the equation of the backward pass that reads it."""
    forward_flops: float
    """Arithmetic of the region's forward pass."""
    forward_matmul_flops: float
    """Of these, matrix products, convolutions and kernels."""
    forward_s: float
    """Time of the region's forward pass on the target."""

    def ids(self) -> frozenset[str]:
        """The ids of all values that can be kept."""
        return frozenset(value.id for value in self.values if value.id is not None)

    def share(self, n_devices: int) -> "Graph":
        """What one of several devices holds and does, if all is split evenly."""
        if n_devices == 1:
            return self
        return dataclasses.replace(
            self,
            values=tuple(
                dataclasses.replace(
                    value,
                    bytes=-(-value.bytes // n_devices),
                    keep_s=value.keep_s / n_devices,
                )
                for value in self.values
            ),
            equations=tuple(
                dataclasses.replace(
                    equation,
                    flops=equation.flops / n_devices,
                    matmul_flops=equation.matmul_flops / n_devices,
                    seconds=equation.seconds / n_devices,
                )
                for equation in self.equations
            ),
            forward_flops=self.forward_flops / n_devices,
            forward_matmul_flops=self.forward_matmul_flops / n_devices,
            forward_s=self.forward_s / n_devices,
        )


def build_graph(
    jaxpr: jec.Jaxpr, rates: Rates, active: Sequence[bool] | None = None
) -> Graph:
    """Build the graph of a region.

    Args:
        jaxpr: The region's open jaxpr (`Region.jaxpr`).
        rates: Figures of the target, for times.
        active: Which of the region's inputs are differentiated; None: all that have
            derivatives. Fewer make fewer values required.

    Returns:
        The graph. A region inside the region is part of it: planning the outer one
        takes the place of the inner ones' policies.

    Raises:
        GraphError: The region stands inside a `shard_map` and uses its mesh axes.
    """
    named, labels = name_region(jaxpr)
    flow, n_results = _differentiated(named, active)
    n_active = len(flow.inputs) - len(jaxpr.invars)
    linear = flow.reachable(flow.inputs[len(flow.inputs) - n_active :])
    results = [v for v in flow.outputs[:n_results] if v is not None]
    tangents = [v for v in flow.outputs[n_results:] if v is not None]
    return _Assembly(
        flow,
        rates,
        labels,
        linear,
        forward=flow.ancestors(results),
        backward=flow.ancestors(tangents),
    ).graph()


def _differentiated(
    jaxpr: jec.Jaxpr, active: Sequence[bool] | None
) -> tuple[Flow, int]:
    """The flow from inputs and tangents to results and their tangents."""
    avals = [var.aval for var in jaxpr.invars]
    if active is None:
        active = [True] * len(avals)
    varying = [i for i, yes in enumerate(active) if yes and is_inexact(avals[i])]
    closed = compat.ClosedJaxpr(jaxpr, ())

    def both(primals: list[Any], tangents: list[Any]) -> Any:
        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(varying, inputs, strict=True))
            flat = [given.get(i, primal) for i, primal in enumerate(primals)]
            return compat.evaluate(closed, flat)

        return jax.jvp(function, [primals[i] for i in varying], tangents)

    tangents = [avals[i].to_tangent_aval() for i in varying]
    try:
        traced, _ = compat.trace(both, avals, tangents)
    except NameError as error:
        raise GraphError(
            "the region stands inside a shard_map and uses its mesh axes, so it cannot "
            f"be differentiated by itself ({error}); put the region around the "
            "shard_map, or give it a policy by name"
        ) from error
    return flow_of(traced), len(jaxpr.outvars)


class _Assembly:
    """From the flow of a differentiated region to its graph."""

    def __init__(
        self,
        flow: Flow,
        rates: Rates,
        labels: Mapping[str, Label],
        linear: set[int],
        forward: set[int],
        backward: set[int],
    ):
        self.flow = flow
        self.rates = rates
        self.labels = labels
        self.linear = linear
        self.forward = forward
        self.backward = backward
        self.n_values = len(flow.values)
        self.varying = flow.reachable(flow.inputs)
        """Values that depend on an input."""
        self.required: dict[int, str] = {}
        self.whole: dict[int, int] = {}
        """Equations with results of both kinds, by the value that stands for what the
        linear half reads of the known half."""

    def graph(self) -> Graph:
        for position in sorted(self.backward):
            self._require(position, self.flow.equations[position])
        ancestors = self.flow.ancestors(
            [v for v in self.required if v < self.n_values]
        ) | {p for p in self.whole.values()}
        ancestors |= self.flow.ancestors(
            v
            for p in self.whole.values()
            for v in self.flow.equations[p].operands
            if v not in self.linear
        )
        order = sorted(ancestors)
        position_of = {old: new for new, old in enumerate(order)}
        forward = [self._equation(p) for p in sorted(self.forward)]
        return Graph(
            values=tuple(self._values(position_of)),
            equations=tuple(self._equation(p) for p in order),
            required=tuple(self.required),
            labels=self.labels,
            readers=dict(self.required),
            forward_flops=sum(e.flops for e in forward),
            forward_matmul_flops=sum(e.matmul_flops for e in forward),
            forward_s=sum(e.seconds for e in forward),
        )

    def _require(self, position: int, equation: FlowEquation) -> None:
        """Note what the backward pass reads, if the equation is part of it."""
        is_linear = [result in self.linear for result in equation.results]
        if not any(is_linear):
            return
        known = [v for v in equation.operands if v not in self.linear]
        if not all(is_linear):  # it cannot be taken apart, so all of it runs again
            known = [self.n_values + len(self.whole)]
            self.whole[known[0]] = position
        for value in known:
            self.required.setdefault(value, _described(equation))

    def _values(self, position_of: Mapping[int, int]) -> list[Value]:
        producer = self.flow.producers()
        ids = self._ids()
        apart = apart_seconds(self.flow, self.linear, self.rates)
        values = []
        for number, value in enumerate(self.flow.values):
            position = producer.get(number)
            if position is not None and self._has_effects(position):
                position = None
            values.append(
                Value(
                    id=ids.get(number)
                    if position is not None and number in self.varying
                    else None,
                    bytes=value.copies * array_bytes(value.aval),
                    producer=None if position is None else position_of.get(position),
                    keep_s=apart.get(number, 0.0),
                )
            )
        for position in self.whole.values():
            values.append(Value(id=None, bytes=0, producer=position_of[position]))
        return values

    def _has_effects(self, position: int) -> bool:
        return bool(self.flow.equations[position].eqn.effects)

    def _known_part(self, equation: FlowEquation) -> jec.JaxprEqn:
        """A `cond` without what its branches add for derivatives, for its cost."""
        eqn = equation.eqn
        if eqn.primitive.name != "cond":
            return eqn
        linear = [v in self.linear for v in equation.read[1:]]
        branches = tuple(_primal_part(b, linear) for b in eqn.params["branches"])
        return eqn.replace(params={**eqn.params, "branches": branches})

    def _ids(self) -> dict[int, str]:
        return {
            equation.results[0]: equation.eqn.params["name"]
            for equation in self.flow.equations
            if equation.eqn.primitive is compat.name_p
            and equation.eqn.params["name"] in self.labels
        }

    def _equation(self, position: int) -> Equation:
        equation = self.flow.equations[position]
        extra = tuple(v for v, p in self.whole.items() if p == position)
        known = tuple(v for v in equation.results if v not in self.linear)
        primitive = equation.eqn.primitive.name
        if equation.moves or primitive == "name":
            flops = matmul_flops = seconds = 0.0
        else:
            cost = equation_cost(self._known_part(equation))
            flops = equation.times * cost.flops
            matmul_flops = equation.times * cost.matmul_flops
            seconds = equation.times * equation_seconds(equation.eqn, self.rates)
        if self.varying.isdisjoint(equation.results):
            seconds = 0.0
        return Equation(
            primitive=primitive,
            operands=tuple(v for v in equation.operands if v not in self.linear),
            results=known + extra,
            flops=flops,
            matmul_flops=matmul_flops,
            seconds=seconds,
            forward=position in self.forward,
        )


def _primal_part(branch: Any, linear: Sequence[bool]) -> Any:
    """A branch, cut down to what its results but no tangents need."""
    jaxpr = compat.open_jaxpr(branch)
    depends = {v for v, yes in zip(jaxpr.invars, linear, strict=True) if yes}
    for eqn in jaxpr.eqns:
        if any(v in depends for v in variables(eqn)):
            depends.update(eqn.outvars)
    needed = {v for v in jaxpr.outvars if not compat.is_literal(v) and v not in depends}
    known = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(variables(eqn))
            known.insert(0, eqn)
    return compat.with_open(branch, jaxpr.replace(eqns=known))


def _described(equation: FlowEquation) -> str:
    """An equation of the backward pass, as a reader can find it in the model."""
    path = "/".join(equation.scopes)
    line = compat.source_line(equation.eqn)
    at = f" at {path}" if path else ""
    return f"{equation.eqn.primitive.name}{at}" + (f" ({line})" if line else "")
