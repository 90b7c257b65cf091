"""What changed between two reports adds up, to the byte."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat._compare._compare import compare
from remat._compare._comparison import Comparison
from remat._report._build import report_from_program
from remat._targets._target import target
from tests.hlo_programs import (
    LAYERS,
    ROWS,
    TARGETS,
    WIDTH,
    Hlo,
    compile_for,
    donated,
    shape,
    stacked,
)

MIB = 2**20


def by_hand(*temporaries):
    """A report with one argument, one output, and temporaries (op_name, elements)."""
    hlo = Hlo()
    hlo.add("parameter", [256], op_name="x")
    for name, n in temporaries:
        hlo.add("sine", [n], 1, op_name=f"jit(f)/{name}/sin")
    out = hlo.add("add", [256], 1, 1, op_name="jit(f)/add")
    hlo.allocate(1024, (hlo.buffer(1), 0), is_entry_computation_parameter=True)
    hlo.allocate(1024, (hlo.buffer(out), 0), maybe_live_out=True)
    buffers = [hlo.buffer(2 + i) for i in range(len(temporaries))]
    places = list(itertools.accumulate((4 * n for _, n in temporaries), initial=0))
    hlo.allocate(places[-1] + 64, *zip(buffers, places, strict=False))
    hlo.trace(*(("alloc", buffer) for buffer in buffers))
    program = dataclasses.replace(stacked("h100"), hlo_proto=hlo.bytes(), stats=None)
    return report_from_program(program)


def test_what_went_and_came_by_hand():
    before = by_hand(("mlp", 512), ("attention", 1024))
    after = by_hand(("mlp", 256), ("norm", 128))
    change = before.diff(after)
    found = {one.name: one.change_bytes for one in change.changes}
    assert found == {"attention": -4096, "mlp": 1024 - 2048, "norm": 512}
    assert change.peak_change_bytes == -4096 - 1024 + 512
    assert [one.name for one in change.went] == ["attention", "mlp"]
    assert [one.name for one in change.came] == ["norm"]
    assert change.by_category() == {"temporaries": -4096 - 1024 + 512}
    assert change.by_module() == found


@pytest.mark.parametrize("name", TARGETS)
def test_changes_add_up_to_the_difference_of_the_peaks(name):
    first, second = (report_from_program(p(name)) for p in (stacked, donated))
    for before, after in ((first, second), (second, first)):
        change = before.diff(after)
        whole = after.peak_bytes - before.peak_bytes
        assert change.peak_change_bytes == whole
        assert sum(one.change_bytes for one in change.changes) == whole
        for totals in (change.by_category(), change.by_module(), change.by_label()):
            assert sum(totals.values()) == whole
    assert first.diff(first).changes == ()


def test_what_moved_to_the_host_is_told():
    def layer(h, wi):
        return jnp.tanh(jnp.sin(checkpoint_name(h, "carry") @ wi)), None

    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def report(policy):
        def loss(w, x):
            step = jax.checkpoint(layer, policy=policy)
            return (jax.lax.scan(step, x, w)[0] ** 2).mean()

        args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
        return report_from_program(compile_for("h100", jax.grad(loss), *args))

    change = report(None).diff(report(offload))
    assert change.host_change_bytes == LAYERS * ROWS * WIDTH * 4
    moved = sum(one.to_host_bytes for one in change.changes)
    assert moved == LAYERS * ROWS * WIDTH * 4
    assert sum(c.change_bytes for c in change.changes) == change.peak_change_bytes


def test_the_difference_is_data_and_text():
    change = report_from_program(stacked("h100")).diff(
        report_from_program(donated("h100"))
    )
    data = json.loads(change.to_json())
    assert data["schema"] == "remat.report_diff/1"
    rows = data["changes"]
    assert sum(row["change_bytes"] for row in rows) == data["peak_change_bytes"]
    assert "recompute" in str(change) and "before" in str(change)
    assert "What changed" in change.to_html()


def test_peaks_that_cannot_be_compared_are_refused():
    report = report_from_program(stacked("h100"))
    with pytest.raises(ValueError, match="different devices"):
        report.diff(report_from_program(stacked("cpu")))
    with pytest.raises(ValueError, match="floor"):
        report.diff(dataclasses.replace(report, exact=False))


def layers(ws, x):
    for w in ws:
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.sin(x @ w) @ w))(x, w)
    return (x**2).sum()


@pytest.fixture(scope="module")
def compared() -> Comparison:
    args = [shape(64, 64)] * 3, shape(2048, 64)
    return compare(layers, *args, policies=["none", "nothing"], target="cpu")


def test_a_comparison_explains_its_best_row(compared):
    assert compared.best == "none"
    peaks, memory, cost = compared.explain()
    assert peaks.startswith("none against nothing: peak ")
    assert "came: " in memory
    assert "fewer FLOPs" in cost
    assert peaks in str(compared) and cost in compared.to_html()
    assert compared.to_dict()["why"] == [peaks, memory, cost]


def test_a_comparison_explains_against_no_remat(compared):
    best = dataclasses.replace(compared, best="nothing")
    peaks, memory, cost = best.explain()
    assert peaks.startswith("nothing against none: peak ")
    assert memory.startswith("Went: ")
    assert "more FLOPs" in cost
    assert dataclasses.replace(compared, best=None).explain() == ()
    assert target("cpu") == compared.target
