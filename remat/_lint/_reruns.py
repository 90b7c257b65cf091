"""Lint rules about what should not run twice."""

import collections
import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from remat._finding import Finding
from remat._lint._program import Linted
from remat._sizes import format_bytes

_COLLECTIVES = frozenset(
    "all_gather all_gather_invariant all_reduce all_to_all pmax pmin ppermute psum "
    "psum2 psum_invariant psum_scatter ragged_all_to_all reduce_scatter".split()
)
_CALLBACKS = frozenset(
    "debug_callback debug_print pure_callback python_callback".split()
)
_CHOICES = frozenset({"top_k", "approx_top_k", "argmax", "argmin"})


def repeated_collectives(linted: Linted) -> Iterator[Finding]:
    """Collectives that the backward pass runs again."""
    flow = linted.flow
    again = [p for p in sorted(flow.rerun) if linted.primitive(p) in _COLLECTIVES]
    if not again:
        return
    kinds = collections.Counter(linted.primitive(p) for p in again)
    moved = sum(flow.bytes(v) for p in again for v in flow.equation(p).results)
    listed = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    yield linted.finding(
        "repeated-collective",
        "warning",
        f"{listed} ({format_bytes(moved)}) run again in the backward pass, and wait "
        "for the network again.",
        "Keep their results: policy | save(primitive("
        f"{', '.join(repr(kind) for kind in sorted(kinds))})).",
        linted.source(again[0]),
    )


def refused_callbacks(linted: Linted) -> Iterator[Finding]:
    """Callbacks for which JAX differentiates no region."""
    if linted.is_removed:
        return
    for position in linted.flow.named("io_callback"):
        eqn = linted.flow.equation(position).eqn
        yield linted.finding(
            "refused-callback",
            "error",
            f"JAX differentiates no region with an io_callback in it"
            f"{_callback_name(eqn.params.get('callback'))}: the gradient raises "
            "NotImplementedError.",
            "Return the value and call back outside the region, or use "
            "jax.debug.callback, which runs in both passes.",
            linted.source(position),
        )


def repeated_callbacks(linted: Linted) -> Iterator[Finding]:
    """Callbacks that run once in each pass."""
    flow = linted.flow
    if linted.is_removed:
        return
    for position in flow.named(*_CALLBACKS):
        eqn = flow.equation(position).eqn
        # JAX keeps an effect in both passes, and asks no policy whether to; a pure
        # callback runs where it is needed.
        if not eqn.effects and position not in flow.rerun:
            continue
        name = eqn.primitive.name
        callback = _callback_name(eqn.params.get("callback"))
        keep = f", or keep its result: policy | save(primitive({name!r}))"
        yield linted.finding(
            "repeated-callback",
            "warning",
            f"the callback{callback} ({name}) runs twice a step: in the forward pass, "
            "and when the region is recomputed.",
            "Return the value and call back outside the region"
            + ("." if eqn.effects else keep + "."),
            linted.source(position),
        )


def repeated_choices(linted: Linted) -> Iterator[Finding]:
    """Discrete choices that are made again, and can come out differently."""
    flow = linted.flow
    again = [p for p in sorted(flow.rerun) if _is_choice(linted, p)]
    for position in again:
        primitive = linted.primitive(position)
        yield linted.finding(
            "repeated-choice",
            "warning",
            f"{primitive} runs again in the backward pass: where values are close, "
            "rounding can make it choose otherwise than the forward pass did.",
            "Keep the choice: policy | save(discrete()).",
            linted.source(position),
        )


RERUN_RULES = (
    repeated_collectives,
    refused_callbacks,
    repeated_callbacks,
    repeated_choices,
)


def _is_choice(linted: Linted, position: int) -> bool:
    primitive = linted.primitive(position)
    if primitive == "sort":
        eqn = linted.flow.equation(position).eqn
        return len(eqn.invars) > eqn.params["num_keys"]
    return primitive in _CHOICES


def _callback_name(callback: Any) -> str:
    """The name of the user's function, inside what JAX wrapped it in."""
    fn = getattr(callback, "callback_func", callback)
    with contextlib.suppress(TypeError):
        fn = inspect.getclosurevars(fn).nonlocals.get("callback", fn)
    name = getattr(fn, "__name__", "<lambda>")
    return "" if name == "<lambda>" else f" {name!r}"
