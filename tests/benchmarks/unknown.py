"""What the report cannot name, on every model and target.

    python -m tests.benchmarks unknown [--models gpt2-tiny,vit-tiny] [--targets v5e]
    python -m tests.benchmarks unknown --models mixtral-8x7b --layers 4 --targets h100

For a training step with AdamW: the share of the peak in category "unknown", and the
share of the residuals' bytes that have a label or a module path; beside them the size
of the parameters and of the report as a page. On a TPU the step is compiled by probe.
Writes `tests/benchmarks/results/unknown.json`.
"""

import argparse
import json
from pathlib import Path

import optax

import remat
from remat._compare._measure import Setup, compiled_report, prepare
from remat._compare._step import build_step
from remat._hlo._spaces import DEVICE, HOST
from remat._sizes import format_bytes

FILE = Path(__file__).parent / "results" / "unknown.json"
MODELS = ("gpt2-tiny", "llama-tiny", "mixtral-tiny", "vit-tiny")
TARGETS = ("v5e", "v5p", "v6e", "a100-80gb", "h100", "b200")


def report_of(model, target, policy="nothing", **options):
    """The report of a model's training step under a policy."""
    built = remat.models.build(model, **options)
    device = remat.target(target)
    setup = Setup(
        target=device,
        compiler_options={},
        make_step=lambda loss: build_step(
            loss, built.args, optimizer=optax.adamw(1e-3)
        ),
    )
    prepared = prepare(remat.with_policy(built.loss, policy), setup)
    return compiled_report(prepared, setup, probe=device.kind == "tpu")


def unknown_share(report):
    """Bytes of unknown origin over all that are live at the peak."""
    here = [b for b in report.buffers if b.memory_space == DEVICE]
    unknown = sum(b.bytes for b in here if b.category == "unknown")
    return unknown / sum(b.bytes for b in here)


def labelled_share(report):
    """Of the residuals' bytes, those with a label or a module path; 1 without any."""
    kept = [
        b
        for b in report.buffers
        if b.category == "residuals" and b.memory_space in (DEVICE, HOST)
    ]
    whole = sum(b.bytes for b in kept)
    named = sum(b.bytes for b in kept if b.label or b.module_path)
    return named / whole if whole else 1.0


def size_of(report):
    """Bytes of the parameters, at the peak."""
    return report.by_category().get("parameters", 0)


def main():
    parser = argparse.ArgumentParser(description="What the report cannot name.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--policies", default="nothing,save_dots")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    given = parser.parse_args()
    options = {"n_layers": given.layers} if given.layers else {}
    depth = f" of {given.layers} layers" if given.layers else ""
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    print("| model | policy | target | parameters | peak | unknown | named | page |")
    print("|---|---|---|---:|---:|---:|---:|---:|", flush=True)
    for model in given.models.split(","):
        for policy in given.policies.split(","):
            for target in given.targets.split(","):
                report = report_of(model, target, policy, **options)
                unknown, named = unknown_share(report), labelled_share(report)
                rows[f"{model}{depth} {policy} {target}"] = {
                    "parameter_bytes": size_of(report),
                    "peak_bytes": report.peak_bytes,
                    "unknown": unknown,
                    "residuals_named": named,
                    "html_bytes": len(report.to_html()),
                }
                page = f"{len(report.to_html()) / 1e6:.2f} MB"
                sizes = " | ".join(
                    map(format_bytes, (size_of(report), report.peak_bytes))
                )
                text = f"{sizes} | {unknown:.2%} | {named:.1%} | {page}"
                print(f"| {model}{depth} | {policy} | {target} | {text} |", flush=True)
                FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
