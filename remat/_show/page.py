"""A memory report as one HTML file that needs no network.

The page has its data, style and script inside, and a policy that forbids it to load
anything. What is in it beyond this file stands in `page.html`, `page.css`, `page.js`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from string import Template
from typing import Any

from remat._explain._explain import explain_report
from remat._finding import Finding
from remat._report._diff import ReportDiff
from remat._report._report import MemoryReport
from remat._show.diff import costs, diff_title
from remat._show.palette import CATEGORY_COLORS, PHASE_COLORS
from remat._show.report import title, totals
from remat._sizes import format_bytes

MAX_ROWS = 10_000
"""Rows of a table; more would make a page of many megabytes that nobody reads."""

_BUFFER_COLUMNS = (
    "bytes",
    "unpadded_bytes",
    "shape",
    "dtype",
    "category",
    "phase",
    "module_path",
    "label",
    "source",
    "n_stacked",
    "instruction",
    "primitive",
)
_CHANGE_COLUMNS = (
    "name",
    "category",
    "source",
    "before_bytes",
    "after_bytes",
    "to_host_bytes",
    "change_bytes",
)


def report_page(
    report: MemoryReport,
    diff: ReportDiff | None = None,
    findings: Iterable[Finding] | None = None,
) -> str:
    """The page of a report.

    Args:
        report: What it is about.
        diff: What changed from another program, if that is to be shown.
        findings: What was found out; None to look at the report alone.

    Returns:
        A whole HTML document.
    """
    found = explain_report(report) if findings is None else tuple(findings)
    data = json.dumps(_data(report, diff, found), separators=(",", ":"))
    return Template(_asset("page.html")).substitute(
        title=html.escape(title(report)),
        css=_asset("page.css"),
        script=_asset("page.js"),
        # Nothing in a JSON string may end the script element it stands in.
        data=data.replace("<", "\\u003c"),
    )


def notebook_html(
    report: MemoryReport,
    diff: ReportDiff | None = None,
    findings: Iterable[Finding] | None = None,
) -> str:
    """The page in a frame, as a notebook shows it."""
    page = html.escape(report_page(report, diff, findings), quote=True)
    return (
        f'<iframe srcdoc="{page}" style="width:100%;height:800px;border:0" '
        'sandbox="allow-scripts" title="memory report"></iframe>'
    )


def _asset(name: str) -> str:
    return (files("remat._show") / name).read_text(encoding="utf-8")


def _data(
    report: MemoryReport, diff: ReportDiff | None, findings: tuple[Finding, ...]
) -> dict[str, Any]:
    """What the script draws, as small as it can be."""
    left_out = len(report.buffers) - MAX_ROWS
    notes = list(report.notes)
    if left_out > 0:
        notes.append(f"The {left_out} smallest buffers are not on this page.")
    return {
        "totals": [["peak", format_bytes(report.peak_bytes)], *totals(report)],
        "findings": [
            {
                "severity": one.severity,
                "source": one.source,
                "message": one.message,
                "fix": one.fix,
            }
            for one in findings
        ],
        "notes": notes,
        "categories": report.by_category(),
        "colors": CATEGORY_COLORS,
        "phase_colors": {phase or "": color for phase, color in PHASE_COLORS.items()},
        "timeline": [
            [
                point.position,
                point.instruction,
                point.device_bytes,
                point.host_bytes,
                point.phase,
                point.n_runs,
            ]
            for point in report.timeline
        ],
        "summits": [
            [point.device_bytes, point.instruction, point.phase]
            for point in report.summits()
        ],
        "buffers": {
            "columns": ["space", *_BUFFER_COLUMNS],
            "rows": [
                [one.memory_space, *(getattr(one, name) for name in _BUFFER_COLUMNS)]
                for one in report.buffers[:MAX_ROWS]
            ],
        },
        "diff": _diff_data(diff) if diff else None,
    }


def _diff_data(diff: ReportDiff) -> dict[str, Any]:
    return {
        "summary": f"{diff_title(diff)}; {costs(diff)}",
        "columns": _CHANGE_COLUMNS,
        "rows": [
            [getattr(change, name) for name in _CHANGE_COLUMNS]
            for change in diff.changes[:MAX_ROWS]
        ],
    }
