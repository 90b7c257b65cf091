"""The memory report of compiled programs."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from remat._compile._compile import XlaStats
from remat._hlo import HloError
from remat._hlo._spaces import guess_kind
from remat._naming._op_name import parse_op_name
from remat._report._analyze import analyze
from remat._report._build import report_from_hlo, report_from_program
from remat._report._report import MemoryReport, Roles
from remat._targets._target import target
from tests.hlo_programs import (
    LAYERS,
    ROWS,
    TARGETS,
    WIDTH,
    Hlo,
    compile_for,
    donated,
    module_of,
    proto_of,
    shape,
    stacked,
    stacked_loss,
)

WEIGHTS = LAYERS * WIDTH * WIDTH * 4
INPUT = ROWS * WIDTH * 4
MIB = 2**20
SLOW_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(params=TARGETS)
def name(request):
    return request.param


def report_of(hlo: Hlo, name="h100", roles=None, **changes):
    program = dataclasses.replace(
        stacked(name), hlo_proto=hlo.bytes(), stats=None, oom=None, **changes
    )
    return report_from_program(program, roles=roles)


def stats_of(report: MemoryReport) -> XlaStats:
    assert report.xla_stats is not None
    return report.xla_stats


# Sums


def test_arguments_and_outputs_are_what_the_shapes_say(name):
    report = report_from_program(stacked(name))
    assert report.argument_bytes == WEIGHTS + INPUT
    scalars = report.output_bytes - WEIGHTS  # the loss and the output's table
    assert 0 < scalars <= 2048
    assert report.alias_bytes == 0
    held = report.argument_bytes + report.output_bytes
    assert report.peak_bytes == held + report.temp_bytes


@pytest.mark.parametrize("name", ["cpu", "h100"])
@pytest.mark.parametrize("program", [stacked, donated])
def test_sums_equal_xlas_own(name, program):
    report = report_from_program(program(name))
    stats = stats_of(report)
    assert report.argument_bytes == stats.argument_bytes
    assert report.output_bytes == stats.output_bytes
    assert report.alias_bytes == stats.alias_bytes
    assert report.temp_bytes == stats.temp_bytes
    assert report.host_bytes == stats.host_temp_bytes


@pytest.mark.slow
def test_tpu_sums_equal_xlas_own_but_for_fragmentation():
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    program = compile_for("v5e", jax.value_and_grad(stacked_loss), *args, probe=False)
    report = report_from_program(program)
    stats = stats_of(report)
    assert report.argument_bytes == stats.argument_bytes
    assert report.output_bytes == stats.output_bytes
    assert report.alias_bytes == stats.alias_bytes
    assert report.host_bytes == stats.host_temp_bytes
    assert report.temp_bytes < stats.temp_bytes
    assert report.cost.estimated_cycles > 0
    assert any("fragmentation" in note for note in report.notes)
    # The compiler's own verdict: what is assigned is enough, what it states is not
    # needed. Code and a few tables come on top of what is assigned.
    limit = report.peak_bytes + report.generated_code_bytes + 2 * MIB
    stated = stats.argument_bytes + stats.output_bytes + stats.temp_bytes
    assert limit < stated
    options = {"xla_tpu_max_hbm_size_mib": -(-limit // MIB)}
    again = compile_for(
        "v5e", jax.value_and_grad(stacked_loss), *args, probe=False, options=options
    )
    assert again.executable is not None


def test_a_donated_argument_counts_once(name):
    report = report_from_program(donated(name))
    assert report.alias_bytes == WEIGHTS
    arguments = [b for b in report.buffers if b.category == "argument"]
    found = {(b.module_path, b.bytes) for b in arguments}
    assert (len(arguments), found) == (2, {("w", WEIGHTS), ("x", INPUT)})
    held = report.argument_bytes + report.output_bytes - report.alias_bytes
    assert report.peak_bytes == held + report.temp_bytes


def test_live_buffers_sum_to_the_live_peak(name):
    report = report_from_program(stacked(name))
    live = sum(b.bytes for b in report.buffers if b.memory_space == "device")
    assert live == report.live_peak_bytes
    assert report.live_peak_bytes <= report.peak_bytes + report.constant_bytes
    assert sum(report.by_category().values()) == live


def test_sums_by_hand():
    hlo = Hlo()
    x = hlo.add("parameter", [256], op_name="x", parameter_number=0)
    y = hlo.add("parameter", [512], op_name="y", parameter_number=1)
    a = hlo.add("sine", [256], x, op_name="jit(f)/sin")
    b = hlo.add("cosine", [256], a, op_name="jit(f)/cos")
    hlo.add("add", [256], a, b, op_name="jit(f)/add")
    buffers = [hlo.buffer(i) for i in range(1, 6)]
    hlo.allocate(1024, (buffers[0], 0), is_entry_computation_parameter=True)
    hlo.allocate(
        2048,
        (buffers[1], 0),
        is_entry_computation_parameter=True,
        parameter_number=1,
        maybe_live_out=True,
    )
    hlo.allocate(1024, (buffers[4], 0), maybe_live_out=True)
    hlo.allocate(2560, (buffers[2], 0), (buffers[3], 1536))
    hlo.allocate(64, is_thread_local=True)
    hlo.trace(("alloc", 3), ("alloc", 4), ("free", 3), ("free", 4))
    report = report_of(hlo)
    assert report.argument_bytes == 1024 + 2048
    assert report.output_bytes == 2048 + 1024
    assert report.alias_bytes == 2048
    assert report.temp_bytes == 2560
    assert report.peak_bytes == 3072 + 3072 - 2048 + 2560
    assert report.live_peak_bytes == 3072 + 1024 + (1024 + 1024)
    assert report.fragmentation_bytes == 2560 - 2048
    assert y == 2


def test_memory_spaces_stand_apart():
    hlo = Hlo()
    x = hlo.add("parameter", [256], op_name="x")
    host = hlo.add("copy", [256], x)
    chip = hlo.add("sine", [256], x, op_name="jit(f)/sin")
    hlo.add("add", [256], host, chip, op_name="jit(f)/add")
    buffers = [hlo.buffer(x), hlo.buffer(host, color=5), hlo.buffer(chip, color=1)]
    out = hlo.buffer(4)
    hlo.allocate(1024, (buffers[0], 0), is_entry_computation_parameter=True)
    hlo.allocate(1024, (buffers[1], 0), color=5)
    hlo.allocate(1024, (buffers[2], 0), color=1)
    hlo.allocate(1024, (out, 0), maybe_live_out=True)
    report = report_of(hlo, "v5e")
    assert report.peak_bytes == 1024 + 1024
    assert report.host_bytes == 1024
    assert report.on_chip_bytes == 1024
    spaces = [buffer.memory_space for buffer in report.buffers]
    assert sorted(spaces) == ["device", "device", "host", "on-chip"]
    # On GPUs number 1 is a part of device memory, kept for collectives.
    assert report_of(hlo, "h100").peak_bytes == 3 * 1024


def test_offloaded_residuals_are_on_the_host():
    def layer(h, wi):
        h = checkpoint_name(h, "carry")
        return jnp.tanh(jnp.sin(h @ wi)), None

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w, x):
        step = jax.checkpoint(layer, policy=policy)
        return (jax.lax.scan(step, x, w)[0] ** 2).mean()

    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    report = report_from_program(compile_for("h100", jax.grad(loss), *args))
    assert report.host_bytes == LAYERS * INPUT
    assert report.host_bytes == stats_of(report).host_temp_bytes
    assert report.temp_bytes == stats_of(report).temp_bytes
    (stack,) = [b for b in report.buffers if b.memory_space == "host"]
    assert (stack.category, stack.n_stacked) == ("residuals", LAYERS)
    # Each layer's carry goes out once and comes back once.
    assert report.cost.host_bytes == 2 * LAYERS * INPUT


@pytest.mark.live
@pytest.mark.parametrize("program", [stacked, donated])
def test_xprofs_memory_viewer_agrees(name, program, tmp_path):
    xprof = pytest.importorskip("xprof.convert.raw_to_tool_data")
    program = program(name)
    (tmp_path / "host.xplane.pb").write_bytes(b"")
    (tmp_path / "module.hlo_proto.pb").write_bytes(proto_of(program))
    shown, _ = xprof.xspace_to_tool_data(
        [str(tmp_path / "host.xplane.pb")],
        "memory_viewer",
        {"module_name": "module", "memory_space": "0"},
    )
    viewer = json.loads(shown)
    report = report_from_program(program)
    assert viewer["peakHeapMib"] * MIB == report.live_peak_bytes
    total = report.peak_bytes + report.constant_bytes
    assert viewer["totalBufferAllocationMib"] * MIB == total


# Attribution


def test_the_stacked_residual_is_told(name):
    report = report_from_program(stacked(name))
    stack = max(
        (b for b in report.buffers if b.category == "residuals"), key=lambda b: b.bytes
    )
    assert stack.n_stacked == LAYERS
    assert stack.shape == (LAYERS, ROWS, WIDTH)
    assert stack.phase == "forward"
    assert stack.primitive == "tanh"
    assert str(stack.source).startswith("hlo_programs.py:")
    # TPU stores the float32 carry, which only a matrix product reads, as bfloat16.
    width = 2 if name == "v5e" else 4
    assert stack.unpadded_bytes == LAYERS * ROWS * WIDTH * width


def test_nothing_is_unknown(name):
    for program in (stacked(name), donated(name)):
        report = report_from_program(program)
        assert "unknown" not in report.by_category()


def test_roles_name_arguments_and_outputs(name):
    roles = Roles(
        arguments=(("parameters", "layers/kernel"), ("batch", "inputs")),
        outputs=(("outputs", "loss"), ("gradients", "layers/kernel")),
    )
    report = report_from_program(stacked(name), roles=roles)
    totals = report.by_category()
    assert totals["parameters"] == WEIGHTS
    assert totals["batch"] == INPUT
    assert totals["gradients"] == WEIGHTS
    paths = {b.category: b.module_path for b in report.buffers}
    assert paths["parameters"] == paths["gradients"] == "layers/kernel"


def test_without_roles_outputs_of_the_backward_pass_are_gradients(name):
    totals = report_from_program(stacked(name)).by_category()
    assert totals["argument"] == WEIGHTS + INPUT
    assert totals["gradients"] == WEIGHTS


def test_roles_of_arguments_that_nothing_reads():
    def loss(params, batch):
        return (params["used"] * batch["x"]).sum()

    big = shape(256, 256)
    params, batch = {"idle": big, "used": big}, {"x": big, "y": big}
    roles = Roles(
        arguments=(
            ("parameters", "params/idle"),
            ("parameters", "params/used"),
            ("batch", "batch/x"),
            ("batch", "batch/y"),
        ),
        outputs=(("outputs", "loss"),),
    )
    report = report_from_program(compile_for("cpu", loss, params, batch), roles=roles)
    found = {b.module_path: b.category for b in report.buffers if b.bytes == 2**18}
    assert found == {"params/used": "parameters", "batch/x": "batch"}


def test_the_label_of_a_kept_value_is_read_from_its_scope(name):
    def layer(h, wi):
        with jax.named_scope("mlp"), jax.named_scope("keep=mlpwi"):
            h = jnp.sin(h @ wi)
        return jnp.tanh(h), None

    def loss(w, x):
        return (jax.lax.scan(layer, x, w)[0] ** 2).mean()

    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    report = report_from_program(compile_for(name, jax.grad(loss), *args))
    labelled = [b for b in report.buffers if b.label == "mlpwi"]
    assert labelled
    assert {b.module_path for b in labelled} == {"mlp"}
    assert LAYERS in {b.n_stacked for b in labelled}


def test_padding_of_the_target_is_shown():
    narrow = shape(4096, 8)
    report = report_from_program(compile_for("v5e", jnp.sin, narrow))
    (argument,) = [b for b in report.buffers if b.category == "argument"]
    assert argument.unpadded_bytes == 4096 * 8 * 4
    # TPU lays arrays out in tiles of 128 along the minor dimension.
    assert argument.bytes in (4096 * 8 * 4, 4096 * 128 * 4)


BODY = "jit(f)/jvp()/while/body/"
REMATTED = "jit(f)/transpose(jvp(N))/while/body/checkpoint/rematted_computation/a/dot"


@pytest.mark.parametrize(
    ("text", "phase", "path", "primitive"),
    [
        ("jit(f)/mul", None, None, "mul"),
        ("jit(f)/jvp(Net)/mlp/wi/dot_general", "forward", "Net/mlp/wi", "dot_general"),
        ("jit(f)/transpose(jvp(Net))/while/body/mlp/dot", "backward", "Net/mlp", "dot"),
        (REMATTED, "recompute", "N/a", "dot"),
        (
            "jit(f)/jvp(Net.loss)/Net.hidden/layers.step/mul",
            "forward",
            "Net/layers",
            "mul",
        ),
        (
            "jit(f)/jvp(A)/b/jit(gelu)/tanh;jit(f)/jvp(A)/c/mul",
            "forward",
            "A/b",
            "tanh",
        ),
        ("jit(f)/jvp(A)/vmap(bi,ij->bj)/dot", "forward", "A", "dot"),
        # What is around a region is said twice in its backward pass.
        (
            "jit(f)/transpose(jvp(A))/b/jvp(A)/b/checkpoint/wi/dot",
            "backward",
            "A/b/wi",
            "dot",
        ),
        (
            "jit(f)/transpose(jvp(A))/b/jvp(A)/b/checkpoint/rematted_computation/b/dot",
            "recompute",
            "A/b",
            "dot",
        ),
        ("jit(f)/jvp(A)/b/jvp(A)/c/dot", "forward", "A/b/A/c", "dot"),
        ("", None, None, ""),
        ("((((", None, None, "(((("),
    ],
)
def test_operation_names(text, phase, path, primitive):
    name = parse_op_name(text)
    assert (name.phase, name.module_path, name.primitive) == (phase, path, primitive)
    assert name.label is None


def test_labels_in_operation_names():
    name = parse_op_name(BODY + "attn/keep=query_proj/dot_general")
    assert (name.label, name.module_path) == ("query_proj", "attn")


@pytest.mark.parametrize(
    ("text", "plumbing"),
    [
        ("jit(dynamic_update_index_in_dim)/dynamic_update_slice", True),
        ("dynamic_slice", True),
        ("add", True),
        ("mlp/add", False),
        ("tanh", False),
        ("mlp/dynamic_update_slice", False),
    ],
)
def test_the_plumbing_of_scan_is_told_apart(text, plumbing):
    assert parse_op_name(BODY + text).is_plumbing == plumbing


# Timeline


def test_the_timeline_reaches_the_peak(name):
    report = report_from_program(stacked(name))
    highest = max(report.timeline, key=lambda point: point.device_bytes)
    assert highest.device_bytes == report.live_peak_bytes
    assert highest.phase in ("backward", "recompute")
    assert highest.n_runs == LAYERS
    positions = [point.position for point in report.timeline]
    assert positions == sorted(positions)


def test_the_timeline_passes_from_forward_to_backward(name):
    phases = [p.phase for p in report_from_program(stacked(name)).timeline]
    last_forward = max(i for i, phase in enumerate(phases) if phase == "forward")
    first_backward = min(
        i for i, p in enumerate(phases) if p in ("backward", "recompute")
    )
    assert phases.index("forward") < first_backward
    assert first_backward <= last_forward + len(phases)


def test_summits_are_the_peak_and_the_next_ones_down(name):
    report = report_from_program(stacked(name))
    summits = report.summits()
    assert summits[0].device_bytes == report.live_peak_bytes
    heights = [point.device_bytes for point in summits]
    assert heights == sorted(heights, reverse=True)
    assert len(summits) > 1


def test_phases_of_a_whole_step_by_hand():
    hlo = Hlo()
    x = hlo.add("parameter", [256], op_name="w")
    sine = hlo.add("sine", [256], x, op_name="jit(step)/jvp(Net)/mlp/sin")
    table = hlo.add("cosine", [256], x, op_name="jit(step)/cos")
    product = hlo.add(
        "multiply", [256], sine, table, op_name="jit(step)/transpose(jvp(Net))/mlp/mul"
    )
    scaled = hlo.add("negate", [256], product, op_name="jit(step)/neg")
    out = hlo.add("add", [256], x, scaled, op_name="jit(step)/add")
    buffers = [hlo.buffer(i) for i in range(1, 7)]
    hlo.allocate(1024, (buffers[0], 0), is_entry_computation_parameter=True)
    hlo.allocate(1024, (buffers[5], 0), maybe_live_out=True)
    places = [(buffers[i], 1024 * (i - 1)) for i in (1, 2, 3, 4)]
    hlo.allocate(4096, *places)
    hlo.trace(*(("alloc", i) for i in (2, 3, 4, 5)))
    assert (sine, table, scaled, out) == (2, 3, 5, 6)
    found = {b.instruction: (b.category, b.phase) for b in report_of(hlo).buffers}
    assert found == {
        "parameter.1": ("argument", None),
        "sine.2": ("residuals", "forward"),
        "cosine.3": ("residuals", "forward"),
        "multiply.4": ("gradients", "backward"),
        "negate.5": ("temporaries", "optimizer"),
        "add.6": ("outputs", "optimizer"),
    }


# Fit


def test_a_program_that_does_not_fit_is_explained():
    args = (
        shape(24, 2048, 2048, dtype=jnp.bfloat16),
        shape(65536, 2048, dtype=jnp.bfloat16),
    )

    def step(h, wi):
        return h + jnp.tanh(jnp.sin(h @ wi) @ wi), None

    def loss(w, x):
        return (jax.lax.scan(step, x, w)[0].astype(jnp.float32) ** 2).mean()

    report = analyze(jax.grad(loss), *args, target="v5e")
    assert not report.fits
    assert report.peak_bytes > report.available_bytes
    assert report.buffers[0].n_stacked == 24
    assert report.buffers[0].bytes == 24 * 65536 * 2048 * 2


def test_fits_counts_code_and_constants():
    hlo = Hlo()
    x = hlo.add("parameter", [256], op_name="x")
    hlo.add("sine", [256], x)
    hlo.allocate(1024, (hlo.buffer(1), 0), is_entry_computation_parameter=True)
    hlo.allocate(1024, (hlo.buffer(2), 0), maybe_live_out=True)
    available = target("h100").available_bytes
    assert report_of(hlo).fits
    hlo.allocate(available - 2048, is_constant=True)
    assert report_of(hlo).fits
    hlo.allocate(1, is_constant=True)
    assert not report_of(hlo).fits


# Data


def test_the_report_is_data(name):
    report = report_from_program(stacked(name))
    data = json.loads(report.to_json())
    assert data["schema"] == "remat.report/1"
    assert data["peak_bytes"] == report.peak_bytes
    assert len(data["buffers"]) == len(report.buffers)
    assert data["buffers"][0]["shape"] == list(report.buffers[0].shape)
    assert data["cost"]["matmul_flops"] == report.cost.matmul_flops


def test_a_compiled_program_tells_its_totals():
    compiled = jax.jit(lambda x: x @ x).lower(shape(64, 64)).compile()
    report = analyze(compiled)
    assert report.argument_bytes == 64 * 64 * 4
    assert report.buffers == ()
    assert "Totals only" in report.notes[0]
    assert json.loads(report.to_json())["estimated_step_s"] is None


def test_a_lowered_program_tells_its_buffers():
    report = analyze(jax.jit(lambda x: x @ x).lower(shape(64, 64)))
    assert {b.category for b in report.buffers} >= {"argument", "outputs"}


def test_a_dump_alone_is_enough(name):
    program = stacked(name)
    report = report_from_hlo(proto_of(program), target(name))
    full = report_from_program(program)
    assert report.buffers == full.buffers
    assert report.peak_bytes == full.peak_bytes
    assert guess_kind(module_of(program)) == target(name).kind


def test_a_module_without_buffers_is_refused():
    hlo = Hlo()
    hlo.add("parameter", [4])
    with pytest.raises(HloError, match="no buffer assignment"):
        report_of(hlo)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), n_changes=st.integers(1, 6))
def test_mutated_programs_are_reported_or_refused(name, seed, n_changes):
    data = bytearray(proto_of(stacked(name)))
    chance = random.Random(seed)
    for _ in range(n_changes):
        data[chance.randrange(len(data))] = chance.randrange(256)
    program = dataclasses.replace(stacked(name), hlo_proto=bytes(data))
    try:
        report = report_from_program(program)
    except HloError:
        return
    json.loads(report.to_json())
