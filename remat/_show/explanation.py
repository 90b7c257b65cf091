"""A step, what was found about it, and what differs from another, in the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType

from remat._explain._step import Explanation
from remat._show.diff import diff_view
from remat._show.report import report_view


def explanation_view(explanation: Explanation, width: int = 100) -> RenderableType:
    """The report with its findings, then the difference if there is one."""
    shown = report_view(explanation.report, width, explanation.findings)
    change = explanation.diff
    return shown if change is None else Group(shown, "", diff_view(change))
