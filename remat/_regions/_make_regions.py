"""Regions from outside, on code that has none: the layers of a scan, or modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._regions._enclose import enclose, is_region_already
from remat._regions._errors import RegionError, listed, near
from remat._regions._layer_scans import all_scans, outermost_layer_scans
from remat._regions._module_calls import ModuleRegions
from remat._regions._nnx import recorded
from remat._regions._rewrite import Memo, rewrite_equations
from remat._regions._sites import Site

SCAN = "scan"
"""Asks for the bodies of layer scans."""

Wanted = str | Sequence[str]
"""`"scan"`, a pattern of module paths, or several of these."""


def with_regions(fn: Callable[..., Any], regions: Wanted) -> Callable[..., Any]:
    """The same function, with regions made of its layers.

    For code that has no `jax.checkpoint` in it. A new region recomputes everything
    until it is given a policy, as by `remat.with_policy`, which can also make the
    regions itself (`regions=`). Apply it to the loss, before `jax.grad`.

    Args:
        fn: Any function that JAX can trace.
        regions: Which regions to make, one of these or a list of several:

            - `"scan"`: the body of each layer scan. That is an outermost scan of more
              than one step that carries a floating-point value and changes it. A scan
              that only adds to what it carries (microbatches, chunks of a loss) is
              looked into first, and is one where there is none in it. A scan in a
              region that exists, in a `while` loop or in a derivative rule is none.
            - a pattern of module paths, such as `"Block_*"` or `"layers/*"`: each
              call of a module whose path ends so, the outermost that do. Paths are
              Flax Linen's, or those of `jax.named_scope`. Each part of the pattern is
              a glob for one module.

            What is a region already, or holds all its matrix products in regions,
            stays as it is; other regions inside a new one stay too, nested.

    Returns:
        A function that takes and returns what `fn` does. It is traced at each call,
        as by `jax.jit`, so it can stand under any transformation.

    Raises:
        RegionError: `regions` is none of these; or (when called) there is no layer
            scan, or a pattern fits no module.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layer = lambda h, w: (jnp.tanh(h @ w), None)
        >>> loss = lambda ws, x: jax.lax.scan(layer, x, ws)[0].sum()
        >>> loss = remat.with_regions(loss, "scan")
        >>> regions = remat.find_regions(loss, jnp.ones((6, 4, 4)), jnp.ones((2, 4)))
        >>> [(r.times, r.context) for r in regions]
        [(6, 'scan')]
    """
    wanted = checked_regions(regions)
    patterns = [pattern for pattern in wanted if pattern != SCAN]
    if patterns:
        fn = _with_module_regions(fn, patterns)
    return _with_scan_regions(fn) if SCAN in wanted else fn


def made_first(fn: Callable[..., Any], regions: Wanted | None) -> Callable[..., Any]:
    """The function with regions made as `regions=` asks, if it does."""
    return fn if regions is None else with_regions(fn, regions)


def checked_regions(regions: Wanted) -> tuple[str, ...]:
    """What `regions=` asks for, as a tuple.

    Raises:
        RegionError: It is not what `with_regions` takes.
    """
    wanted = (regions,) if isinstance(regions, str) else tuple(regions)
    if not wanted or not all(isinstance(one, str) and one for one in wanted):
        raise RegionError(
            'regions is "scan", a pattern of module paths such as "Block_*", or a list '
            f"of these, got {regions!r}"
        )
    return tuple(dict.fromkeys(wanted))


def _with_scan_regions(fn: Callable[..., Any]) -> Callable[..., Any]:
    def decide(sites: Sequence[Site], program: compat.AnyJaxpr) -> list[bool]:
        chosen = {id(eqn) for eqn in outermost_layer_scans(program)}
        if not chosen:
            raise RegionError(_no_layer_scan(program))
        return [id(site.eqn) in chosen and not _is_done(site.eqn) for site in sites]

    return rewrite_equations(
        fn,
        select=lambda eqn: eqn.primitive.name == "scan",
        decide=decide,
        edit=lambda site, eqn, is_wanted: _scan_of_regions(eqn) if is_wanted else eqn,
    )


def _is_done(scan: jec.JaxprEqn) -> bool:
    return is_region_already(compat.open_jaxpr(scan.params["jaxpr"]).eqns)


def _scan_of_regions(scan: jec.JaxprEqn) -> jec.JaxprEqn:
    """The scan with all that its body computes in one region."""
    body = scan.params["jaxpr"]
    opened = compat.open_jaxpr(body)
    region = enclose(
        opened.eqns,
        {v for v in opened.outvars if not compat.is_literal(v)},
        # In a loop, XLA does not see the forward pass from the backward one.
        prevent_cse=scan.params["unroll"] > 1,
        function=body,
    )
    if region is None:
        return scan
    new = compat.with_open(body, opened.replace(eqns=[region]))
    return scan.replace(params={**scan.params, "jaxpr": new})


def _no_layer_scan(program: compat.AnyJaxpr) -> str:
    found = [
        f"{compat.source_line(eqn)} ({eqn.params['length']} steps)"
        for eqn in all_scans(program)
    ]
    there = f"Its scans are none: {', '.join(found[:5])}." if found else "It has none."
    return (
        'regions="scan" makes a region of each layer of a scan: one of more than one '
        "step that carries a floating-point value and changes it, and is not in a "
        f"region already. {there} For a model in a Python loop give a pattern of its "
        'modules, such as regions="Block_*".'
    )


def _with_module_regions(
    fn: Callable[..., Any], patterns: Sequence[str]
) -> Callable[..., Any]:
    memo = Memo()

    @functools.wraps(fn, updated=())
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        with recorded(fn, args, kwargs) as recording:
            made = ModuleRegions(patterns, memo)
            new = made.rewrite(recording.closed)
            for pattern in patterns:
                if pattern not in made.matched:
                    raise RegionError(_no_module(pattern, list(made.paths)))
            return recording.run(new)

    return rewritten


def _no_module(pattern: str, paths: Sequence[str]) -> str:
    message = f"No module's path ends as the pattern {pattern!r} says. "
    if not paths:
        return message + (
            "The function has no module paths: Flax Linen gives them, NNX and plain "
            'JAX do not. Put with jax.named_scope("layer_0"): around each layer, or '
            "wrap the layers with remat.remat."
        )
    n_parts = pattern.count("/") + 1
    endings = dict.fromkeys("/".join(path.split("/")[-n_parts:]) for path in paths)
    return f"{message}The modules are: {listed(paths)}.{near([pattern], [*endings])}"
