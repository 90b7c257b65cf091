"""What measures can be found, started, and turned into tables."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import cpu_steps, policies
from tests.benchmarks import pytorch_partitioner as partitioner
from tests.benchmarks.cells import DOCS, RESULTS, shown_on


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *args],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_benchmark_says_what_it_is():
    found = command.benchmarks()
    assert {"policies", "cpu_steps", "gpu", "dominance", "scan_scaling"} <= set(found)
    assert all(found.values()), found
    assert "gpu_case" not in found


def test_list_and_errors():
    listed = run("--list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in command.benchmarks())
    wrong = run("dominanse")
    assert wrong.returncode == 1
    assert "Did you mean dominance?" in wrong.stderr


@pytest.mark.parametrize(
    ("name", "page"), [("sharded", "sharding.md"), ("seeds", "training.md")]
)
def test_pages_show_tables_as_they_were_measured(name, page):
    text = (DOCS / page).read_text()
    assert shown_on(text, name, (RESULTS / f"{name}.md").read_text()) == text


def test_table_marks_floors_and_what_does_not_fit():
    row = {
        "model": "m",
        "batch": 8,
        "target": "v5e",
        "best": "nothing",
        "recompute_flops": 50,
        "forward_flops": 100,
        "estimated_step_s": 0.001,
    }
    rows = [
        {**row, "policy": "none", "fits": False, "exact": True, "peak_bytes": 2**31},
        {**row, "policy": "save_dots", "fits": True, "exact": True, "peak_bytes": 9},
        {**row, "policy": "nothing", "fits": None, "exact": False, "peak_bytes": 2**30},
    ]
    table = policies.markdown({"rows": rows})
    assert "| `none` | 2.00 GiB (does not fit) | 50 % fwd | 1.0 ms |" in table
    assert "| `nothing` ◀ | ≥ 1.00 GiB |" in table
    assert "save_dots" not in table


def test_the_partitioners_table_is_what_its_file_says():
    found = json.loads(partitioner.FILE.read_text())
    assert partitioner.FILE.with_suffix(".md").read_text() == partitioner.markdown(
        found
    )
    assert all(row["gflop"] <= row["pytorch_gflop"] for row in found["rows"])


@pytest.mark.slow
def test_steps_are_measured_beside_what_is_predicted():
    found = cpu_steps.measure("gpt2-tiny", {}, 2)
    by_policy = {row["policy"]: row for row in found["rows"]}
    assert by_policy["none"]["time_ratio"] == by_policy["none"]["flops_ratio"] == 1
    assert by_policy["nothing"]["flops_ratio"] > by_policy["save_dots"]["flops_ratio"]
