"""Whether what a step asks to be offloaded is on the host once it is compiled."""

from __future__ import annotations

from collections.abc import Iterator

from remat._finding import Finding
from remat._report._offloaded import Offload
from remat._report._report import MemoryReport
from remat._sizes import format_bytes

ENOUGH = 0.9
"""Share of what is to be offloaded from which it counts as offloaded."""


def offload_findings(
    report: MemoryReport, expected: tuple[Offload, ...]
) -> Iterator[Finding]:
    """Says where less is on the host than the step asks for.

    Args:
        report: The compiled step.
        expected: What the traced step moves to the host.
    """
    wanted = sum(one.offloaded_bytes for one in expected) // report.n_devices
    if not wanted or report.host_bytes >= ENOUGH * wanted or _is_cpu(report):
        return
    nested = [one for one in expected if one.n_loops > 1]
    largest = max(nested or expected, key=lambda one: one.offloaded_bytes)
    where = "a scan inside a scan offloads" if nested else "is offloaded"
    above_all = f", above all {largest.name!r}" if largest.name else ""
    yield Finding(
        code="offload-short",
        severity="warning",
        where=largest.name,
        source=largest.source,
        message=(
            f"Of {format_bytes(wanted)} to be offloaded "
            f"{format_bytes(report.host_bytes)} are on the host: XLA kept the rest of "
            f"what {where} on the device{above_all}."
        ),
        fix=(
            "Make one scan of the two, or cut it with remat.scan(segments=)."
            if nested
            else "Offload values that are stacked over a scan of layers."
        ),
    )


def nested_offloads(expected: tuple[Offload, ...]) -> str:
    """What is offloaded out of scans inside scans, in words; empty if nothing is."""
    nested = [one for one in expected if one.n_loops > 1]
    return ", ".join(
        f"{one.name or 'a value'}{f' at {one.source}' if one.source else ''} "
        f"(in {one.n_loops} scans)"
        for one in nested
    )


def _is_cpu(report: MemoryReport) -> bool:
    return report.target.partition(":")[0] == "cpu"
