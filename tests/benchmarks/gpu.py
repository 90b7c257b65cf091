"""Predicted against measured on one NVIDIA card, in at most eight minutes.

    python -m tests.benchmarks.gpu --out DIR
    python -m tests.benchmarks.gpu --out DIR --dry-run    # on a CPU, without timings

For each model and policy, and for plans at two budgets: the compile-only prediction for
this card, made without using it; what `memory_analysis` says on it; the allocator's
peak; the median time of a step; and how much of an offload hides behind the compute.
Prints as it goes and writes `DIR/gpu.json`. What the time did not suffice for is listed
as `skipped`, most telling cases first. Works with jax 0.10 to 0.12.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_summary import summary, summary_lines

POLICIES = (
    *("nothing", "save_dots_no_batch", "plan1", "none", "plan2", "save_dots"),
    *("offload_dots_no_batch", "minimal_with_context", "save_qkv_proj", "offload_dots"),
)
"""In the order they are measured in."""
SECONDS = 450.0
"""For all of it."""
CASE_SECONDS = 4.0
"""Steps of one case."""
PREDICT_SHARE = 0.5
"""Of the time, at most, for predictions."""
STARTS_WITH = 30.0
"""Seconds that must be left for a case to be started."""


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.seconds = seconds

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {line}", flush=True)


def _start(out: Path, part: str, env: dict[str, str], *args: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.benchmarks.gpu_case", part]
    with open(out.with_suffix(".log"), "w") as log:
        return subprocess.Popen(
            [*command, "--out", str(out), *args],
            env={**os.environ, **env},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _finish(process: subprocess.Popen, out: Path, seconds: float) -> dict[str, Any]:
    """What a process wrote, or why it wrote nothing."""
    try:
        process.wait(timeout=max(seconds, 1.0))
        why = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        why = "ran out of time"
    if out.exists():
        return json.loads(out.read_text())
    last = out.with_suffix(".log").read_text().strip().splitlines()[-1:]
    return {"failed": " ".join([why, *last])}


def predictions(
    models: list[str], policies: list[str], target: str, out: Path, clock: Clock
) -> dict[str, Any]:
    """The compile-only figures of every model, each in a process without the card."""
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    at_once = []
    for model in models:
        path = out / f"{model}-predicted.json"
        args = ("--model", model, "--target", target, "--policies", ",".join(policies))
        at_once.append((model, path, _start(path, "predict", hidden, *args)))
    found = {}
    until = time.monotonic() + PREDICT_SHARE * clock.seconds
    for model, path, process in at_once:
        found[model] = _finish(process, path, until - time.monotonic())
        clock.say(f"{model}: predicted {', '.join(found[model].get('rows', ()))}")
    return found


def measured(
    models: list[str],
    policies: list[str],
    predicted: dict[str, Any],
    out: Path,
    clock: Clock,
    seconds: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each case, and the cases that there was no time for."""
    rows, skipped = [], []
    # With the pool whole, what a case finds does not depend on fragments of it.
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    for policy in policies:
        for model in models:
            known = predicted[model].get("rows", {}).get(policy)
            if policy.startswith("plan") and known is None:
                continue
            if clock.left < STARTS_WITH:
                skipped.append(f"{model} {policy}")
                continue
            path = out / f"{model}-{policy}-measured.json"
            path.unlink(missing_ok=True)
            args = ("--model", model, "--policies", policy, "--seconds", str(seconds))
            process = _start(path, "measure", env, *args)
            row = _finish(process, path, clock.left)
            rows.append({"model": model, "policy": policy, "predicted": known, **row})
            clock.say(_line(rows[-1]))
    return rows, skipped


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['policy']}"
    for end in ("failed", "out_of_memory"):
        if end in row:
            return f"{name}: {end.replace('_', ' ')}: {row[end][:200]}"
    mib = [f"{row['analysis_peak_bytes'] / 2**20:,.0f} MiB analysed"]
    if row["predicted"]:
        mib.insert(0, f"{row['predicted']['peak_bytes'] / 2**20:,.0f} MiB predicted")
    if row.get("measured_peak_bytes"):
        mib.append(f"{row['measured_peak_bytes'] / 2**20:,.0f} MiB measured")
    if row.get("step_s"):
        mib.append(f"{1e3 * row['step_s']:.1f} ms a step")
    return f"{name}: {', '.join(mib)}"


def run(
    out: Path,
    *,
    models: list[str],
    policies: list[str],
    seconds: float,
    dry_run: bool,
) -> dict[str, Any]:
    """All of the benchmark; returns what it writes."""
    out.mkdir(parents=True, exist_ok=True)
    clock = Clock(seconds)
    path = out / "device.json"
    device = _finish(_start(path, "device", {}), path, 120)
    clock.say(f"device: {device}")
    if "failed" in device:
        raise SystemExit(f"jax finds no device: {device['failed']}")
    if device["platform"] != "gpu" and not dry_run:
        raise SystemExit(
            f"wanted an NVIDIA GPU, but jax finds {device['kind']}; "
            "install jax[cuda12], or pass --dry-run to skip the timings"
        )
    target = device["kind"] if device["platform"] == "gpu" else "cpu"
    predicted = predictions(models, policies, target, out, clock)
    case_seconds = 0.0 if dry_run else CASE_SECONDS
    rows, skipped = measured(models, policies, predicted, out, clock, case_seconds)
    found = {
        "schema": "remat.gpu_benchmark/1",
        "device": device,
        "dry_run": dry_run,
        "seconds": clock.seconds - clock.left,
        "rows": rows,
        "skipped": skipped,
        "unpredicted": {m: p["failed"] for m, p in predicted.items() if "failed" in p},
        "budgets": {m: p.get("budgets", {}) for m, p in predicted.items()},
    }
    found["summary"] = summary(found)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    for line in summary_lines(found["summary"]):
        clock.say(line)
    clock.say(f"wrote {out / 'gpu.json'}")
    return found


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--dry-run", action="store_true", help="no steps are run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--models", help="of gpt2, llama, gpt2-tiny, llama-tiny")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    default = "gpt2-tiny,llama-tiny" if given.dry_run else "gpt2,llama"
    models: str = given.models or default
    run(
        given.out,
        models=models.split(","),
        policies=given.policies.split(","),
        seconds=given.seconds,
        dry_run=given.dry_run,
    )


if __name__ == "__main__":
    main()
