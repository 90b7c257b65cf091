"""A plan's file: written whole, read strictly, applied to what it was made for."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat._plan._kinds import find_kinds
from remat._plan._make import _choice
from remat._plan._plan_file import seal_of
from remat._targets._target import target
from tests.helpers import saved_residuals
from tests.plan_losses import BATCH, WIDTH, WS, X, layer, numbers, scanned

W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
COMMITTED = pathlib.Path(__file__).parent / "data" / "plan.json"
"""Made under jax 0.12: `remat.plan(scanned, WS, X, target="h100", model="scanned")`
with a budget half-way from nothing kept to everything."""


@pytest.fixture(scope="module")
def committed():
    return remat.Plan.load(COMMITTED)


def test_a_file_reads_back_as_it_was_written(committed, tmp_path):
    path = tmp_path / "plan.json"
    committed.save(path)
    assert remat.Plan.load(path) == committed
    with pytest.raises(remat.PlanError, match="overwrite"):
        committed.save(path)
    committed.save(path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_has_what_others_read(committed):
    data = json.loads(COMMITTED.read_text())
    assert data["schema"] == "remat.plan/1" and data["target"] == "h100"
    for name in (
        *("peak_bytes", "predicted_peak_bytes", "budget_bytes", "recompute_flops"),
        *("host_bytes", "n_compiles"),
    ):
        assert isinstance(data[name], int), name
    assert data["estimated_step_s"] > 0 and data["command"]
    assert {"jax", "jaxlib", "python"} <= set(data["versions"])
    (region,) = data["regions"]
    assert region["times"] == 6 and len(region["fingerprint"]) == 16
    kept = data["choices"][0]["kept"]
    assert [BATCH, WIDTH] in [k["shape"] for k in kept]


def test_one_plan_applies_under_every_jax(committed):
    """Fingerprints, ids and the values kept are the same on 0.10 and 0.12."""
    ws, x = numbers()
    planned = committed.apply(scanned)
    np.testing.assert_allclose(
        jax.grad(planned)(ws, x), jax.grad(scanned)(ws, x), rtol=1e-5, atol=1e-8
    )
    (choice,) = committed.choices
    (region,) = remat.find_regions(planned, ws, x)
    marked = [n for n in region.emitted_names if n.startswith("remat.save:")]
    assert sorted(marked) == sorted(f"remat.save:{k.id}" for k in choice.kept)
    # The carry is kept in any case; a scan stacks what each of its steps keeps.
    assert len(saved_residuals(planned, ws, x)) > len(saved_residuals(scanned, ws, x))


def test_a_changed_model_is_refused_with_what_changed(committed):
    ws, x = numbers()

    def other(x, w):
        return layer(x, w) + jnp.cos(x)

    def scan_of(body, ws, x):
        body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(lambda h, w: (body(h, w), None), x, ws)[0].sum()

    with pytest.raises(remat.PlanError, match=r"region 0 .* cos: 0 before, 1 now"):
        committed.apply(lambda ws, x: scan_of(other, ws, x))(ws, x)
    with pytest.raises(remat.PlanError, match=r"input 0 was float32\[512, 32\]"):
        committed.apply(scanned)(ws, x[:3])
    with pytest.raises(remat.PlanError, match="ran 6 times and runs 5 times"):
        committed.apply(scanned)(ws[:5], x)
    with pytest.raises(remat.PlanError, match="1 regions, and the function has 2"):
        committed.apply(lambda ws, x: scanned(ws, x) + scanned(ws, x))(ws, x)


def edited(change) -> str:
    data = json.loads(COMMITTED.read_text())
    change(data)
    return json.dumps(data)


def sealed(change) -> str:
    data = json.loads(COMMITTED.read_text())
    del data["seal"]
    change(data)
    return json.dumps({**data, "seal": seal_of(data)})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not JSON"),
        ("[1]", "its schema is None"),
        ('{"schema": "remat.comparison/1"}', "remat.comparison/1"),
        (edited(lambda d: d.update(peak_bytes=1)), "was changed since"),
        (edited(lambda d: d.pop("seal")), "was changed since"),
        (sealed(lambda d: d.pop("peak_bytes")), "missing fields peak_bytes"),
        (sealed(lambda d: d.update(peak_bytes="1")), "peak_bytes: wanted int"),
        (sealed(lambda d: d.update(surprise=1)), "unknown fields surprise"),
        (sealed(lambda d: d.update(regions=3)), "regions: wanted a list"),
        (sealed(lambda d: d["choices"][0].pop("kept")), r"choices\[0\]: missing"),
    ],
)
def test_a_tampered_or_foreign_file_is_refused(text, match, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(remat.PlanError, match=match):
        remat.Plan.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(remat.PlanError, match=r"absent\.json"):
        remat.Plan.load(tmp_path / "absent.json")


# --- as a policy


def test_the_policy_keeps_what_the_plan_does():
    """`names_suffice` is only said where both keep the same."""

    def by_name(x, w):
        return jnp.sin(checkpoint_name(x @ w, "mlpwi"))

    def twin(x, w):
        return checkpoint_name(jnp.tanh(x @ w), "mlpwi") @ w

    for fn, suffices in ((by_name, True), (twin, False)):
        (kind,), _ = find_kinds(
            remat.find_regions(jax.checkpoint(fn), X, W),
            [],
            target("h100"),
            allow_offload=False,
        )
        choice = kind.everything
        found = _choice("A", choice, kind, removed=False)
        assert found.kept and found.names_suffice is suffices, fn.__name__


def with_choice(plan, **changes):
    choice = dataclasses.replace(plan.choices[0], **changes)
    return dataclasses.replace(plan, choices=(choice,))


def test_the_policy_saves_by_name_or_says_to_use_apply(committed):
    kept = tuple(
        dataclasses.replace(k, checkpoint_name="mlpwi")
        for k in committed.choices[0].kept
    )
    named = with_choice(committed, kept=kept, names_suffice=True)
    assert named.policy.checkpoint_names == {"mlpwi"}
    with pytest.raises(remat.PlanError, match=r"checkpoint names do not.*apply"):
        _ = committed.policy
    both = dataclasses.replace(committed, choices=committed.choices * 2)
    with pytest.raises(remat.PlanError, match="2 choices"):
        _ = both.policy
    nothing = with_choice(committed, kept=(), names_suffice=True)
    assert nothing.policy == remat.policies.get("nothing")
    gone = with_choice(committed, removed=True)
    assert gone.policy == remat.policies.get("everything")


# --- checks


@pytest.fixture(scope="module")
def on_cpu():
    return remat.plan(scanned, WS, X, target="cpu", budget="1GiB", model="toy")


def test_a_plan_that_holds_and_one_that_drifted(on_cpu):
    good = remat.check_plan(on_cpu, scanned, WS, X)
    assert good.ok and good.peak_bytes == on_cpu.peak_bytes
    small = dataclasses.replace(on_cpu, peak_bytes=on_cpu.peak_bytes // 2)
    drifted = remat.check_plan(small, scanned, WS, X)
    assert not drifted.ok and "drifted" in drifted.why
    assert remat.check_plan(small, scanned, WS, X, tolerance=0.999).ok is False
    tight = dataclasses.replace(on_cpu, budget_bytes=on_cpu.peak_bytes - 1)
    over = remat.check_plan(tight, scanned, WS, X)
    assert not over.ok and "exceeds the budget" in over.why
    with pytest.raises(remat.PlanError, match="tolerance is a share"):
        remat.check_plan(on_cpu, scanned, WS, X, tolerance="two")


def test_a_changed_model_fails_the_check(on_cpu):
    shorter = jax.ShapeDtypeStruct((5, *WS.shape[1:]), WS.dtype)
    checked = remat.check_plan(on_cpu, scanned, shorter, X)
    assert not checked.ok and checked.peak_bytes is None
    assert "runs 5 times now" in str(checked)


def test_plans_are_rows_of_a_comparison(committed, tmp_path):
    path = tmp_path / "plan.json"
    committed.save(path)
    table = remat.compare(
        scanned, WS, X, policies=["nothing", committed, str(path)], target="cpu"
    )
    assert [row.policy for row in table.rows] == ["nothing", "plan", str(path)]
    assert table["plan"].recompute_flops < table["nothing"].recompute_flops
    assert table["plan"].peak_bytes == table[str(path)].peak_bytes


def test_the_commands_plan_and_check(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tests.plan_losses import WS, X, scanned\n"
        "def make(): return scanned, (WS, X)\n"
    )
    root = str(pathlib.Path(__file__).parent.parent)

    def run(*args):
        code = f"import sys; sys.path[:0] = [{root!r}]; import remat.cli as c; c.main()"
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    made = run(
        *("plan", "mine:make", "--target", "cpu", "--budget", "1GiB"),
        *("--no-optimizer", "-o", "p.json"),
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr == "" and "plan for mine:make on cpu" in made.stdout
    data = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "q.json").write_text(json.dumps(data))
    good = run("check", "--all", ".")
    assert good.returncode == 0 and good.stdout.count("ok") == 2
    del data["seal"]
    data["budget_bytes"] = data["peak_bytes"] - 1
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**data, "seal": seal_of(data)}))
    one_bad = run("check", "--all", ".")
    assert one_bad.returncode == 1 and "q.json: mine:make on cpu: ok" in one_bad.stdout
    assert "exceeds the budget" in one_bad.stdout
    path.write_text(json.dumps(data))
    bad = run("check", "p.json")
    assert bad.returncode == 2 and "was changed" in bad.stderr
    again = run("plan", "mine:make", "--target", "cpu", "-o", "p.json")
    assert again.returncode == 2 and "--overwrite" in again.stderr
