"""Llama on TPU pods, per device: `python -m tests.benchmarks.sharded`.

A whole AdamW step of llama-3.1-8b and 70b, compiled for `v5e:4x4` and `v5p:4x4x4` under
each of the main policies. A probe gives every cell a floor (`≥`) in seconds; full
compiles under the devices' real limit take minutes each, so a few of the cells that
matter have one. Goes on where it was stopped; writes JSON and a Markdown table.
"""

import argparse
import functools
from typing import Any

import optax

import remat
from remat import models
from remat._compare._measure import Setup, compiled_report, prepare
from remat._compare._step import build_step
from tests.benchmarks.cells import RESULTS, fill, gib, markdown, publish

POLICIES = (
    "none",
    "save_dots",
    "save_dots_no_batch",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "nothing",
    "offload_dots_no_batch",
)
PLACES = (
    ("v5e:4x4", "fsdp=16"),
    ("v5e:4x4", "fsdp=4,tensor=4"),
    ("v5p:4x4x4", "fsdp=64"),
    ("v5p:4x4x4", "fsdp=16,tensor=4"),
)
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
FULL = (
    ("llama-3.1-8b", "v5e:4x4", "fsdp=16", "nothing"),
    ("llama-3.1-70b", "v5p:4x4x4", "fsdp=64", "nothing"),
    *(
        (model, "v5p:4x4x4", "fsdp=16,tensor=4", policy)
        for model in MODELS
        for policy in reversed(POLICIES)
    ),
)
"""Every policy on one mesh of the larger pod, and what only just fits."""


def measure(cell: dict[str, Any], *, seq: int) -> dict[str, Any]:
    """One device's figures of a step."""
    target = remat.target(cell["target"])
    built = models.build(cell["model"], mesh=cell["mesh"], target=target, seq=seq)
    setup = Setup(
        target=target,
        make_step=lambda fn: build_step(fn, built.args, optimizer=optax.adamw(1e-3)),
    )
    prepared = prepare(remat.with_policy(built.loss, cell["policy"]), setup)
    report = compiled_report(prepared, setup, probe=not cell["full"])
    return {
        "batch": built.describe["batch"],
        "seq": seq,
        "peak_bytes": report.peak_bytes,
        "argument_bytes": report.argument_bytes,
        "host_bytes": report.host_bytes,
        "available_bytes": report.available_bytes,
        "flops": prepared.flops,
        "fits": report.peak_bytes <= report.available_bytes,
    }


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as Markdown: a row a policy, a column a place."""
    parts = []
    for model in MODELS:
        header = [model, *(f"{target} `{mesh}`" for target, mesh in PLACES)]
        rows = [
            [policy, *(_shown(cells, model, *place, policy) for place in PLACES)]
            for policy in POLICIES
        ]
        parts.append(markdown(header, rows))
    return _LEGEND + "\n" + "\n".join(parts)


_LEGEND = """\
GiB of one device at the peak of an AdamW step; fp32 parameters, bf16 compute, T = 4096,
one sequence for each part of the batch. `≥` is a probe's floor, ~~struck out~~ where it
alone exceeds the device (15.75 GiB on v5e, 95.7 on v5p). **Bold** is a full compile
under the device's limit, and fits.
"""


def _shown(
    cells: list[dict[str, Any]], model: str, target: str, mesh: str, policy: str
) -> str:
    key = {"model": model, "target": target, "mesh": mesh, "policy": policy}
    found = [cell for cell in cells if key.items() <= cell.items()]
    found.sort(key=lambda cell: cell["full"])
    if not found:
        return "–"
    best = found[-1]
    if "error" in best:
        return "fails"
    text = gib(best["peak_bytes"])
    if not best["full"]:
        text = f"≥ {text}"
    if not best["fits"]:
        return f"~~{text}~~"
    return f"**{text}**" if best["full"] else text


def _full() -> list[dict[str, Any]]:
    names = ("model", "target", "mesh", "policy")
    return [{**dict(zip(names, place, strict=True)), "full": True} for place in FULL]


def _may_fit(floors: list[dict[str, Any]], full: dict[str, Any]) -> bool:
    """Whether a compile can succeed: not where the floor alone is too much."""
    wanted = {**full, "full": False}
    return any(wanted.items() <= cell.items() and cell["fits"] for cell in floors)


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--no-full", action="store_true")
    given = parser.parse_args()
    places = [
        {"model": model, "target": target, "mesh": mesh, "policy": policy}
        for model in MODELS
        for target, mesh in PLACES
        for policy in POLICIES
    ]
    path = RESULTS / "sharded.json"
    one = functools.partial(measure, seq=given.seq)
    found = fill(path, [{**place, "full": False} for place in places], one)
    if not given.no_full:
        found = fill(path, [cell for cell in _full() if _may_fit(found, cell)], one)
    publish("sharded", table(found), "sharding.md")


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()
