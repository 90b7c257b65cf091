import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat._compare._comparison import Row, advise, best_row
from remat._targets._target import target

LAYERS, WIDTH, BATCH = 6, 128, 2048
WS = jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def layer(x, w):
    hidden = checkpoint_name(jnp.sin(x @ w[0]), "mlpwi")
    return x + jnp.tanh(hidden @ w[1])


def loss(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return (x**2).mean()


def scanned(ws, x):
    body = jax.checkpoint(layer, prevent_cse=False)
    x, _ = jax.lax.scan(lambda h, w: (body(h, w), None), x, ws)
    return (x**2).mean()


@pytest.fixture(scope="module")
def on_h100():
    return remat.compare(
        scanned,
        WS,
        X,
        policies=["none", "save_dots", "nothing", "offload_dots", "save_out_proj"],
        target="h100",
        model="toy",
    )


def test_rows_rank_as_the_policies_save(on_h100):
    none, dots, nothing = (on_h100[p] for p in ("none", "save_dots", "nothing"))
    assert none.peak_bytes > dots.peak_bytes > nothing.peak_bytes
    assert all(row.exact and row.fits for row in on_h100.rows)
    assert on_h100["offload_dots"].host_bytes > 0
    assert none.host_bytes == nothing.host_bytes == 0


def test_notes_leave_out_what_is_for_the_models_maintainer():
    def noisy(ws, x):
        warnings.warn("use another accessor", DeprecationWarning, stacklevel=1)
        warnings.warn("asked for float64", UserWarning, stacklevel=1)
        return scanned(ws, x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 2, 4, 4), (2, 4))]
    found = remat.compare(noisy, *shapes, policies=["nothing"], target="cpu")
    assert found["nothing"].note == "asked for float64"


def test_a_row_is_what_an_independent_compile_says(on_h100):
    sharding = target("h100").sharding()
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in (WS, X)
    ]
    fn = jax.jit(jax.value_and_grad(remat.with_policy(scanned, "save_dots")))
    compiled = fn.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    xla, row = compiled.memory_analysis(), on_h100["save_dots"]
    assert xla is not None
    assert row.argument_bytes == xla.argument_size_in_bytes
    assert row.output_bytes == xla.output_size_in_bytes
    assert row.temp_bytes == xla.temp_size_in_bytes
    assert row.peak_bytes == row.argument_bytes + row.output_bytes + row.temp_bytes


def test_recomputed_flops_are_counted_exactly(on_h100):
    # Both products of a layer: the backward pass of tanh reads the second one.
    products = LAYERS * 2 * (2 * BATCH * WIDTH * WIDTH)
    assert on_h100["nothing"].recompute_flops == products
    assert on_h100["save_dots"].recompute_flops == 0
    assert on_h100["none"].recompute_flops == 0
    assert products <= on_h100["none"].forward_flops <= 1.1 * products


def test_policies_whose_names_are_missing_are_skipped(on_h100):
    assert [s.policy for s in on_h100.skipped] == ["save_out_proj"]
    with pytest.raises(KeyError, match="save_dots"):
        on_h100["save_out_proj"]


def test_the_json_has_what_others_read(on_h100, tmp_path):
    on_h100.to_json(tmp_path / "c.json")
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["target"] == "h100" and data["model"] == "toy"
    assert data["versions"]["jax"] == jax.__version__
    for row in data["rows"]:
        assert isinstance(row["peak_bytes"], int)
        assert {
            *("policy fits peak_bytes argument_bytes output_bytes temp_bytes").split(),
            *("host_bytes floor_bytes flops recompute_flops bytes_accessed").split(),
            *("estimated_step_s exact").split(),
        } <= set(row)


def test_it_shows_itself(on_h100):
    text, page = str(on_h100), on_h100._repr_html_()
    assert "save_dots" in text and on_h100.advice.split(":")[0] in text
    assert "<table>" in page and "toy on h100" in page
    assert len(on_h100.plot().data) == 1
    assert not on_h100.plot().layout.shapes  # the limit is far off
    near = dataclasses.replace(on_h100, budget_bytes=2 * on_h100.rows[0].peak_bytes)
    assert len(near.plot().layout.shapes) == 1


def test_tpu_floors_are_marked_and_the_best_row_is_compiled_in_full():
    found = remat.compare(
        scanned,
        WS,
        X,
        policies=["none", "save_dots", "nothing"],
        target="v5e",
        optimizer=optax.sgd(0.1),
    )
    assert found.best is not None
    assert found[found.best].exact and found[found.best].fits
    for row in found.rows:
        assert row.floor_bytes is not None
        assert row.exact or row.fits is None
    assert found.options["optimizer"] is True


def test_equal_programs_are_compiled_once_and_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    twice = ["save_dots", "save_dots_no_batch"]  # this loss has no batched products
    first = remat.compare(loss, WS, X, policies=twice, target="cpu")
    again = remat.compare(loss, WS, X, policies=twice, target="cpu")
    assert (first.n_compiles, again.n_compiles) == (1, 0)
    assert first.rows == again.rows
    for entry in tmp_path.glob("*.zip"):
        entry.write_bytes(entry.read_bytes()[:100])
    assert remat.compare(loss, WS, X, policies=twice, target="cpu").rows == first.rows


def test_a_budget_decides_what_fits():
    options = {"policies": ["none", "nothing"], "target": "cpu"}
    whole = remat.compare(scanned, WS, X, **options)
    between = (whole["none"].peak_bytes + whole["nothing"].peak_bytes) // 2
    found = remat.compare(scanned, WS, X, budget=between, **options)
    assert (found["none"].fits, found["nothing"].fits) == (False, True)
    assert found.best == "nothing" and "needs" in found["none"].note
    least = remat.compare(scanned, WS, X, budget="1KiB", **options)
    assert least.best is None and "No policy fits" in least.advice


def test_rows_with_segmented_scans():
    deep = jax.ShapeDtypeStruct((36, 2, 16, 16), jnp.float32)
    wide = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    rows = ["nothing", "nothing + sqrt"]
    found = remat.compare(scanned, deep, wide, policies=rows, target="cpu")
    plain, cut = found.rows
    # Six segments' carries and one segment's, instead of all thirty-six.
    carry = 4096 * 16 * 4
    assert plain.peak_bytes - cut.peak_bytes > 20 * carry
    assert cut.recompute_flops > plain.recompute_flops


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"policies": ["save_dotz"]}, "save_dots"),
        ({"policies": []}, "at least one"),
        ({"target": "v9"}, "v9"),
        ({"budget": "twelve"}, "12GiB"),
    ],
)
def test_says_what_is_wrong(options, match):
    with pytest.raises(ValueError, match=match):
        remat.compare(loss, WS, X, **{"target": "cpu", **options})


def test_a_loss_without_regions_says_how_to_make_one():
    with pytest.raises(remat.RegionError, match="checkpoint"):
        remat.compare(lambda w: (w**2).sum(), X, target="cpu")


def row(policy, peak, time, fits=True, recompute=0):
    return Row(
        policy=policy,
        fits=fits,
        peak_bytes=peak,
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=peak,
        host_bytes=0,
        generated_code_bytes=0,
        live_peak_bytes=peak,
        floor_bytes=None,
        flops=300 + recompute,
        recompute_flops=recompute,
        forward_flops=100,
        bytes_accessed=0,
        estimated_step_s=time,
        exact=True,
    )


def best_of(*rows):
    best = best_row(rows)
    return best.policy if best else None


def test_the_best_row_is_the_fastest_that_fits():
    rows = [
        row("none", 30, 1.0, fits=False),
        row("quick", 20, 1.1, recompute=10),
        row("slow", 10, 1.5, recompute=50),
    ]
    assert best_of(*rows) == "quick"
    assert "recomputes 10 %" in advise(rows, target("cpu"), 25)
    # Within three percent, less recompute counts more than the estimate.
    close = [row("a", 20, 1.00, recompute=10), row("b", 30, 1.02, recompute=0)]
    assert best_of(*close) == "b"
    # Without estimates (CPU), the least recompute.
    blind = [row("a", 20, None, recompute=10), row("b", 30, None, recompute=5)]
    assert best_of(*blind) == "b"
    assert best_of(row("none", 30, 1.0, fits=False)) is None
