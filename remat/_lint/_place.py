"""Lint rules about where regions stand."""

from collections.abc import Iterator

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._cost._jaxpr import jaxpr_cost
from remat._finding import Finding
from remat._lint._flow import KERNELS, MATMUL_LIKE
from remat._lint._program import Linted, Program
from remat._regions._assign import HOW_TO_MAKE_A_REGION
from remat._regions._region import is_region

_MOST = 0.95
"""Share of the arithmetic at which a region counts as the whole."""
_NOT_ELEMENTWISE = MATMUL_LIKE | KERNELS
_REDUCES = (
    "reduce_",
    "cum",
    "arg",
    "sort",
    "top_k",
    "scan",
    "while",
    "random_",
    "threefry",
)


def no_region(program: Program) -> Iterator[Finding]:
    """A program without a region, where every policy does nothing."""
    if not program.regions and not program.unread:
        yield Finding(
            code="no-region",
            severity="error",
            message="the function has no region that a policy can change.",
            fix=HOW_TO_MAKE_A_REGION,
        )


def unread_regions(program: Program) -> Iterator[Finding]:
    """Regions that were not looked at."""
    for path, why in program.unread.items():
        yield Finding(
            code="unread-region",
            severity="info",
            message=f"the region cannot be differentiated by itself ({why}), so it was "
            "not looked at.",
            fix="remat.residuals(fn, *args) lists what the whole function keeps.",
            where=path,
        )


def region_around_loss(program: Program) -> Iterator[Finding]:
    """One region around the whole loss."""
    regions, outputs = program.outermost, program.jaxpr.outvars
    if len(regions) != 1 or regions[0].region.times != 1 or regions[0].is_removed:
        return
    if any(getattr(v.aval, "shape", ()) != () for v in outputs):
        return
    linted = regions[0]
    everywhere = compat.n_shards_around(linted.region.eqn)
    flops = everywhere * jaxpr_cost(linted.region.jaxpr).flops
    share = flops / max(program.flops, 1.0)
    inside = [r for r in program.regions if r.outer is linted]
    if share >= _MOST and not inside and _main_scan(linted) is None:
        yield linted.finding(
            "region-around-loss",
            "warning",
            f"one region holds {share:.0%} of the arithmetic: its backward pass "
            "recomputes all of it at once, and then holds what it would without "
            "the region.",
            "Make a region of each layer instead (remat.remat on the block).",
        )


def region_around_scan(linted: Linted) -> Iterator[Finding]:
    """A region around a scan, where one around its body is meant."""
    scan = None if linted.is_removed else _main_scan(linted)
    if scan is not None:
        yield linted.finding(
            "region-around-scan",
            "warning",
            f"the region is around a scan of {scan.params['length']} steps: "
            "recomputing it keeps the values of every step at once.",
            "Put the region on the scan's body: nn.scan(remat.remat(Block)), "
            "lax.scan(remat.remat(body)), or use remat.scan.",
            compat.source_line(scan),
        )


def undone_by_cse(linted: Linted) -> Iterator[Finding]:
    """`prevent_cse=False` where XLA can see both passes."""
    region = linted.region
    exposed = region.context in ("straight line", "unrolled scan")
    if linted.is_removed or region.prevent_cse:
        return
    if exposed and linted.outer is None:
        yield linted.finding(
            "undone-by-cse",
            "error",
            f"prevent_cse=False in {_article(region.context)}: XLA merges the "
            "recomputation with the forward pass, which undoes the region.",
            "Leave prevent_cse alone (remat.remat decides by where it is traced); "
            "False is for the body of a scan with unroll=1.",
        )


def overridden_policy(linted: Linted) -> Iterator[Finding]:
    """An inner region with another policy than the region around it.

    The outer policy decides what the forward pass keeps. The inner one counts when the
    outer region is recomputed, which is what cutting a scan in segments is for.
    """
    outer = linted.outer
    if outer is None or outer.is_removed:
        return
    if linted.policy != outer.policy:
        is_step_of_outer = linted.region.times > outer.region.times
        yield linted.finding(
            "overridden-policy",
            "info" if is_step_of_outer else "warning",
            f"its policy ({_named(linted)}) does not decide what the forward pass "
            f"keeps: the region around it, {outer.region.path!r} ({_named(outer)}), "
            "decides that for all inside. It counts only while that region is "
            "recomputed.",
            "Leave both where that is meant, as in a scan that is cut in segments; "
            "otherwise remove the outer one.",
        )


def elementwise_region(linted: Linted) -> Iterator[Finding]:
    """A region of nothing but elementwise operations."""
    flow = linted.flow
    names = {flow.equation(p).eqn.primitive.name for p in flow.known}
    costly = names & _NOT_ELEMENTWISE or any(n.startswith(_REDUCES) for n in names)
    if flow.rerun and not costly and not flow.stored():
        yield linted.finding(
            "elementwise-region",
            "warning",
            "the region holds elementwise operations alone, which XLA fuses and "
            "recomputes by itself: as a region it keeps its inputs, and can use more "
            "memory than without.",
            "Remove it, or make one region of the whole layer.",
        )


PLACE_PROGRAM_RULES = (no_region, unread_regions, region_around_loss)
PLACE_RULES = (
    region_around_scan,
    undone_by_cse,
    overridden_policy,
    elementwise_region,
)


def _main_scan(linted: Linted) -> jec.JaxprEqn | None:
    """The scan that does nearly all of a region's work, with no region inside."""
    jaxpr = linted.region.jaxpr
    total = jaxpr_cost(jaxpr).flops
    for eqn in _equations(jaxpr):
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
            continue
        work = jaxpr_cost(eqn.params["jaxpr"]).flops * eqn.params["length"]
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        regions_inside = any(is_region(inner) for inner in _equations(body))
        if total and work >= _MOST * total and not regions_inside:
            return eqn
    return None


def _equations(jaxpr: jec.Jaxpr) -> Iterator[jec.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in compat.CALL_PRIMITIVES:
            for sub in compat.subjaxprs(eqn.params):
                yield from _equations(compat.open_jaxpr(sub))


def _article(context: str) -> str:
    return f"an {context}" if context[0] in "aeiou" else f"a {context}"


def _named(linted: Linted) -> str:
    return "nothing" if linted.policy is None else repr(linted.policy)
