"""Say in words what a policy did: whether the recompute is there, and if it helped.

Three things are compared: what the traced step asks to be computed again, what the
compiled program computes again, and the memory of the same step without regions. FLOPs
of matrix products decide, since XLA repeats element-wise operations as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat._explain._dominant import dominant
from remat._explain._offload import offload_findings
from remat._explain._proof import RegionProof, prove
from remat._finding import Finding
from remat._report._diff import Change, diff
from remat._report._recomputed import Expected, ExpectedRegion
from remat._report._report import MemoryReport
from remat._scan._segmented import SegmentedScan
from remat._sizes import format_bytes, format_count

FELL = 0.05
"""A peak that fell by less of its temporaries did not fall."""
NOTHING = 0.005
"""A share of the peak that tables of pointers and alignment make up."""


def explain_report(
    report: MemoryReport,
    *,
    expected: Expected | None = None,
    base: MemoryReport | None = None,
) -> tuple[Finding, ...]:
    """Finds out what is remarkable about a compiled step.

    Args:
        report: The step.
        expected: What the traced step asks for, from `expected_recompute`; then a
            recompute that XLA removed is told.
        base: The same step without regions, compiled for the same device in the same
            way; then savings that are none, or negative, are told.

    Returns:
        What was found, the worst first; each names a line or module where it can.

    Raises:
        ValueError: The two reports cannot be compared.
    """
    undone = list(_undone(prove(report, expected))) if expected else []
    found = [*undone]
    if expected is not None:
        found += offload_findings(report, expected.offloads)
        found += map(_in_segments, expected.segments)
    if base is not None:
        found += _against(report, expected, base, bool(undone))
    found += dominant(report)
    return tuple(sorted(found, key=lambda finding: finding.rank))


def _undone(proofs: Sequence[RegionProof]) -> Iterator[Finding]:
    """Regions whose recompute is not in the compiled program."""
    for proof in proofs:
        if not proof.is_there:
            yield _cse(proof)


def _cse(proof: RegionProof) -> Finding:
    region = proof.region
    fix = "Set prevent_cse=True."
    if region.prevent_cse:
        fix = "prevent_cse is on and did not keep XLA from it; recompute elsewhere."
    return Finding(
        code="recompute-removed",
        severity="error",
        where=region.module_path,
        source=region.source,
        message=(
            "XLA removed the recompute (common-subexpression elimination): of "
            f"{format_count(proof.expected_flops)}FLOPs of matrix products asked for, "
            f"{format_count(proof.compiled_flops)}FLOPs are there. Memory is not "
            "saved."
        ),
        fix=fix,
    )


def _in_segments(scan: SegmentedScan) -> Finding:
    return Finding(
        code="scan-in-segments",
        severity="info",
        source=scan.source,
        message=f"Runs {scan}.",
        fix="segments= or max_saved= choose another cut.",
    )


def _against(
    report: MemoryReport, expected: Expected | None, base: MemoryReport, undone: bool
) -> Iterator[Finding]:
    """What the regions changed from the step without any."""
    saved = base.peak_bytes - report.peak_bytes
    if -saved > NOTHING * base.peak_bytes:
        yield _negative(report, expected, base)
    elif not undone and report.recompute_flops and saved < FELL * base.temp_bytes:
        # Where XLA rematerialized by itself, the base is squeezed as well.
        if not base.cost.xla_recompute_flops:
            yield _did_not_fall(expected, saved)
    yield from _more_runs(report, base)


def _did_not_fall(expected: Expected | None, saved: int) -> Finding:
    regions = expected.regions if expected else ()
    message = (
        "The recompute is there but the schedule runs it early, so the peak did not "
        f"fall (by {format_bytes(saved)} only)."
    )
    fix = (
        "More tokens a step, or layers in lax.scan, give the schedule a reason to wait."
    )
    if len(regions) == 1 and regions[0].n_regions == 1:
        message = (
            "One region holds the whole computation: its backward pass computes all "
            "of it again at once, so the peak did not fall "
            f"(by {format_bytes(saved)} only)."
        )
        fix = "Wrap each layer in a region of its own, not the whole loss."
    return Finding(
        code="peak-did-not-fall",
        severity="warning",
        where=regions[0].module_path if len(regions) == 1 else "",
        source=regions[0].source if len(regions) == 1 else None,
        message=message,
        fix=fix,
    )


def _negative(
    report: MemoryReport, expected: Expected | None, base: MemoryReport
) -> Finding:
    """More memory than without regions, and the region that did it."""
    change = diff(base, report)
    came = change.came[0]
    region = _region_of(came, expected)
    place = came.source if region is None else region.source or came.source
    message = (
        f"Saves {format_bytes(-change.peak_change_bytes)}: it takes more than the step "
        f"without regions. Most of it is {came.name} "
        f"(+{format_bytes(came.change_bytes)}), which the regions keep."
    )
    fix = "Leave this region out."
    if region is not None and not region.n_matmuls:
        fix = (
            "It computes only element-wise operations again, which XLA fuses anyway "
            "where nothing keeps their inputs apart: leave this region out."
        )
    return Finding(
        code="negative-saving",
        severity="warning",
        where=region.module_path if region else came.module_path or "",
        source=place,
        message=message,
        fix=fix,
    )


def _region_of(came: Change, expected: Expected | None) -> ExpectedRegion | None:
    """The region that a change is in: by module, else by file, else the only one."""
    regions = expected.regions if expected else ()
    path = came.module_path or ""
    inside = [r for r in regions if r.module_path and path.startswith(r.module_path)]
    file = (came.source or "").partition(":")[0]
    near = [r for r in regions if r.source and r.source.partition(":")[0] == file]
    by_line = [region for region in near if region.source == came.source]
    return next(iter((*inside, *by_line, *near, *regions)), None)


def _more_runs(report: MemoryReport, base: MemoryReport) -> Iterator[Finding]:
    """Collectives and custom kernels that the regions run again."""
    kinds = (
        ("collective operations", "n_collectives", "collective_bytes", "sent"),
        ("custom kernels", "n_kernels", "kernel_bytes", "moved"),
    )
    for what, counted, sized, verb in kinds:
        now, then = getattr(report.cost, counted), getattr(base.cost, counted)
        if now <= then:
            continue
        size = getattr(report.cost, sized)
        more = size - getattr(base.cost, sized)
        sizes = (
            f"; {format_bytes(round(size))} {verb}, {format_bytes(round(more))} more"
        )
        yield Finding(
            code="runs-again",
            severity="info",
            message=(
                f"Runs {now:.0f} {what}, {now - then:.0f} more than without regions"
                f"{sizes}."
            ),
            fix="Save what they give to run them once.",
        )
