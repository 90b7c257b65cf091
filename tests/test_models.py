"""The reference models: published sizes, names, and that regions change no number."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import remat
from remat import models, policies, testing
from remat.models import llama_nnx
from remat.models._attention import attend

TINY = ("gpt2-tiny", "llama-tiny", "llama-tiny-nnx", "mixtral-tiny", "vit-tiny")
NAMES = {
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "attention_out",
    "out_proj",
    "mlpwo",
}
GATED = NAMES | {"mlpwi_0", "mlpwi_1"}
EMITTED = {
    "gpt2-tiny": NAMES | {"mlpwi"},
    "llama-tiny": GATED,
    "llama-tiny-nnx": GATED,
    "mixtral-tiny": GATED
    | {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "routed_experts", "expert_order"},
    "vit-tiny": NAMES | {"mlpwi"},
}


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def regions(fn, *args):
    """The `checkpoint` equations of a function."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [e for e in equations(jaxpr) if "prevent_cse" in e.params]


def dtypes(tree):
    """The names of the dtypes in a tree."""
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def real(tree):
    """Real values of the shapes in a tree, the same every time, without compiling."""
    random = np.random.default_rng(0)

    def fill(shape):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(3)
        if np.issubdtype(shape.dtype, np.integer):
            return random.integers(0, 10, shape.shape, shape.dtype)
        return random.normal(0.3, 0.3, shape.shape).astype(shape.dtype)

    return jax.tree.map(fill, tree)


def tiny(name, **overrides):
    """A tiny model in fp32 at a few tokens, with parameters and a batch."""
    sizes = {} if name == "vit-tiny" else {"seq": 12}
    built = models.build(name, **{"dtype": jnp.float32, **sizes, **overrides})
    return built, *real(built.args)


def quick(fn):
    """`jax.jit` that spends half the time compiling."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def slow(*names):
    """Parameters of a test that only `-m slow` runs."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


PUBLISHED = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824,
    "llama-3.1-8b": 8030261248,
    "llama-3.1-70b": 70553706496,
    "llama-3.2-1b-nnx": 1235814400,
    "llama-3.2-3b-nnx": 3212749824,
    "llama-3.1-8b-nnx": 8030261248,
    "llama-3.1-70b-nnx": 70553706496,
    "mixtral-8x7b": 46702792704,
    "vit-b16": 86567656,
    "vit-l16": 304326632,
    "vit-b16-1024": 86567656,
    "vit-l16-1024": 304326632,
}


@pytest.mark.parametrize(("name", "n_params"), PUBLISHED.items())
def test_published_sizes(name, n_params):
    built = models.build(name, batch=1)
    assert built.describe["n_params"] == n_params
    assert models.n_params(built.args[0]) == n_params
    assert dtypes(built.args[0]) == {"float32"}


def test_every_preset_is_published_or_tiny():
    assert {*PUBLISHED, *TINY} == set(models.presets())


SIZES = {
    *("n_layers", "n_heads", "n_kv_heads", "d_model", "d_mlp", "vocab_size"),
    *("n_positions", "n_experts", "image_size", "patch_size", "position_grid"),
    *("n_classes", "loss_chunks", "tie_embeddings", "rope_scaling", "rope_theta"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_preset_has_a_tiny_twin(name):
    built = models.build(name, batch=1)
    (twin,) = (
        tiny
        for tiny in map(models.build, TINY)
        if tiny.describe["family"] == built.describe["family"]
    )
    assert twin.describe["n_params"] < 10**6
    # Of the same structure: one is the other with some sizes replaced.
    differing = {
        field.name
        for field in dataclasses.fields(twin.config)
        if getattr(twin.config, field.name) != getattr(built.config, field.name)
    }
    assert differing <= SIZES
    sizes = {size: getattr(twin.config, size) for size in differing}
    again = models.build(name, seq=twin.describe["seq"], **sizes)
    chex.assert_trees_all_equal_shapes_and_dtypes(again.args[0], twin.args[0])


def test_unrolled_has_as_many_parameters():
    built = models.build("gpt2", scan_layers=False)
    assert built.describe["n_params"] == 124439808
    assert {f"layers_{i}" for i in range(12)} < set(built.args[0])


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_layer_is_a_region(name, scan_layers):
    built, params, batch = tiny(name, scan_layers=scan_layers)
    found = regions(built.loss, params, batch)
    assert len(found) == (1 if scan_layers else built.config.n_layers)
    # Outside a loop the compiler would otherwise undo the recompute.
    assert all(e.params["prevent_cse"] is not scan_layers for e in found)
    assert all(e.params["policy"] == policies.nothing for e in found)


@pytest.mark.parametrize("name", TINY)
def test_names_are_maxtexts(name):
    built, params, batch = tiny(name)
    region = regions(built.loss, params, batch)[0]
    names = {
        e.params["name"]
        for e in equations(region.params["jaxpr"])
        if e.primitive.name == "name"
    }
    assert names == EMITTED[name]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_regions_change_no_parameter(name, scan_layers):
    plain, params, batch = tiny(name, scan_layers=scan_layers, policy="none")
    built, _, _ = tiny(name, scan_layers=scan_layers)
    assert not regions(plain.loss, params, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(plain.args[0], built.args[0])


@pytest.mark.slow
def test_regions_change_no_initial_value():
    with_regions, _, _ = tiny("gpt2-tiny")
    without, _, _ = tiny("gpt2-tiny", policy="none")
    key = jax.random.key(0)
    chex.assert_trees_all_equal(quick(with_regions.init)(key), quick(without.init)(key))


@pytest.mark.parametrize(
    "name",
    ["gpt2-tiny", "mixtral-tiny", *slow("llama-tiny", "llama-tiny-nnx", "vit-tiny")],
)
def test_regions_change_no_number(name):
    dropout = 0.2 if name == "gpt2-tiny" else 0.0
    plain, params, batch = tiny(name, policy="none", dropout=dropout)
    built, _, _ = tiny(name, policy="save_qkv_proj", dropout=dropout)
    chex.assert_trees_all_close(
        quick(jax.value_and_grad(built.loss))(params, batch),
        quick(jax.value_and_grad(plain.loss))(params, batch),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", *slow("llama-tiny", "mixtral-tiny", "vit-tiny")]
)
def test_scanned_and_unrolled_agree(name):
    unrolled, params, batch = tiny(name, scan_layers=False)
    layers = [params[f"layers_{i}"] for i in range(unrolled.config.n_layers)]
    rest = {k: v for k, v in params.items() if not k.startswith("layers_")}
    stacked = {**rest, "layers": jax.tree.map(lambda *xs: np.stack(xs), *layers)}
    scanned, _, _ = tiny(name)
    chex.assert_trees_all_close(
        quick(scanned.loss)(stacked, batch),
        quick(unrolled.loss)(params, batch),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "name",
    ["gpt2-tiny", "llama-tiny-nnx", *slow("llama-tiny", "mixtral-tiny", "vit-tiny")],
)
def test_dropout_drops_by_its_key(name):
    built, params, batch = tiny(name, dropout=0.5)
    loss = quick(built.loss)
    dropped = loss(params, batch)
    assert dropped == loss(params, batch)
    assert dropped != loss(params, {**batch, "dropout_key": jax.random.key(4)})


@pytest.mark.parametrize("name", TINY)
def test_without_a_key_nothing_is_dropped(name):
    built, params, batch = tiny(name, dropout=0.5)
    del batch["dropout_key"]
    undropped, _, _ = tiny(name)
    assert str(jax.make_jaxpr(built.loss)(params, batch)) == str(
        jax.make_jaxpr(undropped.loss)(params, batch)
    )


@pytest.mark.parametrize("name", TINY)
def test_computes_in_bf16_over_fp32(name):
    built, params, batch = tiny(name, dtype=jnp.bfloat16)
    matmuls = [
        e
        for e in equations(jax.make_jaxpr(built.loss)(params, batch).jaxpr)
        if e.primitive.name in ("dot_general", "ragged_dot_general")
    ]
    operands = [v.aval for e in matmuls for v in e.invars[:2]]
    assert dtypes(operands) == {"bfloat16"}
    step = jax.value_and_grad(built.loss)
    assert dtypes(jax.eval_shape(step, params, batch)) == {"float32"}


@pytest.mark.parametrize("name", TINY)
def test_promotes_no_type_in_silence(name):
    built, params, batch = tiny(name, dropout=0.1)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(built.loss), params, batch)


@pytest.mark.parametrize(("scan_layers", "tied"), [(True, False), (False, True)])
def test_nnx_computes_what_linen_computes(scan_layers, tied):
    options = {"scan_layers": scan_layers, "tie_embeddings": tied}
    linen, params, batch = tiny("llama-tiny", **options)
    nnx, _, _ = tiny("llama-tiny-nnx", **options)
    same = params
    if not scan_layers:
        same = {k: v for k, v in params.items() if not k.startswith("layers_")}
        same["layers"] = {i: params[f"layers_{i}"] for i in range(2)}
    model = llama_nnx.from_params(nnx.config, same)
    chex.assert_trees_all_equal(llama_nnx.to_params(model), same)

    def both(params, same, tokens):
        model = llama_nnx.from_params(nnx.config, same)
        return model(tokens), linen.model.apply({"params": params}, tokens)

    given, wanted = quick(both)(params, same, batch["tokens"])
    chex.assert_trees_all_close(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-nnx"])
def test_flash_attention_holds_no_scores(name):
    sizes = {"batch": 1, "seq": 384, "d_model": 512, "policy": "none"}
    flash = models.build(name, attention="pallas", **sizes)
    plain = models.build(name, **sizes)
    texts = [
        str(jax.make_jaxpr(jax.grad(built.loss))(*built.args))
        for built in (flash, plain)
    ]
    # One kernel forward and two backward, in the one traced layer.
    assert [text.count(" = pallas_call[") for text in texts] == [3, 0]
    assert [",384,384]" in text for text in texts] == [False, True]


@pytest.mark.parametrize(
    ("policy", "n_again"),
    [("nothing", 1), ("torchtitan_compute_ops", 0), ("everything", 0)],
)
def test_a_policy_that_keeps_kernels_keeps_flash_attention(policy, n_again):
    # Its derivative rule calls a custom_vjp function again, for the statistics.
    built = models.build(
        "llama-tiny", attention="pallas", batch=1, seq=128, d_model=512, n_layers=1
    )
    expected = {"pallas_call": n_again}
    testing.assert_recomputes(built.loss, policy, expected, *built.args)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be here")
def test_cudnn_attention_says_that_it_needs_a_gpu():
    built = models.build("gpt2-tiny", attention="cudnn")
    with pytest.raises(models.PresetError, match=r'needs an NVIDIA GPU .*"xla" also'):
        jax.eval_shape(built.loss, *built.args)


@pytest.mark.slow
@pytest.mark.parametrize(("n_places", "causal"), [(128, True), (65, False), (65, True)])
def test_flash_attention_computes_what_attention_does(n_places, causal):
    random = np.random.default_rng(0)
    shapes = [(2, n_places, heads, 128) for heads in (4, 2, 2)]
    inputs = [random.normal(size=shape).astype(np.float32) for shape in shapes]

    def loss(kind, *inputs):
        out = attend(*inputs, causal=causal, kind=kind)
        return (out * jnp.cos(jnp.arange(128.0))).sum(), out

    with pltpu.force_tpu_interpret_mode():
        found = jax.grad(functools.partial(loss, "pallas"), (0, 1, 2), has_aux=True)(
            *inputs
        )
    wanted = jax.grad(functools.partial(loss, "xla"), (0, 1, 2), has_aux=True)(*inputs)
    chex.assert_trees_all_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_regions_are_called_by_their_place(name):
    for scan_layers, places in ((True, ["layers"]), (False, ["layers_0", "layers_1"])):
        built = models.build(name, scan_layers=scan_layers)
        found = remat.find_regions(built.loss, *built.args)
        assert [region.path.split("/")[-1] for region in found] == places
        assert sum(region.times for region in found) == built.config.n_layers


def test_gpt2_sees_no_future():
    built, params, _ = tiny("gpt2-tiny")
    logits = quick(lambda tokens: built.model.apply({"params": params}, tokens))
    tokens = np.arange(16)[None]
    changed = np.where(tokens == 10, 99, tokens)
    before, after = logits(tokens), logits(changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.array_equal(before[:, 10:], after[:, 10:])


def test_longer_sequences_need_more_positions():
    built = models.build("gpt2", seq=2048)
    assert built.describe["n_params"] == 124439808 + 1024 * 768
    assert built.describe["n_positions"] == 2048


@pytest.mark.parametrize("policy", [policies.save_dots, policies.save_names("context")])
def test_takes_policy_objects(policy):
    built, params, batch = tiny("gpt2-tiny", policy=policy)
    region = regions(built.loss, params, batch)[0]
    assert region.params["policy"] == policy
    assert built.describe["policy"] == repr(policy)


@pytest.mark.parametrize("name", [*TINY, "llama-3.2-1b"])
def test_descriptions_fit_json(name):
    described = models.build(name, policy=policies.save_dots).describe
    assert json.loads(json.dumps(described)) == described
    assert described["preset"] == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt3", {}, "no preset is called 'gpt3' .did you mean gpt2"),
        ("gpt2", {"batch": -1}, "batch must be a whole number from 1, given -1"),
        ("gpt2", {"seq": 0}, "seq must be a whole number from 1, given 0"),
        ("gpt2", {"drop_out": 0.1}, "no option 'drop_out' .did you mean dropout"),
        ("vit-b16", {"seq": 128}, "images have no seq, given 128; give image_size="),
        ("llama-tiny", {"attention": "flash"}, "attention must be one of 'xla'"),
        ("llama-tiny", {"n_kv_heads": 3}, "n_heads must be a multiple of n_kv_heads"),
        ("gpt2-tiny", {"n_heads": 7}, "d_model must be a multiple of n_heads"),
        ("gpt2-tiny", {"dropout": 1.5}, "dropout must be from 0 to below 1, given 1.5"),
        ("gpt2-tiny", {"loss_chunks": 0}, "loss_chunks must be a whole number from 1"),
        ("vit-tiny", {"image_size": 30}, "image_size must be a multiple of patch_size"),
    ],
)
def test_wrong_requests_say_what_is_right(name, options, message):
    with pytest.raises(models.PresetError, match=message):
        models.build(name, **options)
