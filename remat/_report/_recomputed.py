"""The matrix products that recompute values: those asked for, and those compiled.

JAX puts a scope around what a region computes again, and the scope survives into the
compiled program. So both sides can be counted by module: what the traced step asks for,
and what XLA left of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from remat._cost._jaxpr import equation_cost, jaxpr_cost
from remat._cost._ops import matmul_flops
from remat._cost._xla_remat import added_by_xla, is_within
from remat._hlo._module import Module
from remat._jax_compat import (
    REGION_PRIMITIVES,
    n_shards_around,
    open_jaxpr,
    source_line,
    subjaxprs,
)
from remat._naming._op_name import parse_op_name
from remat._report._lines import lines_of
from remat._report._offloaded import Offload, expected_offload
from remat._scan._segmented import SegmentedScan, segments_in

_SCOPE = "rematted_computation"
_OWN_CALLERS = ("_step.py", "_explain_step.py", "_compare.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """Matrix products that one module computes again, in one run."""

    module_path: str
    """Modules and scopes; empty where there are none."""
    lines: tuple[str, ...] = ()
    """Lines of the user's code that they come from, innermost first."""
    n_matmuls: int
    """Products and convolutions, trip counts included."""
    matmul_flops: float
    """Their FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRegion:
    """What regions at one place of the traced step compute again."""

    module_path: str
    """Modules and scopes around them; empty where there are none."""
    source: str | None
    """The user's line that made them, `model.py:12`, where known."""
    n_regions: int
    """Regions here, loops around them counted."""
    prevent_cse: bool
    """Whether all of them keep XLA from merging the recompute with the first run."""
    in_loop: bool
    """Whether a loop that XLA does not unroll is around all of them."""
    n_matmuls: int
    """Matrix products and convolutions computed again."""
    matmul_flops: float
    """Their FLOPs."""
    flops: float
    """All FLOPs computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a traced step asks to be computed, before XLA touched it. Global sizes."""

    regions: tuple[ExpectedRegion, ...]
    """Regions that the step differentiates, those at one place together."""
    matmul_flops: float
    """FLOPs of all matrix products of the step."""
    offloads: tuple[Offload, ...] = ()
    """Values that it moves to host memory."""
    segments: tuple[SegmentedScan, ...] = ()
    """Scans that run in segments."""

    @property
    def recompute_matmul_flops(self) -> float:
        """Of these, what is computed again."""
        return sum(region.matmul_flops for region in self.regions)


def expected_recompute(closed_jaxpr: Any) -> Expected:
    """Counts what the regions of a differentiated step compute again.

    Args:
        closed_jaxpr: The traced step, as `jax.make_jaxpr` gives.

    Returns:
        The regions by place, with what each asks for.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = jax.checkpoint(lambda x: jnp.sin(x @ x))
        >>> step = jax.grad(lambda x: layer(x).sum())
        >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> expected_recompute(jax.make_jaxpr(step)(x)).regions[0].n_matmuls
        1
    """
    found = _expected(open_jaxpr(closed_jaxpr), 1, False)
    places: dict[tuple[str, str | None], ExpectedRegion] = {}
    for one in found:
        place = (one.module_path, one.source)
        places[place] = _together(places[place], one) if place in places else one
    return Expected(
        regions=tuple(places.values()),
        matmul_flops=jaxpr_cost(closed_jaxpr).matmul_flops,
        offloads=expected_offload(closed_jaxpr),
        segments=segments_in(closed_jaxpr),
    )


def compiled_recompute(module: Module, runs: Mapping[int, int]) -> list[Recomputed]:
    """Counts the recomputing matrix products of a compiled program by module.

    Those that XLA's own rematerialization added are not counted.

    Args:
        module: The program.
        runs: Times each computation runs.

    Returns:
        One entry a module path and line, in program order.
    """
    added = added_by_xla(module)
    found: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for instruction in module.instructions.values():
        name = parse_op_name(instruction.op_name)
        if name.phase != "recompute" or is_within(module, instruction, added):
            continue
        flops = matmul_flops(module, instruction)
        n = runs.get(instruction.computation, 1)
        if flops and n:
            lines = lines_of(module, instruction.message.metadata.stack_frame_id)
            place = name.module_path or "", lines
            count, total = found.get(place, (0, 0.0))
            found[place] = count + n, total + n * flops
    return [
        Recomputed(module_path=path, lines=lines, n_matmuls=count, matmul_flops=total)
        for (path, lines), (count, total) in found.items()
    ]


def _expected(jaxpr: Any, times: int, in_loop: bool) -> Iterator[ExpectedRegion]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in REGION_PRIMITIVES and eqn.params.get("differentiated"):
            yield _region(eqn, times, in_loop)
            continue
        n, inside = times, in_loop
        if name == "scan":
            n *= eqn.params["length"]
            inside = in_loop or _stays_a_loop(eqn.params)
        elif name == "while":
            inside = True
        for sub in subjaxprs(eqn.params):
            yield from _expected(open_jaxpr(sub), n, inside)


def _stays_a_loop(scan: Mapping[str, Any]) -> bool:
    """A scan whose body holds one step; with more, XLA sees several at once."""
    return scan["unroll"] == 1 and scan["length"] > 1


def _region(eqn: Any, times: int, in_loop: bool) -> ExpectedRegion:
    again = [
        inner
        for inner in open_jaxpr(eqn.params["jaxpr"]).eqns
        if _SCOPE in str(inner.source_info.name_stack)
    ]
    costs = [equation_cost(inner) for inner in again]
    everywhere = times * n_shards_around(eqn)
    prevent = eqn.params["prevent_cse"]
    return ExpectedRegion(
        module_path=_path(eqn, again),
        source=_line(eqn, again),
        n_regions=times,
        prevent_cse=prevent if isinstance(prevent, bool) else any(prevent),
        in_loop=in_loop,
        n_matmuls=times * sum(map(_n_matmuls, again)),
        matmul_flops=everywhere * sum(cost.matmul_flops for cost in costs),
        flops=everywhere * sum(cost.flops for cost in costs),
    )


def _path(region: Any, inside: list[Any]) -> str:
    """The modules that all of a region is in, those it opens itself included."""
    outer = region.source_info.name_stack
    names = [f"{outer}/{inner.source_info.name_stack}/" for inner in inside]
    paths = [(parse_op_name(name).module_path or "").split("/") for name in names]
    levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return "/".join(parts[0] for parts in levels)


def _line(region: Any, inside: list[Any]) -> str | None:
    """Where a region was made; of a whole loss, that is no line of the user's."""
    line = source_line(region)
    file = (line or "").partition(":")[0]
    return source_line(inside[0]) if file in _OWN_CALLERS and inside else line


def _n_matmuls(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return 1
    length = eqn.params["length"] if name == "scan" else 1
    inside = (open_jaxpr(sub).eqns for sub in subjaxprs(eqn.params))
    return length * sum(_n_matmuls(one) for eqns in inside for one in eqns)


def _together(a: ExpectedRegion, b: ExpectedRegion) -> ExpectedRegion:
    return ExpectedRegion(
        module_path=a.module_path,
        source=a.source,
        n_regions=a.n_regions + b.n_regions,
        prevent_cse=a.prevent_cse and b.prevent_cse,
        in_loop=a.in_loop and b.in_loop,
        n_matmuls=a.n_matmuls + b.n_matmuls,
        matmul_flops=a.matmul_flops + b.matmul_flops,
        flops=a.flops + b.flops,
    )
