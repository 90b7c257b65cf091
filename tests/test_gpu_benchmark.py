"""The GPU benchmark: what it sums up, and that it runs, without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat._targets import _plugins
from tests.benchmarks import gpu, gpu_case, gpu_child, gpu_summary

MIB = 2**20


def row(policy: str, peak: int, estimated: float, measured: float, **more: Any) -> dict:
    predicted = {"peak_bytes": peak * MIB, "estimated_step_s": estimated}
    return {
        "model": "m",
        "policy": policy,
        "predicted": predicted,
        "analysis_peak_bytes": 2 * peak * MIB,
        "measured_peak_bytes": 3 * peak * MIB,
        "step_s": measured,
        "host_bytes": 0,
        **more,
    }


def test_ratios_ranks_and_plans():
    rows = [
        row("nothing", 10, 5.0, 9.0),
        row("save_dots", 20, 4.0, 8.0),
        row("none", 40, 2.0, 6.0),
        row("plan1", 25, 3.0, 7.0),
        {"model": "m", "policy": "x", "predicted": None, "out_of_memory": "no"},
    ]
    found = gpu_summary.summary({"rows": rows, "budgets": {"m": {"plan1": 50 * MIB}}})
    assert found["analysed_to_predicted_peak"]["median"] == 2
    assert found["measured_to_predicted_peak"]["most"] == 3
    assert found["measured_to_estimated_time"]["least"] == 9 / 5
    model = found["models"]["m"]
    assert model["time_rank_correlation"] == pytest.approx(1)
    # 2 x 20 MiB fit the 50, 2 x 40 do not: the rival is save_dots.
    plan = model["plans"]["plan1"]
    assert (plan["best_named"], plan["faster"], plan["fits"]) == (
        "save_dots",
        True,
        True,
    )
    assert any("faster" in line for line in gpu_summary.summary_lines(found))


def test_a_plan_that_loses_is_said_to():
    rows = [row("nothing", 10, 1.0, 1.0), row("plan1", 30, 1.0, 2.0)]
    (plan,) = gpu_summary.plans(rows, {"plan1": 50 * MIB}).values()
    assert not plan["faster"]
    assert not plan["fits"]


def test_overlap_is_what_does_not_show():
    link = {"host_bytes": 100, "link_bytes_per_s": 100.0}  # out and back: 2 s
    rows = [row("save_dots", 1, 1.0, 3.0), row("offload_dots", 1, 1.0, 3.5, **link)]
    assert gpu_summary.overlaps(rows) == {"offload_dots": 0.75}


def test_the_parts_have_what_they_name():
    assert set(gpu_summary.OFFLOADS) | set(gpu_summary.OFFLOADS.values()) <= set(
        gpu.POLICIES
    )


def dry_run(out: Path, *args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--out", str(out)]
    done = subprocess.run(
        [*command, "--dry-run", "--seconds", "1500", *args],
        capture_output=True,
        text=True,
        timeout=1600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrote" in done.stdout
    return json.loads((out / "gpu.json").read_text())


def test_a_case_without_timings(tmp_path):
    case = gpu_case.Case(model="gpt2-tiny", policy="nothing")
    found = gpu_case.measure(case, tmp_path, 0)
    assert found["analysis_peak_bytes"] > found["temp_bytes"] > 0
    assert "step_s" not in found


def test_budgets_lie_between_the_ends_and_on_the_card():
    rows = {"none": {"peak_bytes": 110}, "nothing": {"peak_bytes": 10}}
    assert gpu_case._budgets(rows, 200) == {"plan1": 60, "plan2": 30}
    assert gpu_case._budgets(rows, 60) == {"plan1": 35, "plan2": 20}
    assert gpu_case._budgets(rows, 9) == {}


def child(path: Path, code: str) -> gpu_child.Child:
    with open(path.with_suffix(".log"), "w") as log:
        command = [sys.executable, "-c", code, str(path)]
        return gpu_child.Child(path, subprocess.Popen(command, stderr=log))


def test_a_part_that_fails_hangs_or_leaves_half(tmp_path):
    failed = child(tmp_path / "a.json", "raise ValueError('no')").wait(60)
    assert failed == {"failed": "exit code 1 ValueError: no"}
    hangs = "import time; time.sleep(60)"
    assert child(tmp_path / "b.json", hangs).wait(1) == {
        "failed": "took longer than 1 s"
    }
    half = f"import sys; open(sys.argv[1], 'w').write('[1]'); {hangs}"
    kept = child(tmp_path / "c.json", half)
    while not kept.found():
        assert kept.runs
    kept.stop()
    assert kept.found() == [1]
    killed = child(tmp_path / "d.json", hangs)
    killed.stop()
    assert "out of time" in killed.found()["failed"]


@pytest.mark.slow
def test_dry_run_of_all(tmp_path):
    found = dry_run(tmp_path)
    assert not found["skipped"]
    assert not [one for one in found["rows"] if "failed" in one]
    assert {"plan1", "plan2"} <= {one["policy"] for one in found["rows"]}


@pytest.mark.gpu
def test_on_the_card(tmp_path):
    # The tests' own process hides devices from jax.
    hiding = {*_plugins._PROCESS_ENVIRONMENT, "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu", "--out", str(tmp_path)],
        env={k: v for k, v in os.environ.items() if k not in hiding},
        capture_output=True,
        text=True,
        timeout=500,
    )
    if "wanted an NVIDIA GPU" in done.stderr:
        pytest.skip(f"needs an NVIDIA GPU that jax can use: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    spread = found["summary"]["analysed_to_predicted_peak"]
    assert 0.9 < spread["least"] <= spread["most"] < 1.1
