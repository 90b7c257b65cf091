"""Peak, recompute and estimated time of policies on models and targets.

    python -m tests.benchmarks.policies [--models gpt2,vit-b16] [--targets v5e,h100]

Compiles each training step, optimizer included, for devices that need not be here, and
writes `tests/benchmarks/results/policies.json`, from which `tests.benchmarks.readme`
makes the README's table. About ten minutes on two cores; answers are cached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

import remat
from remat._compare._comparison import versions
from remat._sizes import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "policies.json"
POLICIES = (
    *("none", "save_dots", "save_dots_no_batch", "minimal_with_context"),
    *("save_qkv_proj", "nothing", "offload_dots_no_batch"),
)
MODELS = ("gpt2", "vit-b16")
TARGETS = ("v5e", "h100")
KEPT = (
    *("policy", "fits", "exact", "peak_bytes", "temp_bytes", "host_bytes"),
    *("flops", "recompute_flops", "forward_flops", "estimated_step_s"),
)
"""Of each row."""


def measure(models: Sequence[str], targets: Sequence[str]) -> dict[str, Any]:
    """Compiles everything and returns what the file holds."""
    rows = []
    for model in models:
        built = remat.models.build(model)
        for target in targets:
            table = remat.compare(
                built.loss,
                *built.args,
                policies=POLICIES,
                target=target,
                optimizer=optax.adamw(1e-3),
                model=model,
                on_progress=lambda line, m=model, t=target: print(f"{m} {t}: {line}"),
            )
            of = {"model": model, "target": target, "best": table.best}
            of |= {"batch": built.describe["batch"]}
            rows += [{**of, **_kept(row)} for row in table.rows]
    return {
        "schema": "remat.benchmark.policies/1",
        "command": f"python -m tests.benchmarks policies --models {','.join(models)} "
        f"--targets {','.join(targets)}",
        "versions": dict(versions()),
        "rows": rows,
    }


def _kept(row: remat.Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in KEPT}


def markdown(found: Mapping[str, Any]) -> str:
    """The table of the README."""
    lines = [
        "| model, batch | target | policy | peak | recompute | step (estimate) |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if row["policy"] not in ("none", row["best"], "nothing"):
            continue
        share = row["recompute_flops"] / row["forward_flops"]
        mark = "" if row["exact"] else "≥ "
        best = " ◀" if row["policy"] == row["best"] else ""
        size = format_bytes(row["peak_bytes"])
        too_large = " (does not fit)" if row["fits"] is False else ""
        time = row["estimated_step_s"]
        lines.append(
            f"| {row['model']}, {row['batch']} | {row['target']} "
            f"| `{row['policy']}`{best} | {mark}{size}{too_large} "
            f"| {100 * share:.0f} % fwd | {format_seconds(time) if time else '–'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the file and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--json", type=Path, default=FILE)
    given = parser.parse_args()
    found = measure(given.models.split(","), given.targets.split(","))
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()
