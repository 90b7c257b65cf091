"""What JAX does with one region under one policy: what is kept, what runs again.

The region is differentiated by JAX itself (`jax.jvp`), as it would be with its policy,
and the policy is asked what JAX asks it. What depends on a tangent is the linear part,
which the backward pass transposes; what that reads of the rest is required; what is
required, or needed by what runs again, and neither kept nor an input, runs again.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._cost._jaxpr import jaxpr_cost
from remat._jaxprs._equations import single_equation, variables
from remat._naming._settle import is_inexact
from remat._plan._flow import Flow, FlowEquation, flow_of
from remat.policies import Decision

SAME_VALUE = frozenset(
    "bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p "
    "dynamic_slice name reshape sharding_constraint slice squeeze stop_gradient "
    "transpose".split()
)
"""Primitives whose result is their first operand in another dtype, layout or part."""
MATMUL_LIKE = frozenset(
    "dot_general ragged_dot ragged_dot_general scaled_dot scaled_matmul_wrapper "
    "conv_general_dilated".split()
)
KERNELS = frozenset("pallas_call tpu_custom_call custom_call ffi_call".split())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Differentiated:
    """The known part of a differentiated region: values and equations by number.

    No policy changes it, so it is worked out once for all of them.
    """

    flow: Flow
    known: tuple[int, ...]
    """Positions of the equations that depend on no tangent, in order."""
    forward: frozenset[int]
    """Positions of those that the region's results come from. The others are what
    derivatives add, such as the cosine of a sine."""
    required: frozenset[int]
    """Values that the backward pass reads."""
    results: frozenset[int]
    """Values that the region returns."""
    inputs: frozenset[int]
    """Values that are the region's inputs, in whatever dtype or layout."""
    makers: dict[int, int]
    """The position of the equation that makes each value; none for an input."""
    readers: dict[int, list[int]]
    """The positions of the known equations that read each value."""

    def under(self, policy: Callable[..., Any] | None) -> "RegionFlow":
        """What is kept and what runs again.

        Args:
            policy: As `jax.checkpoint` takes it; None keeps nothing.
        """
        decisions = _decisions(self.flow, self.known, policy)
        rerun = _rerun(self.flow, self.makers, self.required, decisions)
        again = (value for p in rerun for value in self.flow.equations[p].operands)
        known = {f.name: getattr(self, f.name) for f in _KNOWN}
        return RegionFlow(
            **known,
            decisions=decisions,
            rerun=rerun,
            needed=self.required.union(again),
        )


_KNOWN = dataclasses.fields(Differentiated)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionFlow(Differentiated):
    """A differentiated region under a policy."""

    decisions: dict[int, Decision]
    """What the policy answers for the equations it keeps, by position."""
    rerun: frozenset[int]
    """Positions of the equations that the backward pass runs again."""
    needed: frozenset[int]
    """Values that the backward pass, or what runs again for it, reads."""

    def equation(self, position: int) -> FlowEquation:
        return self.flow.equations[position]

    def named(self, *primitives: str) -> list[int]:
        """Positions of the equations of some primitives."""
        return [
            p
            for p in self.known
            if self.equation(p).eqn.primitive.name in primitives
            and not self.equation(p).moves
        ]

    def stored(self) -> dict[int, int]:
        """Values that are kept and of use, with their bytes."""
        return {
            value: self.bytes(value)
            for position in self.decisions
            for value in self.equation(position).results
            if value in self.needed
        }

    def bytes(self, value: int) -> int:
        aval, copies = self.flow.values[value].aval, self.flow.values[value].copies
        return aval.size * aval.dtype.itemsize * copies

    def flops(self, positions: Iterable[int]) -> float:
        """Arithmetic of some equations, all their runs."""
        return sum(_flops(self.equation(p)) for p in positions)


class UnreadableRegion(Exception):
    """A region that cannot be differentiated by itself; says why."""


def differentiate(jaxpr: jec.Jaxpr) -> Differentiated:
    """Differentiate a region, and tell its known part from the linear one.

    Args:
        jaxpr: The region's open jaxpr, with the names its policy goes by.

    Returns:
        The known part.

    Raises:
        UnreadableRegion: The region uses mesh axes of a `shard_map` around it, or holds
            what has no derivative by an input that the program takes none by.
    """
    try:
        traced = _traced_derivative(jaxpr)
    except Exception as error:  # whatever a rule of somebody else's raises
        raise UnreadableRegion(str(error).strip().partition("\n")[0]) from error
    flow = flow_of(traced)
    n_inputs, n_results = len(jaxpr.invars), len(jaxpr.outvars)
    linear = flow.reachable(flow.inputs[n_inputs:])
    known = tuple(
        position
        for position, equation in enumerate(flow.equations)
        if not any(value in linear for value in equation.results)
    )
    results = [value for value in flow.outputs[:n_results] if value is not None]
    readers: dict[int, list[int]] = {}
    for position in known:
        for value in flow.equations[position].operands:
            readers.setdefault(value, []).append(position)
    return Differentiated(
        flow=flow,
        known=known,
        forward=frozenset(flow.ancestors(results)),
        required=_required(flow, linear, flow.outputs[n_results:]),
        results=frozenset(results),
        inputs=_inputs(flow, flow.inputs[:n_inputs]),
        makers=flow.producers(),
        readers=readers,
    )


def _traced_derivative(jaxpr: jec.Jaxpr) -> Any:
    avals = [var.aval for var in jaxpr.invars]
    varying = [i for i, aval in enumerate(avals) if is_inexact(aval)]
    closed = compat.ClosedJaxpr(jaxpr, ())

    def both(primals: list[Any], tangents: list[Any]) -> Any:
        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(varying, inputs, strict=True))
            flat = [given.get(i, primal) for i, primal in enumerate(primals)]
            return compat.evaluate(closed, flat)

        return jax.jvp(function, [primals[i] for i in varying], tangents)

    tangents = [avals[i].to_tangent_aval() for i in varying]
    return compat.trace(both, avals, tangents)[0]


def _required(
    flow: Flow, linear: set[int], tangents: Sequence[int | None]
) -> frozenset[int]:
    backward = flow.ancestors([value for value in tangents if value is not None])
    return frozenset(
        value
        for position in backward
        if any(result in linear for result in flow.equations[position].results)
        for value in flow.equations[position].operands
        if value not in linear
    )


def _decisions(
    flow: Flow, known: Sequence[int], policy: Callable[..., Any] | None
) -> dict[int, Decision]:
    if policy is None:
        return {}
    decisions = {}
    for position in known:
        equation = flow.equations[position]
        if equation.moves:
            continue
        eqn = equation.eqn
        answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        decision = _decision(answer)
        if decision is not Decision.RECOMPUTE:
            decisions[position] = decision
    return decisions


def _decision(answer: Any) -> Decision:
    if isinstance(answer, bool):
        return Decision.SAVE if answer else Decision.RECOMPUTE
    kind = type(answer).__name__
    if "Offload" in kind:
        return Decision.OFFLOAD
    return Decision.SAVE if "Save" in kind else Decision.RECOMPUTE


def _rerun(
    flow: Flow,
    makers: dict[int, int],
    required: Iterable[int],
    decisions: dict[int, Decision],
) -> frozenset[int]:
    pending, found = list(required), set()
    while pending:
        position = makers.get(pending.pop())
        if position is None or position in found or position in decisions:
            continue
        found.add(position)
        pending.extend(flow.equations[position].operands)
    return frozenset(found)


def _inputs(flow: Flow, given: Sequence[int]) -> frozenset[int]:
    """The inputs, through casts, moves and cuts, but not around a loop."""
    inputs = set(given)
    for equation in flow.equations:
        first = equation.read[0] if equation.read else None
        alone = len(equation.operands) == 1
        passes = equation.moves or equation.eqn.primitive.name in SAME_VALUE
        if first in inputs and passes and (alone or not equation.moves):
            inputs.update(equation.results)
    return frozenset(inputs)


def _flops(equation: FlowEquation) -> float:
    if equation.moves or equation.eqn.primitive.name == "name":
        return 0.0
    one = single_equation(equation.eqn, variables(equation.eqn))
    flops = jaxpr_cost(one).flops
    if not flops and equation.eqn.primitive.name == "pallas_call":
        flops = _kernel_flops(equation.eqn)
    return equation.times * flops


def _kernel_flops(eqn: jec.JaxprEqn) -> float:
    """Arithmetic of a Pallas kernel that gives no estimate: its body, over its grid."""
    steps = [n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)]
    return jaxpr_cost(eqn.params["jaxpr"]).flops * math.prod(steps)
