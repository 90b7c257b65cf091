"""Lint rules about matrix products that a policy for them does not see."""

import collections
from collections.abc import Iterator

from remat._finding import Finding
from remat._lint._flow import KERNELS, MATMUL_LIKE
from remat._lint._policy import is_batched
from remat._lint._program import Linted
from remat._sizes import format_flop


def unseen_matmuls(linted: Linted) -> Iterator[Finding]:
    """Matrix products that a dots policy recomputes: grouped, scaled, kernels, experts.

    Products of two activations with batch dimensions are left out: that is what a
    policy without batch dimensions means to recompute.
    """
    flow = linted.flow
    if not _is_for_dots(linted):
        return
    unseen = [p for p in sorted(flow.rerun) if _is_unseen(linted, p)]
    if not unseen:
        return
    kinds = collections.Counter(_kind(linted, p) for p in unseen)
    seen = [p for p in flow.decisions if linted.primitive(p) in MATMUL_LIKE]
    flops, total = flow.flops(unseen), flow.flops(flow.known)
    listed = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    share = f", {format_flop(flops)} ({flops / total:.0%})" if flops else ""
    yield linted.finding(
        "unseen-matmul",
        "warning",
        f"{linted.policy!r} keeps {len(seen)} matrix products and does not see "
        f"{listed}{share}, which run again.",
        "'save_dots_with_weights' sees grouped and expert products; results of a "
        "kernel are kept by save(primitive(name)), by module or by name.",
        linted.source(unseen[0]),
    )


MATMUL_RULES = (unseen_matmuls,)


def _is_for_dots(linted: Linted) -> bool:
    """Whether the policy is one for matrix products, and not for a few by name."""
    if linted.policy is None:
        return False
    primitives = linted.policy.primitives
    if primitives is not None:
        return "dot_general" in primitives
    kept = {linted.primitive(p) for p in linted.flow.decisions}
    return bool(kept & MATMUL_LIKE) and kept <= MATMUL_LIKE | KERNELS | {"name"}


def _is_unseen(linted: Linted, position: int) -> bool:
    flow, primitive = linted.flow, linted.primitive(position)
    if primitive in KERNELS:
        return True
    if primitive not in MATMUL_LIKE:
        return False
    of_inputs = any(v in flow.inputs for v in flow.equation(position).operands)
    return of_inputs or primitive not in ("dot_general", "conv_general_dilated")


def _kind(linted: Linted, position: int) -> str:
    primitive = linted.primitive(position)
    batched = is_batched(linted.flow.equation(position).eqn)
    return f"{primitive} with batch dims (experts)" if batched else primitive
