"""`segment_scans`: cut the scans of a function that is already written."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jec
import numpy as np

from remat import _jax_compat as compat
from remat._regions._boundary import is_segment
from remat._regions._rewrite import rewrite_equations
from remat._regions._sites import Site
from remat._scan._nest import Nest
from remat._scan._rewrite import (
    ScanOptions,
    ScanPolicy,
    kept_bytes,
    segmented_equation,
)
from remat._scan._segments import Segments, SegmentsWarning
from remat._scan._sizes import Sizes


def segment_scans(
    fn: Callable[..., Any],
    segments: Segments = "sqrt",
    min_length: int = 8,
    *,
    policy: ScanPolicy = None,
    max_saved: int | None = None,
    offload_carry: bool = False,
) -> Callable[..., Any]:
    """The same function, with every scan in it run in segments, as by `remat.scan`.

    For scans that you did not write: Flax's `nn.scan` and `nnx.scan`, and plain
    `jax.lax.scan`, inside jit, other scans, cond, shard_map and regions too. Apply it
    to the loss, before `jax.grad`, and before or after `with_policy`, which changes
    the regions in the scans' bodies and leaves the segments alone.

    Left as they are: shorter scans, those in a `while` loop or a `custom_vjp` or
    `custom_jvp` function, those that `remat.scan` has cut, and those where it would
    save next to nothing: less than a hundredth of the largest value that one step
    makes. One whose body cannot be differentiated is left too, with a warning.

    Args:
        fn: Any function that JAX can trace.
        segments: As for `remat.scan`; a tuple must hold the longest scan.
        min_length: Fewest steps of a scan that is cut.
        policy: As for `remat.scan`. By default a body that is a region, or that has
            regions in it which keep little, stays as it is.
        max_saved: As for `remat.scan`.
        offload_carry: As for `remat.scan`.

    Returns:
        A function that takes and returns what `fn` does. It is traced at each call,
        as by `jax.jit`, so it can stand under any transformation.

    Warns:
        SegmentsWarning: (when called) for a scan whose body cannot be differentiated.

    Raises:
        SegmentsError: (when called, but for `max_saved` below 1) as for `remat.scan`.
        PolicyError: as for `remat.scan`.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> def loss(x):
        ...     return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, length=64)[0]
        >>> float(jax.grad(remat.segment_scans(loss))(1.0) - jax.grad(loss)(1.0))
        0.0
    """
    options = ScanOptions.of(policy, segments, max_saved, offload_carry)

    def decide(sites: Sequence[Site], program: compat.AnyJaxpr) -> list[_Around | None]:
        around = dict(_scans(program, _Around()))
        # A derivative rule, which is no part of the program's text, is left alone.
        unknown = _Around(is_cut=True)
        places = [around.get(id(site.eqn), unknown) for site in sites]
        return [
            None if place.is_cut or site.context == "loop" else place
            for site, place in zip(sites, places, strict=True)
        ]

    def edit(site: Site, eqn: jec.JaxprEqn, place: _Around | None) -> jec.JaxprEqn:
        del site
        if place is None:
            return eqn
        is_worth_it = functools.partial(_is_worth_it, eqn)
        with compat.at_place_of(eqn, check_vma=place.check_vma):
            return segmented_equation(eqn, options, is_worth_it)

    return rewrite_equations(
        fn,
        select=functools.partial(_is_long_scan, min_length=min_length),
        decide=decide,
        edit=edit,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """What surrounds a scan."""

    is_cut: bool = False
    """Whether it is one of those that `remat.scan` made, or in one."""
    check_vma: bool = False
    """As given to the `shard_map` around it."""


def _scans(jaxpr: compat.AnyJaxpr, here: _Around) -> Iterator[tuple[int, _Around]]:
    """The id of each scan equation in a program, and what surrounds it."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        is_cut = here.is_cut or _is_segment(eqn) or _runs_segments(eqn)
        check_vma = eqn.params.get("check_vma", here.check_vma)
        inside = _Around(is_cut=is_cut, check_vma=check_vma)
        if eqn.primitive.name == "scan":
            yield id(eqn), inside
        for sub in compat.subjaxprs(eqn.params):
            yield from _scans(sub, inside)


def _is_long_scan(eqn: jec.JaxprEqn, *, min_length: int) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] >= min_length


def _is_worth_it(eqn: jec.JaxprEqn, nest: Nest, sizes: Sizes) -> bool:
    as_is = sizes.of(Nest(lengths=(sizes.body.length,)))
    if as_is.failure is not None:
        line = compat.source_line(eqn)
        warnings.warn(
            f"the scan of {eqn.params['length']} steps{f' at {line}' if line else ''} "
            f"is left as it is: its body has no derivative ({as_is.failure})",
            SegmentsWarning,
            stacklevel=2,
        )
        return False
    saved = sizes.body.length * as_is.step - kept_bytes(nest, sizes)
    return saved >= _largest_value(eqn.params["jaxpr"]) / 100


def _runs_segments(eqn: jec.JaxprEqn) -> bool:
    if eqn.primitive.name != "scan":
        return False
    return any(map(_is_segment, compat.open_jaxpr(eqn.params["jaxpr"]).eqns))


def _is_segment(eqn: jec.JaxprEqn) -> bool:
    is_checkpoint = eqn.primitive.name in compat.REGION_PRIMITIVES
    return is_checkpoint and is_segment(eqn.params["policy"])


def _largest_value(jaxpr: compat.AnyJaxpr) -> int:
    """Bytes of the largest array that a program makes on its way."""
    largest = 0
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        for var in eqn.outvars:
            size = int(np.prod(getattr(var.aval, "shape", ())))
            largest = max(
                largest, size * getattr(var.aval, "dtype", np.dtype("V0")).itemsize
            )
        for sub in compat.subjaxprs(eqn.params):
            largest = max(largest, _largest_value(sub))
    return largest
