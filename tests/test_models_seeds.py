"""What this field began with, on real models for devices that are elsewhere.

The figures at full size, from full compiles, are those of
`python -m tests.benchmarks.seeds`.
"""

import functools
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import remat
from remat import models
from remat._compare._measure import Setup, compiled_report, prepare
from remat._compare._step import build_step


@functools.cache
def floor(policy, name="gpt2", **options):
    """Least peak of an AdamW step on a v5e, in bytes, and the step's FLOPs."""
    built = models.build(name, **options)
    setup = Setup(
        target=remat.target("v5e"),
        make_step=lambda fn: build_step(fn, built.args, optimizer=optax.adamw(1e-3)),
    )
    step = prepare(remat.with_policy(built.loss, policy), setup)
    return compiled_report(step, setup, probe=True).peak_bytes, step.flops


def test_checkpointing_every_block_fits_what_did_not():
    available = remat.target("v5e").available_bytes
    without, _ = floor("none", batch=16)
    with_it, _ = floor("nothing", batch=16)
    # Not even the compiler's least fits; and with it half of the device is free.
    assert without > 1.5 * available
    assert with_it < 0.5 * available


def test_recomputing_what_is_cheap_saves_most_for_nearly_nothing():
    (none, base), (full, all_flops) = (floor(p, batch=16) for p in ("none", "nothing"))
    for policy, least_saved, most_flops in (
        ("save_dots", 0.5, 0.005),  # norms, GELU, softmax again; every product kept
        ("save_dots_no_batch", 0.85, 0.06),  # and the scores: attention's first half
    ):
        peak, flops = floor(policy, batch=16)
        saved, cost = (none - peak) / (none - full), flops / base - 1
        print(f"{policy}: {saved:.0%} of the saving for {cost:.2%} more FLOPs")
        assert saved > least_saved
        assert 0 < cost < most_flops
    assert all_flops / base - 1 > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("image_size", [1024, 2048])
def test_vit_at_high_resolution(image_size):
    available = remat.target("v5e").available_bytes
    size: dict[str, Any] = {"batch": 4096 // image_size, "image_size": image_size}
    flash = {**size, "attention": "pallas"}
    peaks = {
        (policy, kind): floor(policy, "vit-b16", **options)[0]
        for policy in ("none", "nothing")
        for kind, options in (("xla", size), ("pallas", flash))
    }
    print(image_size, peaks)
    assert peaks["none", "xla"] > available
    assert peaks["nothing", "pallas"] < 0.5 * available
    assert peaks["nothing", "pallas"] < 0.6 * peaks["none", "pallas"]
    # Scores in fp32 are (B, 12, P, P): with one layer of them 2048 pixels do not fit.
    assert (peaks["nothing", "xla"] < available) == (image_size == 1024)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "multiple_of"), [("seq", 128), ("batch", 1)])
def test_a_budget_holds_more_under_each_policy(what, multiple_of):
    sizes: dict[str, Any] = {"batch": 4, "seq": 256}

    def build(size):
        options = {**sizes, what: size}
        built = models.build("gpt2-tiny", n_layers=8, dtype=jnp.float32, **options)
        return built.loss, built.args

    found = remat.fit(
        build,
        start=sizes[what],
        multiple_of=multiple_of,
        policies=("none", "save_dots", "nothing"),
        target="h100",
        budget="128MiB",
        what=what,
        optimizer=optax.adamw(1e-3),
    )
    print(found)
    largest = [row.largest for row in found.rows]
    assert largest == sorted(largest)
    assert largest[-1] >= 1.5 * largest[0] > 0
    assert all(row.row.peak_bytes <= found.budget_bytes for row in found.rows)
