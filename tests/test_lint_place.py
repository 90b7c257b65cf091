"""Rules of where regions stand, what products they see, and what runs twice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from remat import policies
from remat._cost._jaxpr import jaxpr_cost
from remat._lint._lint import lint
from tests.grid_programs import flash_attention
from tests.lint_programs import (
    EXPERTS,
    JAX,
    TOKENS,
    W,
    X,
    attention,
    experts,
    found,
    plain,
    report,
    scanned,
    unrolled,
)

# --- matrix products


def grouped(w, x):
    sizes = jnp.array([2, 2], jnp.int32)
    return jnp.sin(jax.lax.ragged_dot(jnp.sin(x @ w[0]), w, sizes))


def test_unseen_matmul():
    seen = policies.save_dots
    (finding,) = found("unseen-matmul", unrolled(grouped), seen, EXPERTS, X)
    assert "1 ragged_dot" in finding.message
    assert "FLOP" in finding.message
    with_weights = "save_dots_with_weights"
    assert not found("unseen-matmul", unrolled(grouped), with_weights, EXPERTS, X)
    (finding,) = found(
        "unseen-matmul", unrolled(experts), "save_dots_no_batch", EXPERTS, TOKENS
    )
    assert "batch dims (experts)" in finding.message
    assert not found("unseen-matmul", unrolled(experts), seen, EXPERTS, TOKENS)
    # Attention's products are what a policy without batch dims means to leave out.
    assert not found("unseen-matmul", unrolled(attention), "save_dots_no_batch", W, X)


def test_unseen_kernel_with_its_arithmetic():
    loss, args = flash_attention(jnp.float32)
    (finding,) = found("unseen-matmul", loss, "save_dots", *args)
    # Two products of 4 x 8 by 8 x 4, 256 multiplications and additions each, and more.
    assert re.search(r"1 pallas_call, [5-9]\d\d FLOP", finding.message)
    keep = policies.save_dots | policies.save(policies.primitive("pallas_call"))
    assert "save(primitive(name))" in finding.fix
    assert not found("unseen-matmul", loss, keep, *args)


# --- where regions stand


def test_no_region():
    (finding,) = found("no-region", plain, "save_dots", W, X)
    assert "no region" in finding.message
    assert not found("no-region", unrolled(plain), "save_dots", W, X)


def test_region_around_loss():
    def whole(w, x):
        for _ in range(3):
            x = plain(w, x)
        return x.sum()

    (finding,) = found("region-around-loss", jax.checkpoint(whole), "nothing", W, X)
    assert "100% of the arithmetic" in finding.message
    assert not found("region-around-loss", unrolled(plain), "nothing", W, X)
    assert not found("region-around-loss", jax.checkpoint(plain), "nothing", W, X)


def test_region_around_scan():
    def stack(w, x, body):
        return jax.lax.scan(lambda x, _: (body(w, x), None), x, None, length=4)[0]

    def loss(w, x):
        return jax.checkpoint(functools.partial(stack, body=plain))(w, x).sum()

    def nested(w, x):
        body = jax.checkpoint(plain)
        return jax.checkpoint(functools.partial(stack, body=body))(w, x).sum()

    (finding,) = found("region-around-scan", loss, "nothing", W, X)
    assert "scan of 4 steps" in finding.message
    assert not found("region-around-scan", nested, "nothing", W, X)
    assert not found("region-around-scan", scanned(plain), "nothing", W, X)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (unrolled(plain, prevent_cse=False), 1),
        (unrolled(plain), 0),
        (scanned(plain, prevent_cse=False), 0),
        (scanned(plain, prevent_cse=False, unroll=2), 1),
        (scanned(plain, unroll=2), 0),
    ],
)
def test_undone_by_cse(loss, expected):
    findings = found("undone-by-cse", loss, "nothing", W, X)
    assert len(findings) == expected


def test_overridden_policy():
    def nested(outer, inner):
        block = jax.checkpoint(plain, policy=inner)
        return unrolled(lambda w, x: block(w, x) * 2, policy=outer)

    loss = nested(JAX.nothing_saveable, JAX.dots_saveable)
    (finding,) = found("overridden-policy", loss, None, W, X)
    assert "save_dots" in finding.message
    same = nested(JAX.dots_saveable, JAX.dots_saveable)
    assert not found("overridden-policy", same, None, W, X)
    assert not found("overridden-policy", loss, "save_dots", W, X)


def test_overridden_policy_counts_in_the_recompute_of_a_segment():
    def cut(inner):
        layer = jax.checkpoint(plain, policy=inner, prevent_cse=False)

        def loss(w, x):
            step = lambda x, _: (layer(w, x), None)  # noqa: E731
            segment = lambda x, _: jax.lax.scan(step, x, None, length=3)  # noqa: E731
            return jax.lax.scan(jax.checkpoint(segment), x, None, length=4)[0].sum()

        return loss

    (finding,) = found("overridden-policy", cut(JAX.dots_saveable), None, W, X)
    assert finding.severity == "info" and "segments" in finding.fix

    def flops(inner):
        return jaxpr_cost(jax.make_jaxpr(jax.grad(cut(inner)))(W, X)).flops

    assert flops(JAX.dots_saveable) < flops(JAX.nothing_saveable)


def test_elementwise_region():
    def chain(w, x):
        return jnp.sin(jnp.sin(x)) * 1.01

    (finding,) = found("elementwise-region", unrolled(chain), "nothing", W, X)
    assert "fuses" in finding.message
    assert not found("elementwise-region", unrolled(plain), "nothing", W, X)


# --- what runs twice


def test_repeated_collective():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rows = PartitionSpec("x")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=PartitionSpec()
    )
    def summed(w, x):
        return jnp.sin(jax.lax.psum(x.T @ w, "x"))

    loss = lambda w, x: jax.checkpoint(summed)(w, x).sum()  # noqa: E731
    (finding,) = found("repeated-collective", loss, "nothing", W, jnp.zeros((8, 8)))
    assert "psum" in finding.message
    keep = policies.save(policies.primitive("psum", "psum_invariant"))
    assert not found("repeated-collective", loss, keep, W, jnp.zeros((8, 8)))


def pure(x):
    return jax.pure_callback(report, jax.ShapeDtypeStruct((), x.dtype), x)


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (lambda x: jax.debug.callback(report, x), "repeated-callback", "'report'"),
        (lambda x: jax.debug.print("{}", x), "repeated-callback", "runs twice"),
        (
            lambda x: io_callback(report, None, jax.lax.stop_gradient(x)),
            "refused-callback",
            "'report': the gradient raises NotImplementedError",
        ),
    ],
    ids=["debug", "print", "io"],
)
@pytest.mark.parametrize("policy", ["nothing", "everything"])
def test_callbacks_in_regions(call, code, says, policy):
    def block(w, x):
        call(x.sum())
        return plain(w, x)

    findings = lint(unrolled(block), policy, W, X)
    assert [finding.code for finding in findings] == [code]
    assert says in findings[0].message
    assert findings[0].source and findings[0].source.startswith("test_lint_place.py")
    outside = unrolled(plain)
    assert not lint(lambda w, x: (call(x), outside(w, x))[1], policy, W, X)
    assert not lint(unrolled(block), "none", W, X)


def test_pure_callbacks_run_twice_unless_their_result_is_kept():
    def block(w, x):
        scale = pure(jax.lax.stop_gradient(x.sum()))
        return jnp.sin(jnp.sin(x @ w) * scale)

    (finding,) = lint(unrolled(block), "save_dots", W, X)
    assert finding.code == "repeated-callback"
    keep = policies.save_dots | policies.save(policies.primitive("pure_callback"))
    assert "save(primitive('pure_callback'))" in finding.fix
    assert not lint(unrolled(block), keep, W, X)


@pytest.mark.parametrize("choose", ["top_k", "argmax", "argsort"])
def test_repeated_choice(choose):
    def block(w, x):
        scores = x @ w
        if choose == "top_k":
            taken = jax.lax.top_k(scores, 1)[1]
        elif choose == "argmax":
            taken = jnp.argmax(scores, -1, keepdims=True)
        else:
            taken = jnp.argsort(scores, -1)[:, :1]
        return x * jnp.take_along_axis(jnp.sin(scores), taken, -1)

    (finding,) = found("repeated-choice", unrolled(block), "save_dots", W, X)
    assert "runs again" in finding.message
    keep = policies.save_dots | policies.save(policies.discrete())
    assert not found("repeated-choice", unrolled(block), keep, W, X)
