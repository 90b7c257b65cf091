"""What a policy did, said in words: recompute removed, savings that are none."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import remat
from remat._compare._step import build_step
from remat._explain._explain import explain_report
from remat._explain._proof import prove
from remat._report._build import report_from_program
from remat._report._recomputed import expected_recompute
from tests.hlo_programs import (
    LAYERS,
    ROWS,
    TARGETS,
    WIDTH,
    compile_for,
    shape,
    stacked,
    stacked_loss,
)

SHARDED = [("cpu:8", (4, 2), 8), ("v5e:4x4", (4, 4), 16)]
N_BLOCKS, D, B = 4, 256, 65536
ARGS = [shape(D, D)] * N_BLOCKS, shape(B, D)
MATMUL = 2 * B * D * D


def block(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


def net(wrap=lambda f: f):
    def loss(ws, x):
        for w in ws:
            x = wrap(block)(x, w)
        return (x**2).sum()

    return loss


without_cse_guard = functools.partial(jax.checkpoint, prevent_cse=False)


# On a TPU only a full compile tells savings: a probe rematerializes by itself.
WITH_FULL = ("cpu", "h100", pytest.param("v5e", marks=pytest.mark.slow))


@functools.cache
def plain(name):
    program = compile_for(name, jax.grad(net()), *ARGS, probe=False)
    return report_from_program(program)


def explained(name, loss, *args, base=None):
    """The report of a loss's gradient, and what was found about it by code."""
    step = jax.grad(loss)
    report = report_from_program(compile_for(name, step, *args, probe=False))
    expected = expected_recompute(jax.make_jaxpr(step)(*args))
    found = explain_report(report, expected=expected, base=base)
    return report, {one.code: one for one in found}


# Expected recompute


def test_recompute_asked_for_by_hand():
    (ws, x), step = ARGS, jax.grad(net(jax.checkpoint))
    expected = expected_recompute(jax.make_jaxpr(step)(ws, x))
    (region,) = expected.regions
    assert (region.n_regions, region.prevent_cse, region.in_loop) == (4, True, False)
    # Both products of a block, of which backward each needs the one before it.
    assert region.n_matmuls == N_BLOCKS * 2
    assert region.matmul_flops == expected.recompute_matmul_flops
    assert region.matmul_flops == N_BLOCKS * 2 * MATMUL
    # Forward two, again two, and backward twice two.
    gradient_of_input = MATMUL  # which the first block's is not asked for
    asked = N_BLOCKS * (2 + 2 + 4) * MATMUL
    assert expected.matmul_flops in (asked, asked - gradient_of_input)


def test_recompute_in_a_scan_counts_as_often_as_it_runs():
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    step = jax.make_jaxpr(jax.grad(stacked_loss))(*args)
    (region,) = expected_recompute(step).regions
    assert (region.n_regions, region.n_matmuls, region.in_loop) == (
        LAYERS,
        LAYERS,
        True,
    )
    assert region.matmul_flops == LAYERS * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("name", TARGETS)
def test_compiled_recompute_equals_what_is_asked_for(name):
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    step = jax.make_jaxpr(jax.value_and_grad(stacked_loss))(*args)
    asked = expected_recompute(step)
    (done,) = report_from_program(stacked(name)).recomputed
    assert done.n_matmuls == asked.regions[0].n_matmuls
    assert done.matmul_flops == asked.recompute_matmul_flops


# Proof by region


def proofs_of(name, loss, *args):
    step = jax.grad(loss)
    report = report_from_program(compile_for(name, step, *args))
    return prove(report, expected_recompute(jax.make_jaxpr(step)(*args)))


# XLA's CPU compiler of jax 0.10 merges a region's first product with the forward one.
CPU_MERGES = jax.__version_info__ < (0, 12)


@pytest.mark.parametrize("name", TARGETS[CPU_MERGES:])
def test_each_regions_recompute_is_proved(name):
    once = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))
    twice = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(jnp.sin(x @ w) @ w) @ w))

    def loss(ws, x):
        with jax.named_scope("first"):
            x = once(x, ws[0])
        with jax.named_scope("second"):
            x = twice(twice(x, ws[1]), ws[2])
        return (x**2).sum()

    second, first = proofs_of(name, loss, *ARGS)  # as the backward pass has them
    # The last product feeds the output through tanh, so it runs again too.
    assert (first.region.n_matmuls, second.region.n_matmuls) == (2, 2 * 3)
    for proof in (first, second):
        assert proof.is_there
        assert proof.compiled_matmuls == proof.region.n_matmuls
        assert proof.compiled_flops == proof.expected_flops
        assert proof.expected_flops == proof.region.n_matmuls * MATMUL


def test_of_two_regions_the_one_removed_is_told():
    kept, removed = jax.checkpoint(block), without_cse_guard(block)

    def loss(ws, x):
        for w in ws[:2]:
            x = kept(x, w)
        for w in ws[2:]:
            x = removed(x, w)
        return (x**2).sum()

    by_line = proofs_of("h100", loss, *ARGS)
    assert [one.is_there for one in by_line] == [False, True]
    assert by_line[1].compiled_matmuls == 2 * 2


@pytest.mark.parametrize(("name", "shape_", "n"), SHARDED[CPU_MERGES:])
def test_recompute_of_a_sharded_step_is_proved_per_device(name, shape_, n):
    mesh = remat.target(name).mesh(shape_, ("data", "model"))

    def place(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    @jax.checkpoint
    def layer(x, w):
        into, out = w
        batch = NamedSharding(mesh, PartitionSpec("data", None))
        x = jax.lax.with_sharding_constraint(x, batch)
        return x + jnp.tanh(jnp.sin(x @ into) @ out)

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return (x**2).sum()

    into = place(shape(D, 4 * D), None, "model")
    out = place(shape(4 * D, D), "model", None)
    x = place(shape(B, D), "data", None)
    (proof,) = proofs_of(name, loss, [(into, out)] * 3, x)
    assert proof.region.n_matmuls == proof.compiled_matmuls == 3 * 2
    assert proof.region.matmul_flops == 3 * 2 * (2 * B * D * 4 * D)
    assert proof.compiled_flops == proof.expected_flops
    assert proof.expected_flops == proof.region.matmul_flops / n


# Regions that do not save


# XLA's CPU compiler of jax 0.10 schedules all recompute early.
@pytest.mark.parametrize("name", WITH_FULL[1:])
def test_a_region_for_each_layer_saves(name):
    report, found = explained(name, net(jax.checkpoint), *ARGS, base=plain(name))
    assert report.peak_bytes < plain(name).peak_bytes
    assert found.keys().isdisjoint(
        {"recompute-removed", "peak-did-not-fall", "negative-saving"}
    )


@pytest.mark.parametrize("name", WITH_FULL)
def test_recompute_that_xla_removed_is_told(name):
    loss = net(without_cse_guard)
    report, found = explained(name, loss, *ARGS, base=plain(name))
    assert report.peak_bytes >= 0.95 * plain(name).peak_bytes
    removed = found["recompute-removed"]
    assert removed.severity == "error"
    assert "prevent_cse=True" in removed.fix
    assert str(removed.source).startswith("test_explain.py:")


@pytest.mark.parametrize("name", WITH_FULL)
def test_one_region_around_the_loss_saves_nothing(name):
    report, found = explained(name, jax.checkpoint(net()), *ARGS, base=plain(name))
    saved = plain(name).peak_bytes - report.peak_bytes
    assert abs(saved) <= 0.05 * plain(name).temp_bytes
    assert "each layer" in found["peak-did-not-fall"].fix
    assert "recompute-removed" not in found


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(x))
        return x + nn.Dense(x.shape[-1])(h), None


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x, _ = nn.remat(Block, prevent_cse=False)(name=f"block_{i}")(x)
        return x


def test_undone_flax_blocks_are_named():
    model, x = Blocks(), shape(1024, 64)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.square(jnp.asarray(model.apply(params, x))).mean()

    _, found = explained("cpu", loss, params, x)
    assert found["recompute-removed"].where.startswith("Blocks/block_")


@pytest.mark.parametrize(("unroll", "undone"), [(1, False), (True, True)])
def test_an_unrolled_scan_undoes_what_a_scan_keeps(unroll, undone):
    def body(h, w):
        for _ in range(2):
            h = block(h, w)
        return h, None

    def loss(ws, x):
        step = jax.checkpoint(body, prevent_cse=False)
        return (jnp.sin(jax.lax.scan(step, x, ws, unroll=unroll)[0]) ** 2).sum()

    _, found = explained("cpu", loss, shape(3, 64, 64), shape(512, 64))
    assert ("recompute-removed" in found) == undone


def test_a_negative_saving_names_its_region():
    name = "h100"

    def chain(wrap):
        def loss(x):
            for _ in range(12):
                x = wrap(lambda y: jnp.sin(y) * 1.01)(x)
            return x.sum()

        return loss

    x = shape(1024, 1024)
    base = report_from_program(compile_for(name, jax.grad(chain(lambda f: f)), x))
    report, found = explained(name, chain(jax.checkpoint), x, base=base)
    assert report.peak_bytes > base.peak_bytes
    negative = found["negative-saving"]
    assert "Saves -" in negative.message
    assert "element-wise" in negative.fix
    assert str(negative.source).startswith("test_explain.py:")


# What rules the peak where residuals do not


def language_model(chunks):
    def loss(params, tokens):
        x = params["embedding"][tokens]
        x, _ = jax.lax.scan(
            jax.checkpoint(lambda h, w: (block(h, w), None)), x, params["w"]
        )

        def cross_entropy(x, tokens):
            logits = x @ params["embedding"].T
            picked = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
            return (jax.nn.logsumexp(logits, -1) - picked).sum()

        if not chunks:
            return cross_entropy(x, tokens)
        parts = x.reshape(chunks, -1, x.shape[-1]), tokens.reshape(chunks, -1)
        return jax.lax.map(jax.checkpoint(lambda a: cross_entropy(*a)), parts).sum()

    return loss


def test_logits_that_rule_are_told_with_their_line():
    params = {"embedding": shape(8192, 64), "w": shape(4, 64, 64)}
    tokens = shape(1024, dtype=jnp.int32)
    whole, found = explained("cpu", language_model(0), params, tokens)
    ruling = found["one-value-rules"]
    assert "8192" in ruling.message and "chunked loss" in ruling.fix
    assert str(ruling.source).startswith("test_explain.py:")
    chunked, found = explained("cpu", language_model(16), params, tokens)
    assert "one-value-rules" not in found
    assert chunked.peak_bytes < 0.5 * whole.peak_bytes


def test_scores_that_rule_the_residuals_are_told():
    heads, length, width = 4, 256, 64

    def attention(c, w):
        q, k, v = ((c @ w[i]).reshape(length, heads, -1) for i in range(3))
        scores = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k))
        out = jnp.einsum("hst,thd->shd", scores, v).reshape(length, -1)
        return c + jnp.tanh(out @ w[3]), None

    def loss(ws, x):
        policy = jax.checkpoint_policies.dots_saveable
        layer = jax.checkpoint(attention, policy=policy, prevent_cse=False)
        return (jax.lax.scan(layer, x, ws)[0] ** 2).sum()

    args = shape(6, 4, width, width), shape(length, width)
    _, found = explained("cpu", loss, *args)
    assert "attention scores" in found["one-residual-rules"].message


def report_of_step(loss, *args, **options):
    step = build_step(loss, args, **options)
    program = compile_for(
        "cpu", step.fn, *step.args, donate_argnums=step.donate_argnums
    )
    return report_from_program(program, roles=step.roles)


def codes(report):
    return {one.code: one for one in explain_report(report)}


def test_optimizer_state_that_rules_is_told():
    args = [shape(D, D)] * N_BLOCKS, shape(8, D)
    report = report_of_step(net(jax.checkpoint), *args, optimizer=optax.adam(1e-3))
    ruling = codes(report)["state-rules"]
    sizes = report.by_category()
    assert sizes["optimizer"] > 2 * sizes["parameters"] - 2**20
    assert "optimizer" in ruling.message and "Shard the optimizer state" in ruling.fix


def test_microbatches_kept_by_a_differentiated_scan_are_told():
    def loss(w, batches):
        def one(total, x):
            return total + net()([w, w], x), None

        return jax.lax.scan(one, 0.0, batches)[0]

    found = codes(report_of_step(loss, shape(64, 64), shape(16, 512, 64)))
    assert "all 16 microbatches" in found["microbatches-kept"].message
    assert "inside the scan" in found["microbatches-kept"].fix


def test_parameters_stacked_as_scan_outputs_are_told():
    def steps(w, batches):
        def one(w, x):
            w = w - 1e-3 * jax.grad(lambda w: net()([w], x))(w)
            return w, w

        return jax.lax.scan(one, w, batches)[1]

    program = compile_for("cpu", steps, shape(256, 256), shape(16, 8, 256))
    found = codes(report_from_program(program))
    assert "16 copies of parameters" in found["parameters-stacked"].message


def test_layers_whose_residuals_rule_are_nothing_to_remark():
    assert codes(report_from_program(stacked("h100"))) == {}


# A step, compiled and explained


def deep_step(batch):
    """A loss of 24 layers of width 2048, and its arguments."""
    n_layers, width, seq = 24, 2048, 2048

    def block(x, p):
        x = jnp.tanh(x)
        with jax.named_scope("attention"):
            qkv = (x @ p["qkv"]).reshape(batch, seq, 16, 3 * width // 16)
            q, k, v = jnp.split(qkv, 3, -1)
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            x += jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p["out"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ p["wi"]) @ p["wo"]

    def loss(params, x):
        body = jax.checkpoint(block)
        x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, params)
        return (x.astype(jnp.float32) ** 2).mean()

    def layers(*dimensions):
        return shape(n_layers, *dimensions, dtype=jnp.bfloat16)

    params = {
        "qkv": layers(width, 3 * width),
        "out": layers(width, width),
        "wi": layers(width, 4 * width),
        "wo": layers(4 * width, width),
    }
    return loss, (params, shape(batch, seq, width, dtype=jnp.bfloat16))


# XLA leaves a program too large for a TPU, and compiles one that is for a GPU.


@pytest.mark.parametrize(
    ("name", "batch", "usable", "least"),
    [
        ("v5e", 8, "15.75 GiB", "at least "),
        pytest.param("h100", 64, "59.33 GiB", "", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_does_not_fit_is_explained_with_what_would(
    name, batch, usable, least
):
    loss, args = deep_step(batch)
    adamw = optax.adamw(1e-3)
    found = remat.explain(loss, *args, policy="save_dots", target=name, optimizer=adamw)
    assert not found.report.fits
    told = found.findings[0]
    assert (told.code, told.severity) == ("does-not-fit", "error")
    assert f"of {usable} usable: residuals" in told.message
    by_name = {one.policy: one for one in found.tried or ()}
    assert not by_name["save_dots"].fits and by_name["nothing"].fits
    assert f"nothing ({least}" in told.fix and "save_dots (" not in told.fix
    assert by_name["offload_dots"].host_bytes > 2**30
    # Every buffer is known: residuals have their module and shape.
    kept = [b for b in found.report.buffers if b.category == "residuals"]
    assert {b.module_path for b in kept} >= {"attention", "mlp"}
    assert kept[0].n_stacked == 24


def test_explain_holds_a_policy_against_another(tmp_path):
    args = [shape(64, 64)] * 3, shape(1024, 64)
    found = remat.explain(
        net(jax.checkpoint), *args, policy="nothing", against="none", target="cpu"
    )
    assert found.base is not None and found.diff is not None
    change = found.report.peak_bytes - found.base.peak_bytes
    assert found.diff.peak_change_bytes == change
    assert found.diff.recompute_change_flops > 0
    data = found.to_dict()
    assert data["diff"]["peak_change_bytes"] == found.diff.peak_change_bytes
    assert data["expected"]["regions"][0]["n_regions"] == 3
    text = str(found)
    assert "peak" in text and "→" in text
    files = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html", "pprof")}
    assert found.write(**files) == list(files.values())
    assert all(path.stat().st_size > 500 for path in files.values())
