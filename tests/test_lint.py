"""Each lint rule finds what it is for, and is silent where that is mended."""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import remat
from remat import policies, testing
from remat._lint._lint import Finding, lint, lint_program
from remat._lint._notes import notes_of
from remat._lint._program import Traced
from tests.helpers import stable_id
from tests.lint_programs import (
    EXPERTS,
    JAX,
    TOKENS,
    H,
    W,
    X,
    attention,
    experts,
    found,
    mlp,
    plain,
    report,
    scanned,
    unrolled,
)

# --- names


def test_a_healthy_program_has_no_finding():
    assert lint(unrolled(mlp), H, W, X) == ()
    assert lint(scanned(mlp), H, W, X) == ()
    assert lint(unrolled(mlp), "nothing", W, X) == ()


@pytest.mark.parametrize(
    ("policy", "severity", "says"),
    [
        (policies.save_names("hh"), "error", r"'hh'.*0 values.*mean 'h'"),
        (policies.save_names("h", "q"), "warning", r"'q'.*0 values"),
        (JAX.save_only_these_names("hh"), "error", "'hh'"),
        ({"*": policies.save_names("hh")}, "error", "'hh'"),
    ],
    ids=stable_id,
)
def test_unemitted_name(policy, severity, says):
    (finding,) = found("unemitted-name", unrolled(mlp), policy, W, X)
    assert finding.severity == severity
    assert re.search(says, finding.message)
    assert "'h'" in finding.fix
    assert not found("unemitted-name", unrolled(mlp), H, W, X)


def test_unmentioned_name():
    loss = unrolled(lambda w, x: mlp(w, mlp(w, x), "g"))
    (finding,) = found("unmentioned-name", loss, H, W, X)
    assert "'g'" in finding.message
    assert not found("unmentioned-name", loss, policies.save_names("g", "h"), W, X)
    assert not found("unmentioned-name", loss, "save_dots", W, X)


def test_unnamed_region_in_a_second_stack():
    def loss(second, w, x):
        return scanned(second)(w, scanned(mlp)(w, x) * x)

    (finding,) = found("unnamed-region", functools.partial(loss, plain), H, W, X)
    assert "emits 0 of the names" in finding.message
    assert not found("unnamed-region", functools.partial(loss, mlp), H, W, X)


@pytest.mark.parametrize("inside", [True, False])
def test_name_outside_region_on_a_scan_bodys_result(inside):
    def loss(w, x):
        def body(x, _):
            if inside:
                return jax.checkpoint(mlp)(w, x), None
            return checkpoint_name(jax.checkpoint(plain)(w, x), "h"), None

        return jax.lax.scan(body, x, None, length=3)[0].sum()

    findings = found("name-outside-region", loss, H, W, X)
    assert len(findings) == (not inside)
    assert all("in a scan's body" in finding.message for finding in findings)


def placed(where):
    """A block with the name on what comes in, on the way, or on what goes out."""

    def block(w, x):
        if where == "in":
            x = checkpoint_name(x, "r")
        x = jnp.sin(jnp.cos(x @ w))
        if where == "mid":
            x = checkpoint_name(x, "r")
        x = jnp.sin(x)
        return checkpoint_name(x, "r") if where == "out" else x

    return block


@pytest.mark.parametrize("make", [scanned, unrolled])
@pytest.mark.parametrize("where", ["in", "mid", "out"])
@pytest.mark.parametrize("policy", [policies.save_names, policies.offload_names])
def test_name_on_output_and_on_input(where, policy, make):
    findings = lint(make(placed(where)), policy("r"), W, X)
    codes = [finding.code for finding in findings]
    assert ("name-on-output" in codes) == (where == "out")
    saved_in_vain = where == "in" and policy is policies.save_names
    assert ("name-on-input" in codes) == saved_in_vain
    if where == "out":
        verb = "saves" if policy is policies.save_names else "offloads"
        assert (
            f"{verb} 0 bytes for 'r'" in findings[codes.index("name-on-output")].message
        )


def twin(w, x):
    return x + checkpoint_name(jnp.tanh(x @ w), "h") @ w


def other_reader(w, x):
    h = x @ w
    return jnp.sin(checkpoint_name(h, "h")) + jnp.cos(h)


@pytest.mark.parametrize(
    ("block", "why"),
    [(twin, "tanh reads its own result"), (other_reader, "without its name")],
)
def test_unnamed_twin(block, why):
    (finding,) = found("unnamed-twin", unrolled(block), H, W, X)
    assert why in finding.message
    assert finding.severity == "error"
    assert not found("unnamed-twin", unrolled(mlp), H, W, X)


def test_unnamed_twin_is_settled_by_a_policy_that_binds():
    by_primitive = policies.save(policies.larger_than(0) & policies.primitive("tanh"))
    assert not found("unnamed-twin", unrolled(twin), by_primitive, W, X)
    testing.assert_recomputes(unrolled(twin), by_primitive, {"tanh": 0}, W, X)


def test_unread_name():
    def dropped(w, x):
        checkpoint_name(x @ w, "h")
        return jnp.sin(x @ w)

    def added(w, x):
        return x + checkpoint_name(jnp.sin(x @ w) @ w, "h")

    (finding,) = found("unread-name", unrolled(added), H, W, X)
    assert finding.severity == "info"
    (finding,) = found("unread-name", unrolled(dropped), H, W, X)
    assert "nothing uses it" in finding.message


@pytest.mark.parametrize("policy", ["none", "everything"])
def test_names_make_no_difference_where_everything_is_kept(policy):
    def block(w, x):
        x = checkpoint_name(x, "input")
        return x + jnp.sin(checkpoint_name(x @ w, "up").T.T) @ w

    assert not lint(unrolled(block), policy, W, X)


# --- what is kept


def test_saves_nothing_says_that_all_products_have_batch_dims():
    loss = unrolled(experts)
    (finding,) = found("saves-nothing", loss, "save_dots_no_batch", EXPERTS, TOKENS)
    assert "0 of 2 matrix products (all 2 have batch dims)" in finding.message
    assert "save_dots_with_weights" in finding.fix
    # Of a policy by names, the rules about names say why.
    for policy in ("save_dots", "save_dots_with_weights", "nothing", "minimal"):
        assert not found("saves-nothing", loss, policy, EXPERTS, TOKENS)


@pytest.mark.parametrize("scope", ["attention", None])
def test_saves_nothing_says_where_values_are_made(scope):
    def block(w, x):
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return jnp.tanh(jnp.sin(x @ w) @ w)

    by_module = policies.save(policies.in_module("attn"))
    (finding,) = found("saves-nothing", unrolled(block), by_module, W, X)
    assert ("values are made in: 'attention'." in finding.message) == (
        scope is not None
    )
    assert ("named_scope" in finding.fix) == (scope is None)
    fitting = policies.save(policies.in_module("attention"))
    assert bool(found("saves-nothing", unrolled(block), fitting, W, X)) == (not scope)


def test_saves_everything():
    dots_and_sines = policies.save(
        policies.dots() | policies.primitive("sin", "cos", "tanh", "mul")
    )
    (finding,) = found("saves-everything", unrolled(plain), dots_and_sines, W, X)
    assert "saves no memory" in finding.message
    assert not found("saves-everything", unrolled(plain), "save_dots", W, X)
    assert not found("saves-everything", unrolled(plain), "everything", W, X)


@pytest.mark.parametrize(
    ("policy", "target", "expected"),
    [
        ("offload_dots", "cpu", 1),
        ("offload_dots", "v5e", 0),
        ("save_dots", "cpu", 0),
        ("offload_dots", None, 0),
    ],
)
def test_offload_without_host(policy, target, expected):
    loss = unrolled(plain)
    findings = found("offload-without-host", loss, policy, W, X, target=target)
    assert len(findings) == expected


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="no jax_remat3")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (lambda p, *_, **__: p.name in ("sin", "dot_general"), 1),
        (JAX.dots_saveable, 0),
        (JAX.save_only_these_names("h"), 0),
        (JAX.everything_saveable, 0),
    ],
)
def test_ignored_by_remat3(policy, expected):
    loss = unrolled(mlp, policy=policy)
    findings = found("ignored-by-remat3", loss, None, W, X)
    assert len(findings) == expected
    assert all("sin" in finding.message for finding in findings)
    assert not found("ignored-by-remat3", unrolled(mlp), policy, W, X)


def test_misused_policy():
    ignores = JAX.save_anything_except_these_names("h")
    nowhere = JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned-host",
    )
    for policy, says in ((ignores, "ignores the names"), (nowhere, "pinned-host")):
        loss = unrolled(mlp, policy=policy)
        (finding,) = found("misused-policy", loss, None, W, X)
        assert finding.severity == "error" and says in finding.message
        assert not found("misused-policy", loss, "save_dots", W, X)
    right = unrolled(mlp, policy=JAX.save_only_these_names("h"))
    assert not found("misused-policy", right, None, W, X)
    table = remat.compare(loss, W, X, policies=["nothing"], target="cpu")
    assert len(table.rows) == 1, "the program's own policy does not matter"


def test_two_precisions():
    def mixed(w, x):
        h = jnp.sin(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return x + jnp.sin(h.astype(jnp.float32)) * jnp.sin(h).astype(jnp.float32)

    keep_casts = policies.save(policies.primitive("sin", "convert_element_type"))
    findings = found("two-precisions", unrolled(mixed), keep_casts, W, X)
    assert any("bfloat16 and again as float32" in f.message for f in findings)
    without = policies.save(policies.primitive("sin"))
    assert not found("two-precisions", unrolled(mixed), without, W, X)


def test_scores_dominate():
    long = jnp.zeros((64, 8))
    (finding,) = found("scores-dominate", unrolled(attention), "save_dots", W, long)
    assert "[2, 64, 64]" in finding.message
    assert not found(
        "scores-dominate", unrolled(attention), "save_dots_no_batch", W, long
    )
    assert not found("scores-dominate", unrolled(plain), "save_dots", W, long)


def flash(names):
    """Attention with residuals of its own: the output and a statistic."""

    def forward(q):
        out, stat = jax.lax.optimization_barrier((jnp.tanh(q), jnp.exp(q).sum(-1)))
        if "out" in names:
            out = checkpoint_name(out, "h")
        if "stat" in names:
            stat = checkpoint_name(stat, "h")
        return out, stat

    kernel = jax.custom_vjp(lambda q: forward(q)[0])

    def fwd(q):
        out, stat = forward(q)
        return out, (out, stat)

    kernel.defvjp(fwd, lambda kept, g: (g * kept[0] * kept[1][:, None],))
    return lambda w, x: x + kernel(x @ w) @ w


def test_partly_kept_kernel_runs_again():
    (finding,) = found("partly-kept", unrolled(flash(("out",))), H, W, X)
    assert "optimization_barrier" in finding.message
    assert "float32[4]" in finding.message
    assert not found("partly-kept", unrolled(flash(("out", "stat"))), H, W, X)
    assert not found("partly-kept", unrolled(flash(())), "nothing", W, X)


# --- what the rules look at is what JAX does


@pytest.mark.parametrize("policy", ["nothing", "save_dots", "save_dots_no_batch", H])
@pytest.mark.parametrize("block", [plain, mlp, twin, attention, other_reader])
def test_flow_keeps_and_runs_again_what_jax_does(block, policy):
    if policy == H and block in (plain, attention):
        pytest.skip("emits no name")
    loss = unrolled(block, n=1)
    (linted,) = Traced.of(loss, (W, X), {}).under(policy).regions
    # What derivatives add (the cosine of a sine) runs once with and without a region.
    rerun = linted.flow.rerun & linted.flow.forward
    again = collections.Counter(linted.primitive(p) for p in rerun)
    expected = {name: again[name] for name in ("dot_general", "tanh", "sin", "exp")}
    testing.assert_recomputes(loss, policy, expected, W, X)
    kept = testing._kept_beyond_nothing(loss, policy, (W, X), {})
    assert sum(linted.flow.stored().values()) == sum(r.bytes for r in kept)


# --- compare and plan


def choosing(w, x):
    taken = jnp.argmax(x @ w, -1, keepdims=True)
    return x * jnp.take_along_axis(jnp.sin(x @ w), taken, -1)


def test_compare_shows_findings_as_notes_and_data():
    asked = ["nothing", "offload_dots", policies.everything]
    table = remat.compare(
        unrolled(choosing, prevent_cse=False), W, X, policies=asked, target="cpu"
    )
    codes = {p: [f.code for f in found] for p, found in table.findings.items()}
    assert codes == {
        "nothing": ["undone-by-cse", "repeated-choice"],
        "offload_dots": ["offload-without-host", "undone-by-cse", "repeated-choice"],
        "everything": ["undone-by-cse"],
    }
    text = " ".join(str(table).split())
    assert "every policy: [undone-by-cse, lint_programs.py" in text
    assert "offload_dots: [offload-without-host] offload_dots offloads" in text
    assert "nothing, offload_dots: [repeated-choice, test_lint.py" in text
    data = table.to_dict()["findings"]["nothing"]
    assert data[0]["code"] == "undone-by-cse" and data[0]["fix"]


def test_plan_notes_what_lint_finds_in_the_planned_program():
    def block(w, x):
        jax.debug.callback(report, x.sum())
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T)

    loss, args = scanned(block), (jnp.zeros((8, 256)), jnp.zeros((64, 8)))
    table = remat.compare(loss, *args, policies=["none", "nothing"], target="cpu")
    least = table["nothing"].peak_bytes
    assert least < table["none"].peak_bytes
    found = remat.plan(loss, *args, budget=least, target="cpu")
    (note,) = [note for note in found.notes if "repeated-callback" in note]
    assert "'report' (debug_callback) runs twice" in note
    assert note in found.to_dict()["notes"]


# --- the report itself


def test_regions_that_cannot_be_read_are_listed():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rows = PartitionSpec("x")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    def inside(w, x):
        return jax.checkpoint(lambda w, x: jnp.sin(jax.lax.psum(x, "x") @ w.T))(w, x)

    loss = lambda w, x: inside(w, x).sum()  # noqa: E731
    (finding,) = lint(loss, "nothing", W, jnp.zeros((8, 8)))
    assert finding.code == "unread-region" and "axis" in finding.message


def test_notes_are_a_line_for_each_rule_with_its_policies():
    traced = Traced.of(unrolled(twin, prevent_cse=False), (W, X), {})
    findings = {
        label: lint_program(traced.under(policy))
        for label, policy in {"h": H, "dots": "save_dots", "none": "none"}.items()
    }
    lines = notes_of(findings, 3)
    assert [line.partition(" ")[2].split(",")[0] for line in lines] == [
        "[unnamed-twin",
        "dots: [undone-by-cse",
    ]
    assert "Leave prevent_cse alone" in lines[1]
    same = {label: findings["dots"] for label in ("a", "b")}
    assert notes_of(same, 2)[0].startswith("every policy: [undone-by-cse")
    assert notes_of(same, 3)[0].startswith("a, b: ")
    assert notes_of({"none": lint_program(traced.under("none"))}, 1) == ()


def test_findings_of_equal_layers_are_one():
    (finding,) = found("unnamed-twin", unrolled(twin, n=5), H, W, X)
    assert finding.where.endswith("and 4 more") or " and " not in finding.where


def test_errors_come_first():
    findings = lint(unrolled(twin, prevent_cse=False), policies.save_names("h"), W, X)
    ranks = [finding.rank for finding in findings]
    assert ranks == sorted(ranks)


def test_a_finding_reads_as_one_line():
    finding = Finding(
        code="a-code",
        message="This is so.",
        fix="Do that.",
        severity="error",
        where="layer",
        source="file.py:3",
    )
    assert str(finding) == "error [a-code] layer, file.py:3: This is so. Do that."


def test_shapes_are_enough_and_wrong_policies_raise():
    shapes = jax.eval_shape(lambda: (W, X))
    assert found("unnamed-twin", unrolled(twin), H, *shapes)
    with pytest.raises(policies.PolicyError):
        lint(unrolled(plain), "save_dotz", *shapes)


def test_policies_that_remat_bound_are_looked_at_as_written():
    bound = policies.save(policies.larger_than(0) & policies.primitive("sin"))
    block = remat.remat(mlp, policy=bound)
    loss = lambda w, x: block(w, block(w, x)).sum()  # noqa: E731
    assert lint(loss, None, W, X) == ()
