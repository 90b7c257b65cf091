"""Which scans of a program are run in segments, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from remat import _jax_compat as compat
from remat._regions._nnx import recorded
from remat._scan._segments import Lengths, StepCosts, cut, inner, kept, n_carries


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedScan:
    """A scan that is run in segments."""

    n_steps: int
    """Steps of the scan, N."""
    lengths: Lengths
    """Its nest: segments or steps at each level, outermost first."""
    block: int
    """Steps in one of the outermost segments; the last may be shorter."""
    n_segments: int
    """Outermost segments: carries that are kept from forward to backward pass."""
    max_saved: int
    """The most carries kept at once, a kept step counted as one."""
    recompute_factor: float
    """How often each step is run again, on average; what a step that is a region
    recomputes for itself comes on top."""
    is_region: bool
    """Whether each step is a region too."""
    offload_carry: bool
    """Whether the carries into the outermost segments wait on the host."""
    source: str | None = None
    """The line of the scan, `model.py:12`, where known."""

    @staticmethod
    def of(
        n_steps: int,
        lengths: Lengths,
        *,
        is_region: bool,
        offload_carry: bool,
    ) -> SegmentedScan:
        """What a nest makes of a number of steps."""
        lengths = inner(n_steps, lengths)
        return SegmentedScan(
            n_steps=n_steps,
            lengths=lengths,
            block=math.prod(lengths[1:]),
            n_segments=n_carries(n_steps, lengths),
            max_saved=math.ceil(kept(n_steps, lengths, StepCosts())),
            recompute_factor=n_run_again(n_steps, lengths) / n_steps,
            is_region=is_region,
            offload_carry=offload_carry,
        )

    def __str__(self) -> str:
        levels = " x ".join(map(str, self.lengths))
        return (
            f"{self.n_steps:,} steps as {levels}: {self.n_segments:,} segments of "
            f"{self.block:,}, at most {self.max_saved:,} carries kept at once, each "
            f"step run {self.recompute_factor:.2f} times more"
        )


def find_segments(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[SegmentedScan, ...]:
    """List the scans of a function that run in segments, without running it.

    Args:
        fn: Any function that JAX can trace, such as a loss with `remat.scan` in it, or
            what `remat.segment_scans` returned.
        *args: What it is called with: arrays, `jax.ShapeDtypeStruct`s, pytrees of
            them, and static values.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        The scans in program order, equal ones of one line once.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> def loss(x):
        ...     return remat.scan(lambda c, _: (jnp.sin(c), None), x, None, 1021)[0]
        >>> (scan,) = remat.find_segments(loss, 0.5)
        >>> scan.n_segments, scan.block, scan.recompute_factor
        (32, 32, 1.0)
    """
    with recorded(fn, args, kwargs) as recording:
        return segments_in(recording.closed)


def segments_in(jaxpr: compat.AnyJaxpr) -> tuple[SegmentedScan, ...]:
    """The segmented scans of a traced program."""
    return tuple(dict.fromkeys(_found(jaxpr, None)))


def _found(jaxpr: compat.AnyJaxpr, source: str | None) -> Iterator[SegmentedScan]:
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if (scan := getattr(eqn.params.get("policy"), "scan", None)) is not None:
            yield dataclasses.replace(scan, source=source)
        is_call = eqn.params.get("name") == CALL_NAME
        inside = compat.source_line(eqn) if is_call else source
        for sub in compat.subjaxprs(eqn.params):
            yield from _found(sub, inside)


CALL_NAME = "segmented_scan"
"""Name of the program that takes a scan's place."""


def n_run_again(n_steps: int, lengths: Lengths) -> int:
    """Steps that are run again, each time counted.

    A segment is run again for the carries into its own segments. The rest, which runs
    last and stands in no loop, is then left out.

    Example:
        >>> n_run_again(97, (10, 10)), n_run_again(1000, (10, 10, 10))
        (97, 2000)
        >>> n_run_again(95, (5, 5, 4))  # its last 15 steps as 4, 4, 4 and 3
        187
    """
    lengths = inner(n_steps, lengths)
    pieces = cut(n_steps, lengths)
    if pieces is None:
        return 0

    def of_segment(size: int) -> int:
        own = cut(size, inner(size, lengths[1:]))
        return size - (own.rest if own else 0) + n_run_again(size, lengths[1:])

    rest = of_segment(pieces.rest) if pieces.rest else 0
    return pieces.count * of_segment(pieces.block) + rest
