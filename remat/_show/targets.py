"""The named devices, as a terminal table."""

from __future__ import annotations

from rich.table import Table

from remat._sizes import format_bytes, format_count
from remat._targets._target import targets


def targets_table() -> Table:
    """Every named device with its figures, and whether it can be compiled for here."""
    table = Table(header_style="bold")
    table.add_column("target")
    for column in ("memory", "usable", "bandwidth", "bf16", "fp32", "host link"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("compiles here")
    for target in targets():
        why_not = target.why_not()
        table.add_row(
            target.name,
            format_bytes(target.memory_bytes),
            format_bytes(target.available_bytes),
            f"{format_count(target.bandwidth_bytes_s)}B/s",
            f"{format_count(target.flops_bf16)}FLOP/s",
            f"{format_count(target.flops_fp32)}FLOP/s",
            f"{format_count(target.host_link_bytes_s)}B/s",
            "yes" if why_not is None else f"no: {why_not}",
        )
    return table
