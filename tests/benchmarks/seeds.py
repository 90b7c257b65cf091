"""What this field began with, at real sizes: `python -m tests.benchmarks.seeds`.

Chen et al. 2016: checkpoint every block, and a model fits that did not. Korthikanti et
al. 2022: recompute what is cheap, keep the products, and nearly all of the saving costs
nearly nothing. Longer sequences and larger batches on one device, found by search. ViT
at 1024 and 2048 pixels. Goes on where it was stopped; writes JSON and Markdown.
"""

import argparse
from typing import Any

import optax

import remat
from remat import models
from tests.benchmarks.cells import RESULTS, fill, gib, markdown, publish

POLICIES = ("none", "save_dots", "save_dots_no_batch", "nothing")
STEPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt2", "v5e", {"batch": 16}),
    ("gpt2-xl", "h100", {"batch": 16}),
    ("llama-3.2-1b", "h100", {"batch": 4}),
    ("vit-b16", "h100", {"image_size": 1024, "batch": 4}),
    ("vit-b16", "h100", {"image_size": 2048, "batch": 1}),
    ("vit-b16", "v5e", {"image_size": 1024, "batch": 4}),
    ("vit-b16", "v5e", {"image_size": 1024, "batch": 4, "attention": "pallas"}),
    ("vit-b16", "v5e", {"image_size": 2048, "batch": 1, "attention": "pallas"}),
    ("gpt2", "v5e", {"batch": 16, "attention": "pallas"}),
)
SEARCHES: tuple[dict[str, Any], ...] = (
    {"largest": "batch", "multiple_of": 1, "start": 32, "options": {}},
    {"largest": "seq", "multiple_of": 128, "start": 8192, "options": {"batch": 1}},
)
SEARCHED = (
    "none",
    "save_dots",
    "save_dots_no_batch",
    "save_qkv_proj",
    "nothing",
    "offload_dots_no_batch",
)


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Figures of a step, or the largest size that fits."""
    return _largest(cell) if "largest" in cell else _step(cell)


def _step(cell: dict[str, Any]) -> dict[str, Any]:
    built = models.build(cell["model"], **cell["options"])
    found = remat.compare(
        built.loss,
        *built.args,
        policies=(cell["policy"],),
        target=cell["target"],
        optimizer=optax.adamw(1e-3),
        exact=True,
    )
    (row,) = found.rows
    return {
        "peak_bytes": row.peak_bytes,
        "fits": row.fits,
        "recompute_flops": row.recompute_flops,
        "flops": row.flops,
        "exact": row.exact,
    }


def _largest(cell: dict[str, Any]) -> dict[str, Any]:
    what = cell["largest"]

    def build(size: int) -> tuple[Any, Any]:
        sizes: dict[str, Any] = {**cell["options"], what: size}
        built = models.build(cell["model"], **sizes)
        return built.loss, built.args

    found = remat.fit(
        build,
        start=cell["start"],
        multiple_of=cell["multiple_of"],
        policies=(cell["policy"],),
        target=cell["target"],
        what=what,
        optimizer=optax.adamw(1e-3),
    )
    (row,) = found.rows
    return {
        "size": row.largest,
        "peak_bytes": row.row.peak_bytes,
        "budget_bytes": found.budget_bytes,
    }


def cells() -> list[dict[str, Any]]:
    """All there is to measure, what is quick first."""
    searches = [
        {"model": "gpt2", "target": "h100", **search, "policy": policy}
        for search in SEARCHES
        for policy in SEARCHED
    ]
    steps = [
        {"model": model, "target": target, "options": options, "policy": policy}
        for model, target, options in STEPS
        for policy in POLICIES
    ]
    return searches + steps


def tables(found: list[dict[str, Any]]) -> str:
    """The cells as Markdown."""
    found = [
        cell for wanted in cells() for cell in found if wanted.items() <= cell.items()
    ]
    steps = [cell for cell in found if "largest" not in cell]
    searches = [cell for cell in found if "largest" in cell]
    return (
        "Peak of an AdamW step on one device (**bold** fits), the share of what full\n"
        "recomputation saves, and the FLOPs added to a step without any.\n\n"
        + markdown(
            ["model", "target", "options", "policy", "GiB", "saving", "more FLOPs"],
            (_step_row(cell, steps) for cell in steps),
        )
        + "\nThe largest batch and the longest sequence that fit, by search: the next\n"
        "size no longer does.\n\n"
        + markdown(
            ["model", "target", "what", "policy", "largest", "GiB"],
            (_search_row(cell) for cell in searches),
        )
    )


def _step_row(cell: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in cell["options"].items())
    names = [cell["model"], cell["target"], options, cell["policy"]]
    if "error" in cell:
        return [*names, "fails", "–", "–"]
    peak = ("" if cell["exact"] else "≥ ") + gib(cell["peak_bytes"])
    more = cell["recompute_flops"] / (cell["flops"] - cell["recompute_flops"])
    shown = f"**{peak}**" if cell["fits"] else peak
    return [*names, shown, _saving(cell, steps), f"{100 * more:.2f} %"]


def _saving(cell: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Of what `nothing` saves beside `none`, the share that this policy does."""
    same = {key: cell[key] for key in ("model", "target", "options")}
    peaks = {
        each["policy"]: each.get("peak_bytes")
        for each in steps
        if same.items() <= each.items()
    }
    none, full = peaks.get("none"), peaks.get("nothing")
    if none is None or full is None or none == full:
        return "–"
    return f"{(none - cell['peak_bytes']) / (none - full):.0%}"


def _search_row(cell: dict[str, Any]) -> list[str]:
    given = "".join(f", {key} {value}" for key, value in cell["options"].items())
    what = cell["largest"] + given
    names = [cell["model"], cell["target"], what, cell["policy"]]
    if "error" in cell:
        return [*names, "fails", "–"]
    return [*names, f"{cell['size']:,}", gib(cell["peak_bytes"])]


def main() -> None:
    """Fills the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = RESULTS / "seeds.json"
    publish("seeds", tables(fill(path, cells(), measure)), "training.md")


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()
