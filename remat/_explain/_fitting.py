"""Which named policies would make a step fit that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from remat._compare._measure import Setup, compiled_report, prepare
from remat._compile._compile import CompileError
from remat._finding import Finding
from remat._hlo._spaces import DEVICE
from remat._regions._with_policy import NoNamesFound, with_policy
from remat._report._report import MemoryReport
from remat._sizes import format_bytes

CANDIDATES = ("save_dots", "save_dots_no_batch", "offload_dots", "nothing")
"""Policies that every model can have, from the most that is kept to the least."""

_N_WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """A policy tried on a step that does not fit."""

    policy: str
    """Name of the policy."""
    peak_bytes: int
    """Device memory that it takes."""
    is_floor: bool
    """Whether that is the least the compiler could make of it (TPU, by probe): a run
    may take more, as far as there is room."""
    host_bytes: int
    """Host memory that it takes."""
    fits: bool
    """Whether that is within what the device has."""


def policies_that_fit(
    loss: Callable[..., Any],
    setup: Setup,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Fitting, ...]:
    """Tries named policies: by probe on a TPU, in a fraction of a second each.

    On a GPU each is compiled in full, which takes as long as the step itself did.

    Args:
        loss: The loss, with regions that take a policy.
        setup: How its step is made, and for which target.
        say: Called with a line of text as the work goes on.

    Returns:
        What each would need; those that name nothing the loss has are left out.
    """
    probe = setup.target.kind == "tpu"
    with ThreadPoolExecutor(_N_WORKERS) as pool:
        under_way = []
        for policy in CANDIDATES:
            say(f"{'probing' if probe else 'compiling'} {policy}")
            try:
                prepared = prepare(with_policy(loss, policy), setup)
            except (NoNamesFound, CompileError):
                continue
            found = pool.submit(compiled_report, prepared, setup, probe=probe)
            under_way.append((policy, found))
        return tuple(_fittings(under_way))


def _fittings(under_way: list[tuple[str, Any]]) -> Iterator[Fitting]:
    for policy, future in under_way:
        try:
            report = future.result()
        except CompileError:
            continue
        yield Fitting(
            policy=policy,
            peak_bytes=report.peak_bytes,
            is_floor=not report.exact,
            host_bytes=report.host_bytes,
            fits=report.peak_bytes <= report.available_bytes,
        )


def does_not_fit(
    report: MemoryReport, tried: tuple[Fitting, ...] | None = None
) -> Finding:
    """Says what a step that does not fit needs, and what would help.

    Args:
        report: The step.
        tried: Named policies that were probed; None where none were.
    """
    live = report.by_category(DEVICE)
    whole = sum(live.values()) or 1
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in live.items()
        if size >= 0.02 * whole
    )
    return Finding(
        code="does-not-fit",
        severity="error",
        message=(
            f"Needs {format_bytes(report.peak_bytes)} of "
            f"{format_bytes(report.available_bytes)} usable"
            + (f": {parts}." if parts else ".")
        ),
        fix=_what_fits(tried),
    )


def _what_fits(tried: tuple[Fitting, ...] | None) -> str:
    if tried is None:
        return "See which policies fit: remat compare."
    fitting = [_text(one) for one in tried if one.fits]
    if fitting:
        return f"Would fit: {', '.join(fitting)}."
    if not tried:
        return "It has no regions that take a policy: wrap its layers in remat.remat."
    least = min(tried, key=lambda one: one.peak_bytes)
    return (
        f"No named policy fits, the least is {_text(least)}: shrink the batch, shard, "
        "or keep the optimizer state in fewer bits."
    )


def _text(one: Fitting) -> str:
    host = f", {format_bytes(one.host_bytes)} on the host" if one.host_bytes else ""
    least = "at least " if one.is_floor else ""
    return f"{one.policy} ({least}{format_bytes(one.peak_bytes)}{host})"
