"""What people meet with memory, as reports have to tell it.

Beside those here: one checkpoint around everything, and CSE that undoes a recompute
(`test_explain`: one region around the loss, recompute that XLA removed, undone Flax
blocks, unrolled scans); element-wise regions that cost memory (negative saving); steps
that do not fit (`test_explain`, `test_report`); FLOPs of recompute in loops
(`test_cost`); names of targets (`test_targets`); names of buffers (`test_report`,
`test_unknown`); logits and optimizer state that rule the peak (`test_explain`).
"""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat._compile._compile import CompileError
from remat._explain._dominant import dominant
from remat._explain._offload import offload_findings
from remat._report._build import report_from_hlo, report_from_program
from remat._report._recomputed import expected_recompute
from remat._targets._target import target
from tests.hlo_programs import Hlo, compile_for, shape

# A value offloaded out of a scan inside a scan

ROWS, D = 8192, 1024
OFFLOADED = 12 * ROWS * D * 2
NESTED_ARGS = (
    shape(12, D, D, dtype=jnp.bfloat16),
    shape(ROWS, D, dtype=jnp.bfloat16),
)


def in_nested_scans(ws, x):
    def body(x, w):
        x = checkpoint_name(x, "r")
        return x + jnp.tanh(x @ w), None

    region = jax.checkpoint(body, policy=remat.policies.offload_names("r"))

    def outer(x, ws):
        return jax.lax.scan(region, x, ws)

    return (jax.lax.scan(outer, x, ws.reshape(4, 3, D, D))[0] ** 2).sum()


def test_what_is_offloaded_is_expected_from_the_trace():
    step = jax.make_jaxpr(jax.grad(in_nested_scans))(*NESTED_ARGS)
    (one,) = expected_recompute(step).offloads
    assert (one.name, one.n_loops, one.offloaded_bytes) == ("r", 2, OFFLOADED)
    assert str(one.source).startswith("test_report_cases.py:")


def test_a_gpu_that_cannot_offload_names_the_value_and_the_scans():
    with pytest.raises(
        CompileError, match=r"offloads r at test_report_cases.py:\d+ \(in"
    ):
        remat.explain(in_nested_scans, *NESTED_ARGS, target="h100")


@pytest.mark.slow
def test_a_tpu_that_offloads_less_or_cannot_is_told():
    try:
        found = remat.explain(in_nested_scans, *NESTED_ARGS, target="v5e")
    except CompileError as error:  # libtpu 0.0.50; 0.0.52 offloads a part
        assert re.search(r"offloads r at test_report_cases.py:\d+ \(in", str(error))
        return
    (short,) = [one for one in found.findings if one.code == "offload-short"]
    assert short.where == "r"
    assert "Of 192.0 MiB to be offloaded 48.0 MiB are on the host" in short.message


def test_what_is_offloaded_in_full_is_nothing_to_remark():
    def flat(ws, x):
        def body(x, w):
            x = checkpoint_name(x, "r")
            return x + jnp.tanh(x @ w), None

        region = jax.checkpoint(body, policy=remat.policies.offload_names("r"))
        return (jax.lax.scan(region, x, ws)[0] ** 2).sum()

    step = jax.grad(flat)
    report = report_from_program(compile_for("h100", step, *NESTED_ARGS))
    offloads = expected_recompute(jax.make_jaxpr(step)(*NESTED_ARGS)).offloads
    assert sum(one.offloaded_bytes for one in offloads) == OFFLOADED
    assert report.host_bytes == OFFLOADED
    assert not list(offload_findings(report, offloads))


# Padding


def test_padding_of_more_than_twice_is_told():
    hlo = Hlo()
    narrow = hlo.add("parameter", [65536, 4])
    hlo.allocate(
        65536 * 128 * 4,
        (hlo.buffer(narrow, 65536 * 128 * 4), 0),
        is_entry_computation_parameter=True,
    )
    report = report_from_hlo(hlo.bytes(), target("v5e"))
    found = {one.code: one for one in dominant(report)}
    # 4 of 128 columns are values.
    assert "is 32.0 MiB for 1.0 MiB of values" in found["padded"].message


# A CPU that ranks policies wrongly


def test_a_cpu_report_says_that_it_ranks_wrongly():
    n_blocks, n_steps = 4, 250

    def step(carry, _):
        x, q = carry
        a = jnp.sin(q * x)
        return (x + a + jnp.cos(q * a), q), None

    def loss(wrap, q, x):
        def block(carry):
            return jax.lax.scan(step, carry, None, length=n_steps)[0]

        carry = (x, q)
        for _ in range(n_blocks):
            carry = wrap(block)(carry)
        return carry[0].sum()

    def report(name, wrap):
        fn = jax.value_and_grad(lambda q, x: loss(wrap, q, x))
        return report_from_program(compile_for(name, fn, shape(), shape(3000, 100)))

    def saved(name):
        plain, wrapped = report(name, lambda f: f), report(name, jax.checkpoint)
        return 1 - wrapped.peak_bytes / plain.peak_bytes

    assert saved("v5e") > 0.5
    assert any(
        "CPU figures rank" in note for note in report("cpu", jax.checkpoint).notes
    )
    assert not any("rank" in note for note in report("v5e", jax.checkpoint).notes)


# A deep Flax stack: scan, scan over remat, nn.remat_scan, and segments


class Block(nn.Module):
    width: int = 512

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(4 * self.width)(x))
        return x + nn.Dense(self.width)(h)


class Stack(nn.Module):
    wrap: bool = False
    lengths: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x):
        if self.lengths:
            return (nn.remat_scan(Block, lengths=self.lengths)(512)(x) ** 2).mean()

        def body(block, x, _):
            return block(x), None

        if self.wrap:
            body = nn.remat(body, prevent_cse=False)
        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True}, length=16
        )
        return (scan(Block(), x, None)[0] ** 2).mean()


def test_segments_are_no_worse_than_a_scan_over_remat_and_better_than_remat_scan():
    x = shape(8192, 512)

    def peak(model, cut=lambda loss: loss):
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        loss = cut(lambda params, x: model.apply(params, x))
        program = compile_for("v5e", jax.grad(loss), params, x)
        return report_from_program(program).temp_bytes

    scan_of_remat = peak(Stack(wrap=True))
    ours = peak(Stack(), remat.segment_scans)
    ours_over_remat = peak(Stack(wrap=True), remat.segment_scans)
    assert max(ours, ours_over_remat) <= scan_of_remat
    assert ours < peak(Stack(lengths=(4, 4))) < peak(Stack(lengths=(16,)))


def test_segments_leave_the_parameters_as_they_are():
    x = jnp.ones((2, 512))
    model = Stack()
    params = model.init(jax.random.key(0), x)
    kernels = [leaf.shape[0] for leaf in jax.tree.leaves(params)]
    assert set(kernels) == {16}

    def loss(params) -> Any:
        return model.apply(params, x)

    cut = remat.segment_scans(loss)
    assert float(cut(params)) == pytest.approx(float(loss(params)), rel=1e-6)
