"""Findings as a few lines under a table of policies."""

import dataclasses
from collections.abc import Mapping, Sequence

from remat._finding import Finding

_SAID_ELSEWHERE = frozenset({"unemitted-name", "no-region"})
"""Rules of which a comparison speaks by itself: missing names, skipped policies."""
_MOST = 3
"""Policies that a line lists."""


def notes_of(
    findings: Mapping[str, Sequence[Finding]], n_policies: int
) -> tuple[str, ...]:
    """One line for each rule that found an error or gives a warning.

    Args:
        findings: The findings of policies, by label.
        n_policies: How many policies were looked at.

    Returns:
        The lines, errors first: the policies, the first finding, and how many more
        `remat.lint` tells of.
    """
    by_code: dict[str, list[tuple[str, Finding]]] = {}
    for label, found in findings.items():
        for finding in found:
            if finding.severity != "info" and finding.code not in _SAID_ELSEWHERE:
                by_code.setdefault(finding.code, []).append((label, finding))
    groups = sorted(by_code.values(), key=lambda group: group[0][1].rank)
    return tuple(_line(group, n_policies) for group in groups)


def _line(group: Sequence[tuple[str, Finding]], n_policies: int) -> str:
    labels = list(dict.fromkeys(label for label, _ in group))
    (first_label, first) = group[0]
    others = {_about(f) for label, f in group if label == first_label} - {_about(first)}
    who = _listed(labels)
    if n_policies > 1 and len(labels) == n_policies:
        who = "every policy"
    more = f" (and {len(others)} more; see remat.lint)" if others else ""
    return f"{who}: {_text(first)}{more}"


def _about(finding: Finding) -> Finding:
    return dataclasses.replace(finding, where="")


def _text(finding: Finding) -> str:
    at = finding.source or finding.where
    place = f", {at}" if at else ""
    return f"[{finding.code}{place}] {finding.message} {finding.fix}"


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:_MOST])
    rest = len(labels) - _MOST
    return shown if rest <= 0 else f"{shown} and {rest} more"
