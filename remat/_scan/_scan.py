"""`remat.scan`: `jax.lax.scan` in the memory of a few segments."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from remat import _jax_compat as compat
from remat._scan._rewrite import ScanOptions, ScanPolicy, segmented_equation
from remat._scan._segments import Segments


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    policy: ScanPolicy = None,
    segments: Segments = "sqrt",
    max_saved: int | None = None,
    offload_carry: bool = False,
) -> tuple[Any, Any]:
    """Scan like `jax.lax.scan`, keeping few of the carries for the backward pass.

    The steps are cut into segments. Between forward and backward pass only the
    carry into each segment is kept; going backward, one segment at a time is run
    again. With the default, N steps need about `2 * sqrt(N)` carries instead of N,
    for one more forward pass. Any N will do: what does not fill a segment is a
    shorter one of its own. No step is padded or run without need, and `xs` are read
    in place, never copied.

    Without a derivative it costs what `lax.scan` does. Each call traces `f`, so put
    it under `jax.jit`, as any training step is.

    Memory: let C be the bytes of the carry that the backward pass reads (and 4 more,
    for the position, when there are `xs`), and S what it keeps of a step. For two
    levels, N = a*b + r steps in a segments of b and one of r,

        residuals = (a + [r > 0]) * C          between forward and backward pass,
        peak      = max(a*C + b*S, (a + 1)*C + r*S)    (the second only if r > 0)

    of temporaries, and the cotangent of one carry. With further levels `b*S` becomes
    the same formula for one segment. S is what `jax.vjp` of `f` keeps of one step if
    the body is no region of its own (`policy="none"`); if it is one, S is C and what
    the policy keeps, and the values inside one step come on top.

    Recompute: k levels run every step k - 1 times more. A body that is a region adds
    what its policy recomputes, at most one forward pass.

    Args:
        f: Body: carry and slice of `xs` to new carry and slice of `ys`.
        init: First carry: any pytree of arrays.
        xs: Pytree of arrays with leading axis N, or None.
        length: N, where `xs` do not say.
        reverse: Whether to run from the last slice to the first.
        unroll: Steps of the innermost loop to unroll, as in `lax.scan`.
        policy: What the body keeps while its segment runs back. A policy, as
            `with_policy` takes it: the body is a region. "none": it is no region.
            None (the default): it is no region of its own, unless the values made
            inside the body and kept by `jax.vjp` are larger than the carry, or only
            so no more is kept than by `lax.scan` over `jax.checkpoint(f)`; then it is
            one that recomputes everything ("nothing"). Everything that has a
            derivative is taken to be differentiated.
        segments: "sqrt": the two levels that keep least, or one where N is so small
            that two keep no less. A number: that many segments (one fewer where
            fewer full ones suffice). A tuple of k lengths, outermost first, whose
            product is at least N: k levels, memory N^(1/k). None: no segments.
        max_saved: Instead of `segments`: the most carries to keep at once (a step
            kept counts as one). The fewest extra forward passes that do it.
        offload_carry: Whether the carries kept between forward and backward pass
            wait in host memory: those into the outermost segments, or with
            `segments=None` into every step. Going backward, three of four come back
            while the segment after is run; on GPU all do with the compiler option
            `xla_gpu_enable_pipelined_host_offloading=True`.

    Returns:
        The last carry and the stacked `ys`, as from `lax.scan`.

    Raises:
        SegmentsError: `segments` is no way to cut, holds fewer than N steps, or
            `max_saved` cannot be met (the least that can is named).
        PolicyError: `policy` is none.
        TypeError, ValueError: As from `lax.scan`.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> def loss(x):
        ...     last, ys = remat.scan(lambda c, x: (jnp.sin(c + x), c), x, jnp.ones(97))
        ...     return last + ys.sum()
        >>> float(jax.grad(loss)(0.5)).__round__(4)
        1.0486
    """
    options = ScanOptions.of(policy, segments, max_saved, offload_carry)
    if not all(hasattr(x, "shape") for x in jax.tree.leaves(xs)):
        return lax.scan(f, init, xs, length, reverse, unroll)  # which says so
    leaves, treedef = jax.tree.flatten((init, xs))

    def plain(*flat: Any) -> Any:
        init, xs = treedef.unflatten(flat)
        return lax.scan(f, init, xs, length, reverse, unroll)

    closed, out = compat.trace(plain, *leaves)
    outputs = compat.evaluate(_cut(closed, options), leaves)
    return jax.tree.unflatten(jax.tree.structure(out), outputs)


def _cut(closed: compat.ClosedJaxpr, options: ScanOptions) -> compat.ClosedJaxpr:
    """The program with its scan, which stands at the top level, in segments."""
    jaxpr = compat.open_jaxpr(closed)
    eqns = [
        segmented_equation(compat.made_here(eqn), options)
        if eqn.primitive.name == "scan"
        else eqn
        for eqn in jaxpr.eqns
    ]
    return compat.with_open(closed, jaxpr.replace(eqns=eqns))
