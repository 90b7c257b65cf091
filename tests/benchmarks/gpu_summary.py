"""What the rows of the GPU benchmark say: ratios, ranks, and whether plans win."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OFFLOADS = {
    "offload_dots": "save_dots",
    "offload_dots_no_batch": "save_dots_no_batch",
}
"""Policies that move to the host what another one keeps on the device."""
Found = Mapping[str, Any]


def summary(found: Found) -> dict[str, Any]:
    """From a benchmark's rows and budgets to figures a model, and over all.

    Args:
        found: With `rows`, as `tests.benchmarks.gpu` writes them, and `budgets`.
    """
    rows = [row for row in found["rows"] if "analysis_peak_bytes" in row]
    by_model: dict[str, list[Found]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    return {
        "analysed_to_predicted_peak": _spread(rows, _analysed),
        "measured_to_predicted_peak": _spread(rows, _measured),
        "measured_to_estimated_time": _spread(rows, _time),
        "models": {
            model: {
                "time_rank_correlation": rank_correlation(of),
                "offload_overlap": overlaps(of),
                "plans": plans(of, found["budgets"].get(model, {})),
            }
            for model, of in by_model.items()
        },
    }


def _analysed(row: Found) -> float | None:
    return _ratio(row["analysis_peak_bytes"], row, "peak_bytes")


def _measured(row: Found) -> float | None:
    return _ratio(row.get("measured_peak_bytes"), row, "peak_bytes")


def _time(row: Found) -> float | None:
    return _ratio(row.get("step_s"), row, "estimated_step_s")


def _ratio(figure: float | None, row: Found, name: str) -> float | None:
    predicted = (row["predicted"] or {}).get(name)
    return figure / predicted if figure and predicted else None


def _spread(rows: Sequence[Found], ratio: Any) -> dict[str, float] | None:
    ratios = [one for one in map(ratio, rows) if one is not None]
    if not ratios:
        return None
    middle = statistics.median(ratios)
    return {"least": min(ratios), "median": middle, "most": max(ratios)}


def rank_correlation(rows: Sequence[Found]) -> float | None:
    """Spearman's, of estimated and measured time; None below three rows."""
    from scipy.stats import spearmanr

    pairs = [
        (row["predicted"]["estimated_step_s"], row["step_s"])
        for row in rows
        if _time(row) is not None
    ]
    if len(pairs) < 3:
        return None
    found: Any = spearmanr([one for one, _ in pairs], [other for _, other in pairs])
    return float(found.statistic)


def overlaps(rows: Sequence[Found]) -> dict[str, float]:
    """The share of each offload's transfers that hides behind the compute.

    One step moves the host's bytes out and back. What it takes longer than the same
    policy keeping them on the device is the share that does not hide.
    """
    by_policy = {row["policy"]: row for row in rows if row.get("step_s")}
    found = {}
    for policy, kept in OFFLOADS.items():
        row, base = by_policy.get(policy), by_policy.get(kept)
        if row is None or base is None or "link_bytes_per_s" not in row:
            continue
        moving = 2 * row["host_bytes"] / row["link_bytes_per_s"]
        found[policy] = 1 - (row["step_s"] - base["step_s"]) / moving
    return found


def plans(rows: Sequence[Found], budgets: Mapping[str, int]) -> dict[str, Any]:
    """Whether the plan for each budget is faster than all named policies that fit it.

    What fits is decided by what was analysed on the card, for plan and policies alike.
    """
    by_policy = {row["policy"]: row for row in rows if row.get("step_s")}
    found = {}
    for name, budget in budgets.items():
        plan = by_policy.get(name)
        rivals = {
            policy: row["step_s"]
            for policy, row in by_policy.items()
            if policy not in budgets and row["analysis_peak_bytes"] <= budget
        }
        if plan is None or not rivals:
            continue
        best = min(rivals, key=lambda policy: rivals[policy])
        found[name] = {
            "budget_bytes": budget,
            "fits": plan["analysis_peak_bytes"] <= budget,
            "step_s": plan["step_s"],
            "best_named": best,
            "best_named_step_s": rivals[best],
            "faster": plan["step_s"] < rivals[best],
        }
    return found


def summary_lines(of: Found) -> list[str]:
    """The summary for a terminal."""
    lines = []
    for name in (
        "analysed_to_predicted_peak",
        "measured_to_predicted_peak",
        "measured_to_estimated_time",
    ):
        if (spread := of[name]) is not None:
            figures = ", ".join(f"{key} {value:.3f}" for key, value in spread.items())
            lines.append(f"{name.replace('_', ' ')}: {figures}")
    for model, one in of["models"].items():
        if one["time_rank_correlation"] is not None:
            lines.append(
                f"{model}: rank correlation {one['time_rank_correlation']:.3f}"
            )
        for policy, share in one["offload_overlap"].items():
            lines.append(f"{model} {policy}: {share:.0%} of the transfers hidden")
        for plan, duel in one["plans"].items():
            lines.append(
                f"{model} {plan} at {duel['budget_bytes'] / 2**20:,.0f} MiB: "
                f"{1e3 * duel['step_s']:.1f} ms against "
                f"{1e3 * duel['best_named_step_s']:.1f} ms of {duel['best_named']}: "
                + ("faster" if duel["faster"] else "not faster")
                + ("" if duel["fits"] else ", but over its budget")
            )
    return lines
