"""Run the body of a scan as a nest of segments.

The body comes flat, as a jaxpr: constants, carry and one slice of each `xs` in, carry
and one slice of each `ys` out. What this does differently from writing two scans by
hand is the `xs`. Cut by reshape and slice, they would be copied: once where the
segments do not divide them, and a segment at a time in any case, in both directions.
Here every step reads its slice from the whole array (see `_slices`), so the only
memory that grows with the number of steps is the carries'.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat import _jax_compat as compat
from remat._regions._boundary import CARRY_NAME, Boundary
from remat._scan._segmented import SegmentedScan
from remat._scan._segments import Cut, Lengths, cut, inner
from remat._scan._slices import Slice, constants, evaluate_reading, pass_on, shadows

Policy = Callable[..., Any]
Arrays = tuple[Any, ...]
_GROUP = 4
"""Segments in a loop step whose carries wait on the host: of their transfers, the
first of the backward loop's step has nothing of that step to hide behind."""

Run = Callable[[Any, Any], tuple[Any, Any]]
"""From the state and the lowest position to the new state and the stacked ys."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScanBody:
    """A traced scan, taken apart."""

    closed: Any
    """The body: constants, carry and slices of `xs` to carry and slices of `ys`."""
    n_consts: int
    n_carry: int
    length: int
    reverse: bool
    unroll: int

    @staticmethod
    def of(eqn: jec.JaxprEqn) -> "ScanBody":
        """The body and layout of a `scan` equation."""
        binders = compat.scan_binders(eqn)
        return ScanBody(
            closed=eqn.params["jaxpr"],
            n_consts=len(binders.consts),
            n_carry=len(binders.init),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )

    def split(self, operands: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Constants, carry and the rest of flat operands."""
        first_xs = self.n_consts + self.n_carry
        consts, carry = operands[: self.n_consts], operands[self.n_consts : first_xs]
        return tuple(consts), tuple(carry), tuple(operands[first_xs:])

    def step(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Run the body once: the new carry, and a slice of each `ys`."""
        out = evaluate_reading(self.closed, [*consts, *carry, *x])
        return tuple(out[: self.n_carry]), tuple(out[self.n_carry :])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Nest:
    """How a scan is run."""

    lengths: Lengths
    """Segments at each level, outermost first; the last are steps."""
    is_region: bool = False
    """Whether each step is a region of its own."""
    policy: Policy | None = None
    """What such a region keeps; None recomputes all of it."""
    offload_carry: bool = False
    """Whether the carries into the outermost segments wait in host memory."""

    @property
    def is_plain(self) -> bool:
        """Whether this is what `lax.scan` does."""
        return len(self.lengths) == 1 and not (self.is_region or self.offload_carry)


def segmented(body: ScanBody, nest: Nest) -> Callable[..., list[Any]]:
    """A function of a scan's flat operands that runs it as a nest.

    Values and derivatives of any order are those of the scan.
    """

    def segmented_scan(*operands: Any) -> list[Any]:
        consts, carry, xs = body.split(operands)
        known = SegmentedScan.of(
            body.length,
            nest.lengths,
            is_region=nest.is_region,
            offload_carry=nest.offload_carry,
        )
        runner = _Runner(body, nest, consts, constants(xs), known)
        (carry, _), ys = runner.run((carry, shadows(xs)), 0, body.length, nest.lengths)
        # Its first carry alone may be weakly typed, and so the first segment's ys.
        ys_vars = compat.open_jaxpr(body.closed).outvars[body.n_carry :]
        weak = [compat.is_weak(var) for var in ys_vars]
        return [*carry, *map(compat.with_weak_type, ys, weak)]

    return segmented_scan


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Segments that are run in turn, and that several times."""

    repeats: int
    sizes: tuple[int, ...]
    """Steps in each of the segments."""

    @property
    def n_steps(self) -> int:
        return self.repeats * sum(self.sizes)


def _spans(pieces: Cut, group: int) -> list[_Span]:
    """A loop over groups of full segments, then the segments that are left over."""
    repeats, left = divmod(pieces.count, group)
    rest = (pieces.rest,) if pieces.rest else ()
    spans = [
        _Span(repeats, (pieces.block,) * group),
        _Span(1, (pieces.block,) * left + rest),
    ]
    return [span for span in spans if span.n_steps]


@dataclasses.dataclass(frozen=True, slots=True)
class _Runner:
    """One run of a nest; its state is the carry and the shadows of the xs."""

    body: ScanBody
    nest: Nest
    consts: Arrays
    xs: Arrays
    known: SegmentedScan

    def run(self, state: Any, start: Any, n: int, lengths: Lengths) -> tuple[Any, Any]:
        """Run `n` steps, the one at position `start` being the lowest of them."""
        lengths = inner(n, lengths)
        pieces = cut(n, lengths)
        if pieces is None:
            return self.loop(state, start, n)
        offload = self.nest.offload_carry and lengths == self.nest.lengths
        spans = _spans(pieces, group=_GROUP if offload else 1)

        def run_span(span: _Span, state: Any, low: Any) -> tuple[Any, Any]:
            return self.span(span, state, start + low, lengths[1:], offload)

        parts = [(s.n_steps, partial(run_span, s)) for s in spans]
        return in_order(parts, state, reverse=self.body.reverse)

    def span(
        self, span: _Span, state: Any, start: Any, lengths: Lengths, offload: bool
    ) -> tuple[Any, Any]:
        """Run some segments in turn, and that again and again."""
        alone = span.repeats == 1  # XLA would take a loop of one step apart
        segment = partial(
            self.segment, lengths=lengths, offload=offload, prevent_cse=alone
        )

        def run_once(state: Any, i: Any) -> tuple[Any, Any]:
            def run_segment(n: int, state: Any, low: Any) -> tuple[Any, Any]:
                return segment(n)(state, start + i * sum(span.sizes) + low)

            parts = [(n, partial(run_segment, n)) for n in span.sizes]
            return in_order(parts, state, reverse=self.body.reverse)

        if alone:
            return run_once(state, 0)
        at = jnp.arange(span.repeats, dtype=jnp.int32)
        state, ys = lax.scan(run_once, state, at, reverse=self.body.reverse)
        return state, jax.tree.map(lambda y: lax.collapse(y, 0, 2), ys)

    def segment(
        self, n: int, *, lengths: Lengths, offload: bool, prevent_cse: bool
    ) -> Run:
        """One segment of `n` steps, as a region that keeps only its input."""

        def run_segment(state: Any, start: Any) -> tuple[Any, Any]:
            return self.run(state, start, n, lengths)

        if n == 1 and self.nest.is_region:  # a region keeps no more already
            region = run_segment
        else:
            region = jax.checkpoint(
                run_segment,
                prevent_cse=_pin(prevent_cse or offload),
                policy=Boundary(scan=self.known),
            )
        return self.offloading(region) if offload else region

    def offloading(self, region: Run) -> Run:
        """The region, the carry into which waits in host memory.

        Several of these stand in each step of the loop around. Then going backward the
        carries of all but the first come back while the one before is run: no transfer
        can start before the loop step that uses it, unless XLA moves it to the step
        before (`xla_gpu_enable_pipelined_host_offloading`). The region inside starts
        after the transfer and, by its barrier, not before its turn.
        """

        def run(state: Any, start: Any) -> tuple[Any, Any]:
            carry, passing = state
            return region((tuple(map(_named, carry)), passing), start)

        policy = Boundary(offload=True, scan=self.known)
        return jax.checkpoint(run, prevent_cse=False, policy=policy)

    def loop(self, state: Any, start: Any, n: int) -> tuple[Any, Any]:
        """The innermost loop, over `n` steps."""
        if self.body.unroll > 1 or n == 1:
            step = self.step(prevent_cse=True)
        else:
            step = self.step(prevent_cse=False)
        at = jnp.arange(n, dtype=jnp.int32) if self.xs else None
        return lax.scan(
            lambda state, i: step(state, None if i is None else start + i),
            state,
            at,
            length=n,
            reverse=self.body.reverse,
            unroll=min(self.body.unroll, n),
        )

    def step(self, *, prevent_cse: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        """One step, which reads its xs by index; a region where the nest says so."""

        def run_step(state: Any, i: Any) -> tuple[Any, Any]:
            carry, passing = state
            x = tuple(Slice(*parts, i) for parts in zip(self.xs, passing, strict=True))
            carry, y = self.body.step(self.consts, carry, x)
            return (carry, tuple(map(pass_on, passing))), y

        if not self.nest.is_region:
            return run_step
        return jax.checkpoint(
            run_step, prevent_cse=_pin(prevent_cse), policy=self.nest.policy
        )


def in_order(
    parts: Sequence[tuple[int, Run]], state: Any, *, reverse: bool
) -> tuple[Any, Any]:
    """Run parts, each of so many steps, from the low end or from the high one."""
    stacked: list[Any] = []
    low, high = 0, sum(n for n, _ in parts)
    for n, run in parts:
        state, ys = run(state, high - n if reverse else low)
        low, high = low + n, high - n
        stacked.insert(0 if reverse else len(stacked), ys)
    if len(stacked) == 1:
        return state, stacked[0]
    return state, jax.tree.map(lambda *ys: lax.concatenate(ys, 0), *stacked)


def _pin(prevent_cse: bool) -> Any:
    """For a region of `(carry, shadows), position`: a barrier for the carry alone.

    All that a backward pass repeats depends on the carry. Constants and xs may be
    whole models, what XLA has made of those (a cast, say) is better shared.
    """
    return ((True, False), False) if prevent_cse else False


def _named(leaf: Any) -> Any:
    """The leaf under the carry's name where moving it is worth a transfer."""
    if jnp.ndim(leaf) == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return checkpoint_name(leaf, CARRY_NAME)
