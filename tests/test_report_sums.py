"""Byte sums and heap simulation of a real model's programs, held to XLA's own."""

import collections

import jax
import pytest

import remat
from remat._compile._compile import compile_lowered, lower
from remat._hlo._buffers import FREE, SHARE
from remat._report._build import report_from_program
from remat._targets._target import target
from tests.hlo_programs import buffers_of, module_of

EVERY_TARGET = ("cpu", "v5e", "v5p", "v6e", "a100-80gb", "h100", "b200")


def heap_peaks(program, color):
    """The most bytes of each heap of one memory space, by XLA's own simulation."""
    buffers = buffers_of(module_of(program))
    for trace in buffers.traces:
        if buffers.trace_color(trace) != color:
            continue
        place, users = {}, collections.Counter()
        now = most = 0
        for event in trace.events:
            if event.kind == FREE:
                at, change = place[event.buffer], -1
            else:
                shares = event.kind == SHARE
                at = place[event.shared_with] if shares else event.buffer
                place[event.buffer], change = at, 1
            before = users[at]
            users[at] += change
            if 0 in (before, users[at]):
                now += change * buffers.logical[at].bytes
            most = max(most, now)
        yield most


# Buffers are assigned before the code is made, which can then be made in haste.
QUICKLY = {"xla_backend_optimization_level": "0"}


def assert_sums_are_xlas(lowered, name):
    device = target(name)
    options = {} if device.kind == "tpu" else QUICKLY
    program = compile_lowered(lowered, device, compiler_options=options)
    report = report_from_program(program)
    stats = report.xla_stats
    assert stats is not None
    assert report.argument_bytes == stats.argument_bytes
    assert report.output_bytes == stats.output_bytes
    assert report.alias_bytes == stats.alias_bytes
    assert report.host_bytes == stats.host_temp_bytes
    if device.kind == "tpu":  # XLA counts gaps twice there
        assert report.temp_bytes <= stats.temp_bytes
    else:
        assert report.temp_bytes == stats.temp_bytes
    assert max(p.device_bytes for p in report.timeline) == report.live_peak_bytes
    held = report.argument_bytes + report.output_bytes - report.alias_bytes
    simulated = report.live_peak_bytes - held - report.constant_bytes
    heaps = list(heap_peaks(program, 0))
    assert max(heaps) <= simulated <= sum(heaps)
    assert simulated + report.fragmentation_bytes == report.temp_bytes


def programs_of_gpt2(name):
    """A small GPT-2's gradient under every policy, each different program once."""
    built = remat.models.build("gpt2-tiny")
    device = target(name)
    texts = set()
    for policy in remat.policies.names():
        try:
            loss = remat.with_policy(built.loss, policy)
            lowered = lower(jax.value_and_grad(loss), built.args, {}, device)
        except (remat.NoNamesFound, remat.policies.PolicyError):
            continue
        if lowered.as_text() not in texts:
            texts.add(lowered.as_text())
            yield lowered


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TARGET)
def test_sums_of_gpt2_equal_xlas_own_under_every_policy(name):
    n_programs = 0
    for lowered in programs_of_gpt2(name):
        assert_sums_are_xlas(lowered, name)
        n_programs += 1
    assert n_programs >= 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "nothing"])
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_sums_of_gpt2_at_its_own_size_equal_xlas_own(name, policy):
    built = remat.models.build("gpt2", batch=4)
    gradient = jax.value_and_grad(remat.with_policy(built.loss, policy))
    assert_sums_are_xlas(lower(gradient, built.args, {}, target(name)), name)
