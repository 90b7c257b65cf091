"""The most layers of GPT-2's width whose gradient fits one device, by kind of remat.

    python -m tests.benchmarks deepest_stack [--target v5e] [--batch 16]

For the plain stack, full recompute of every layer, that in sqrt(N) segments, and those
with their carries on the host. A TPU is asked by probe, so what fits is what the
compiler can squeeze into the device. Writes
`tests/benchmarks/results/deepest_stack.json`.
"""

import argparse
import bisect
import json
from pathlib import Path

import remat
from remat._compare._measure import Setup, compiled_report, prepare
from remat._compare._step import build_step
from remat._targets._target import quiet_environment

FILE = Path(__file__).parent / "results" / "deepest_stack.json"
MOST = 512

WAYS = {
    "plain": lambda loss: remat.with_policy(loss, "none"),
    "full": lambda loss: remat.with_policy(loss, "nothing"),
    "sqrt": lambda loss: remat.segment_scans(remat.with_policy(loss, "nothing")),
    "sqrt + offload": lambda loss: remat.segment_scans(
        remat.with_policy(loss, "nothing"), offload_carry=True
    ),
}


def report_of(way, n_layers, target, batch):
    """The gradient of a stack, by probe on a TPU."""
    built = remat.models.build("gpt2", n_layers=n_layers, batch=batch)
    device = remat.target(target)
    setup = Setup(target=device, make_step=lambda loss: build_step(loss, built.args))
    prepared = prepare(WAYS[way](built.loss), setup)
    return compiled_report(prepared, setup, probe=device.kind == "tpu")


def deepest(way, target, batch):
    """Layers of the deepest stack that fits, and its report."""
    known = {}

    def does_not_fit(n_layers):
        known[n_layers] = report = report_of(way, n_layers, target, batch)
        return report.peak_bytes > report.available_bytes

    first_too_deep = bisect.bisect_left(range(1, MOST), True, key=does_not_fit) + 1
    n_layers = first_too_deep - 1
    return n_layers, known.get(n_layers)


def main():
    parser = argparse.ArgumentParser(description="The deepest stack that fits.")
    parser.add_argument("--target", default="v5e")
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    print("| layers' remat | target | batch | layers | peak MiB | host MiB |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for way in WAYS:
        n_layers, report = deepest(way, given.target, given.batch)
        sizes = (report.peak_bytes, report.host_bytes) if report else (0, 0)
        mib = " | ".join(f"{size / 2**20:,.0f}" for size in sizes)
        print(f"| {way} | {given.target} | {given.batch} | {n_layers} | {mib} |")
        rows[f"{way} {given.target} batch {given.batch}"] = {
            "layers": n_layers,
            "peak_bytes": sizes[0],
            "host_bytes": sizes[1],
        }
        FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    quiet_environment()
    main()
