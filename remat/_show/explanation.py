"""A step, what was found about it, and what differs from another, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from remat._explain._proof import RegionProof
from remat._explain._step import Explanation
from remat._show.diff import diff_view
from remat._show.report import report_view
from remat._sizes import format_count

N_REGIONS = 12


def explanation_view(explanation: Explanation, width: int = 100) -> RenderableType:
    """The report with its findings, the recompute by region, and the difference."""
    parts: list[RenderableType] = [
        report_view(explanation.report, width, explanation.findings)
    ]
    if proofs := [one for one in explanation.proof if one.expected_flops]:
        parts += ["", proof_table(proofs)]
    if (change := explanation.diff) is not None:
        parts += ["", diff_view(change)]
    return Group(*parts)


def proof_table(proofs: Sequence[RegionProof]) -> Table:
    """Per region: what it asks to be computed again, and what is compiled."""
    table = Table(
        title="computed again, per device: asked for and compiled",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1),
        caption=f"and {len(proofs) - N_REGIONS} more regions"
        if len(proofs) > N_REGIONS
        else None,
        caption_justify="left",
    )
    table.add_column("regions", overflow="fold", ratio=1)
    for name in ("products", "compiled", "FLOPs", "compiled"):
        table.add_column(name, justify="right", no_wrap=True)
    for proof in sorted(proofs, key=lambda one: -one.expected_flops)[:N_REGIONS]:
        region = proof.region
        name = region.module_path or region.source or "region"
        times = f" ×{region.n_regions}" if region.n_regions > 1 else ""
        table.add_row(
            f"{name}{times}" + ("" if proof.is_there else "  REMOVED"),
            str(region.n_matmuls),
            str(proof.compiled_matmuls),
            format_count(proof.expected_flops),
            format_count(proof.compiled_flops),
        )
    return table
