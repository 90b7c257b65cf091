"""What rules the peak, where it is not the layers' residuals.

Each rule looks at the buffers live at the peak, names the line, and says what would
lower it where a policy of the layers cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat._finding import Finding
from remat._hlo._spaces import DEVICE
from remat._report._buffer import Buffer
from remat._report._report import MemoryReport
from remat._sizes import format_bytes

RULES = 0.25
"""Share of the peak from which one thing rules it."""
HELD = 0.6
"""Share of the peak from which arguments and gradients rule it."""
PADDING = 0.05
"""Share of the peak from which padding is worth a word."""
ONE_KIND = 0.5
"""Share of the residuals from which one kind of value rules them."""
NEARLY_ALL = 0.99
"""A kind of residual of more leaves no rest to keep instead."""
_MOST_ALIKE = 4
"""More values of one shape than these (logits, softmax, gradient) are those of layers.
"""


def dominant(report: MemoryReport) -> tuple[Finding, ...]:
    """Says what rules the peak and what would help.

    Args:
        report: With its buffers.

    Returns:
        Findings, at most one of a kind; none where residuals of layers rule.
    """
    buffers = [b for b in report.buffers if b.memory_space == DEVICE]
    live = sum(buffer.bytes for buffer in buffers)
    if not live:
        return ()
    rules = (
        _one_value,
        _microbatches,
        _stacked_parameters,
        _held,
        _one_kind_of_residual,
        _padding,
    )
    return tuple(f for rule in rules for f in rule(buffers, live))


def _one_value(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """A value of no layer, such as logits, alone or with its gradient."""
    groups: dict[int, list[Buffer]] = {}
    for one in buffers:
        # What runs in a loop belongs to its layers.
        if one.category not in ("temporaries", "residuals"):
            continue
        if one.n_stacked == 1 and one.n_runs == 1:
            groups.setdefault(_n_elements(one), []).append(one)
    if not groups:
        return
    group = max(groups.values(), key=_bytes)
    rest = _bytes(b for b in buffers if b.category == "residuals" and b not in group)
    if _bytes(group) < max(RULES * live, rest) or len(group) > _MOST_ALIKE:
        return
    largest = max(group, key=lambda one: one.bytes)
    yield Finding(
        code="one-value-rules",
        severity="warning",
        where=largest.module_path or "",
        source=_line(group),
        message=(
            f"{_value(largest)} rules the peak: {_share(_bytes(group), live)}, in "
            f"{len(group)} buffers; other residuals are {format_bytes(rest)}, so no "
            "policy of the layers can lower it."
        ),
        fix=_what_helps(largest),
    )


def _what_helps(buffer: Buffer) -> str:
    if len(buffer.shape) >= 3 and buffer.shape[-1] == buffer.shape[-2]:
        return "These look like attention scores: use a flash-attention kernel."
    return (
        "If these are logits, compute the loss over chunks of tokens (a chunked loss: "
        "jax.checkpoint inside lax.map)."
    )


def _microbatches(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """Residuals of all microbatches at once: a scan over them is differentiated."""
    n = _leading(buffers, ("batch",)) - _leading(buffers, ("parameters",))
    stacks = [
        one
        for one in buffers
        if one.category == "residuals" and one.n_stacked > 1 and one.shape[0] in n
    ]
    if not stacks or _bytes(stacks) < RULES * live:
        return
    largest = max(stacks, key=lambda one: one.bytes)
    yield Finding(
        code="microbatches-kept",
        severity="warning",
        where=largest.module_path or "",
        source=largest.source,
        message=(
            f"Residuals of all {largest.shape[0]} microbatches are kept at once, "
            f"{_share(_bytes(stacks), live)}: the scan over them is differentiated as "
            "a whole."
        ),
        fix=(
            "Take value_and_grad inside the scan's body and add the gradients up in "
            "its carry."
        ),
    )


def _stacked_parameters(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """Copies of parameters that a scan returns from every step."""
    parameters = [b for b in buffers if b.category == "parameters"]
    # Where parameters cannot be told from activations, only what is returned counts.
    kinds = ("outputs", "temporaries", "residuals") if parameters else ("outputs",)
    parameters = parameters or [b for b in buffers if b.category == "argument"]
    shapes = {one.shape for one in parameters if len(one.shape) >= 2}
    stacks = [
        one
        for one in buffers
        if one.category in kinds and one.shape[1:] in shapes
        if one.category == "outputs" or one.n_stacked > 1
    ]
    if not stacks or _bytes(stacks) < RULES * live:
        return
    largest = max(stacks, key=lambda one: one.bytes)
    yield Finding(
        code="parameters-stacked",
        severity="warning",
        where=largest.module_path or "",
        source=largest.source,
        message=(
            f"{largest.shape[0]} copies of parameters are stacked as a scan's "
            f"output, {_share(_bytes(stacks), live)}."
        ),
        fix="Return them as the scan's carry only, and the last ones at the end.",
    )


def _held(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """Parameters, optimizer state and gradients, which no policy touches."""
    categories = ("parameters", "optimizer", "gradients", "argument")
    sizes = {c: _bytes(b for b in buffers if b.category == c) for c in categories}
    whole = sum(sizes.values())
    if whole < HELD * live:
        return
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in sizes.items() if n)
    largest = max(sizes, key=lambda name: sizes[name])
    of_it = (b for b in buffers if b.category == largest)
    buffer = max(of_it, key=lambda one: one.bytes)
    yield Finding(
        code="state-rules",
        severity="info",
        where=buffer.name,
        source=buffer.source,
        message=(
            f"{whole / live:.0%} of the peak is no activation: {parts}. No policy "
            "can lower it."
        ),
        fix=_STATE_HELP[largest],
    )


_STATE_HELP = {
    "optimizer": "Shard the optimizer state over devices, or keep it in fewer bits.",
    "parameters": "Shard the parameters over devices, or keep them in bfloat16.",
    "gradients": "Shard the gradients, or accumulate them in bfloat16.",
    "argument": "Donate arguments that the outputs replace, or shard them.",
}


def _one_kind_of_residual(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """One kind of value that takes more than half of what is kept."""
    kept = [one for one in buffers if one.category == "residuals"]
    kinds: dict[tuple[str | None, str | None], list[Buffer]] = {}
    for one in kept:
        kinds.setdefault((one.source, one.primitive), []).append(one)
    if not kinds or _bytes(kept) < RULES * live:
        return
    group = max(kinds.values(), key=_bytes)
    share = _bytes(group) / _bytes(kept)
    if not ONE_KIND <= share < NEARLY_ALL:
        return
    largest = max(group, key=lambda one: one.bytes)
    square = len(largest.shape) >= 3 and largest.shape[-1] == largest.shape[-2]
    yield Finding(
        code="one-residual-rules",
        severity="info",
        where=largest.module_path or "",
        source=largest.source,
        message=(
            f"One kind of value, {_value(largest)}, is "
            f"{_bytes(group) / _bytes(kept):.0%} of the residuals "
            f"({format_bytes(_bytes(group))})"
            + ("; by its shape, attention scores." if square else ".")
        ),
        fix=(
            "A policy that recomputes it and saves the rest, by name or by module, "
            "gives most of the saving for little recompute."
        ),
    )


def _padding(buffers: list[Buffer], live: int) -> Iterator[Finding]:
    """Arrays that the target's tiles make more than twice as large (TPU)."""
    padded = [one for one in buffers if one.bytes > 2 * max(1, one.unpadded_bytes)]
    waste = _bytes(padded) - sum(one.unpadded_bytes for one in padded)
    if waste < PADDING * live:
        return
    largest = max(padded, key=lambda one: one.bytes - one.unpadded_bytes)
    yield Finding(
        code="padded",
        severity="warning",
        where=largest.module_path or "",
        source=largest.source,
        message=(
            f"Padding to the target's tiles takes {_share(waste, live)}: "
            f"{_value(largest)} is {format_bytes(largest.bytes)} for "
            f"{format_bytes(largest.unpadded_bytes)} of values."
        ),
        fix="Make its last dimension a multiple of 128, or put a larger one last.",
    )


def _leading(buffers: Iterable[Buffer], categories: tuple[str, ...]) -> set[int]:
    """First dimensions of arguments, beyond 1."""
    of = (b for b in buffers if b.category in categories and len(b.shape) > 1)
    return {buffer.shape[0] for buffer in of} - {1}


def _line(group: Iterable[Buffer]) -> str | None:
    """The line of the largest buffer that has one."""
    lines = [b for b in group if b.source]
    return max(lines, key=lambda b: b.bytes).source if lines else None


def _value(buffer: Buffer) -> str:
    shape = ",".join(map(str, buffer.shape))
    return f"{buffer.dtype}[{shape}] ({buffer.name})"


def _n_elements(buffer: Buffer) -> int:
    size = 1
    for dimension in buffer.shape:
        size *= dimension
    return size


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _share(size: int, live: int) -> str:
    return f"{format_bytes(size)}, {size / max(1, live):.0%} of the peak"
