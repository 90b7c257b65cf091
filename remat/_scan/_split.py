"""Split a scan whose steps are to differ into scans of equal steps.

Cut by slicing, the stacked weights (`xs`) would be there twice, and their gradients
too: a slice of each scan's own, and their sum. Here every step reads its part from
the whole arrays, where it needs it, and one set of gradients passes through all the
scans (see `_slices`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from remat import _jax_compat as compat
from remat._regions._boundary import KeepAllButSlices
from remat._regions._enclose import enclose, holds_region, reads
from remat._regions._region import is_region
from remat._regions._rewrite import inline, read, substitute
from remat._scan._nest import Arrays, Run, ScanBody, in_order
from remat._scan._runs import Span, spans
from remat._scan._slices import Slice, constants, pass_on, shadows


def split_equation(
    eqn: jec.JaxprEqn, kinds: Sequence[Hashable], bodies: Mapping[Hashable, Any]
) -> jec.JaxprEqn:
    """What takes the place of a `scan` equation: the same steps, of several kinds.

    Values and derivatives of any order are those of the scan.

    Args:
        eqn: The equation.
        kinds: The kind of each step, in the order in which they run.
        bodies: The scan's body, for each kind.

    Returns:
        A call of a program of several scans.
    """
    layout = ScanBody.of(eqn)
    by_kind = {
        kind: dataclasses.replace(layout, closed=_reading_late(layout, body))
        for kind, body in bodies.items()
    }
    fn = _split(layout, by_kind, spans(kinds))
    traced, _ = compat.trace(jax.jit(fn), *(var.aval for var in eqn.invars))
    (call,) = compat.open_jaxpr(traced).eqns
    return call.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def _split(
    layout: ScanBody, bodies: Mapping[Hashable, ScanBody], found: Sequence[Span]
) -> Callable[..., list[Any]]:
    def split_scan(*operands: Any) -> list[Any]:
        consts, carry, xs = layout.split(operands)
        runner = _Runner(layout, bodies, consts, constants(xs))
        parts = [(span.n_steps, partial(runner.span, span)) for span in found]
        state = (carry, shadows(xs))
        (carry, _), ys = in_order(parts, state, reverse=layout.reverse)
        ys_vars = compat.open_jaxpr(layout.closed).outvars[layout.n_carry :]
        weak = [compat.is_weak(var) for var in ys_vars]
        return [*carry, *map(compat.with_weak_type, ys, weak)]

    return split_scan


@dataclasses.dataclass(frozen=True, slots=True)
class _Runner:
    """Runs steps; its state is the carry and the shadows of the xs."""

    layout: ScanBody
    bodies: Mapping[Hashable, ScanBody]
    consts: Arrays
    xs: Arrays

    def span(self, span: Span, state: Any, start: Any) -> tuple[Any, Any]:
        """Run a span, whose lowest position is `start`."""
        alone = span.repeats == 1

        def run_once(state: Any, i: Any) -> tuple[Any, Any]:
            low = start + i * span.n_steps_once
            parts = [
                (run.n_steps, self.run(run.kind, run.n_steps, low, alone))
                for run in span.runs
            ]
            return in_order(parts, state, reverse=self.layout.reverse)

        if alone:
            return run_once(state, 0)
        at = jnp.arange(span.repeats, dtype=jnp.int32)
        state, ys = lax.scan(run_once, state, at, reverse=self.layout.reverse)
        return state, jax.tree.map(lambda y: lax.collapse(y, 0, 2), ys)

    def run(self, kind: Hashable, n: int, first: Any, alone: bool) -> Run:
        """Steps of one kind in a row; `alone` where no loop is around them."""
        body = self.bodies[kind]
        unroll = min(body.unroll, n)
        in_loop = not alone if n == 1 else unroll == 1
        body = dataclasses.replace(body, closed=_with_barriers(body.closed, in_loop))

        def run_steps(state: Any, low: Any) -> tuple[Any, Any]:
            start = first + low
            if n == 1:  # XLA would take a loop of one step apart
                state, ys = self.step(body, state, start)
                return state, jax.tree.map(lambda y: y[None], ys)
            return lax.scan(
                lambda state, i: self.step(body, state, start + i),
                state,
                jnp.arange(n, dtype=jnp.int32),
                reverse=body.reverse,
                unroll=unroll,
            )

        return run_steps

    def step(self, body: ScanBody, state: Any, i: Any) -> tuple[Any, Any]:
        """One step, which reads its xs by index."""
        carry, passing = state
        x = tuple(Slice(*parts, i) for parts in zip(self.xs, passing, strict=True))
        carry, y = body.step(self.consts, carry, x)
        return (carry, tuple(map(pass_on, passing))), y


def _with_barriers(closed: compat.AnyJaxpr, in_loop: bool) -> compat.AnyJaxpr:
    """The body with `prevent_cse` of its regions as is right where it runs."""
    opened = compat.open_jaxpr(closed)
    eqns = [
        eqn.replace(params={**eqn.params, "prevent_cse": not in_loop})
        if is_region(eqn)
        else eqn
        for eqn in opened.eqns
    ]
    return compat.with_open(closed, opened.replace(eqns=eqns))


def _reading_late(layout: ScanBody, closed: compat.AnyJaxpr) -> compat.AnyJaxpr:
    """The body with slices read inside regions only, so that none is kept.

    Where one goes to a loop or a branch that holds a region, it is read before that,
    and kept: one more region around would take that region's policy over.
    """
    opened = compat.open_jaxpr(closed)
    slices = set(opened.invars[layout.n_consts + layout.n_carry :])
    eqns: list[jec.JaxprEqn] = []
    env: dict[Any, Any] = {}
    for eqn in opened.eqns:
        eqn = substitute(eqn, env)
        if _is_call_of_regions(eqn):
            body, results = inline(eqn)
            env.update(zip(eqn.outvars, results, strict=True))
        else:
            body = [eqn]
        eqns += [_reading_itself(inner, slices) for inner in body]
    outvars = [read(atom, env) for atom in opened.outvars]
    return compat.with_open(closed, opened.replace(eqns=eqns, outvars=outvars))


def _is_call_of_regions(eqn: jec.JaxprEqn) -> bool:
    if eqn.primitive.name not in compat.CALL_PRIMITIVES or not holds_region(eqn):
        return False
    (called,) = compat.subjaxprs(eqn.params)
    return not (compat.is_closed(called) and called.consts)


def _reading_itself(eqn: jec.JaxprEqn, slices: set[Any]) -> jec.JaxprEqn:
    """The equation, with the slices that it reads read in a region of its own."""
    if holds_region(eqn) or eqn.effects or not slices & set(reads([eqn])):
        return eqn
    region = enclose([eqn], set(eqn.outvars), prevent_cse=False)
    if region is None:
        return eqn
    return region.replace(params={**region.params, "policy": KeepAllButSlices()})
