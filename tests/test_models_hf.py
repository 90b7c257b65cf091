"""Hugging Face checkpoints: the same logits, and errors for what is not ours."""

import importlib.util
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import models
from remat.models._safetensors import read_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "hf"
WORDS = ("gpt2", "llama", "mixtral")


def logits(loaded, inputs):
    """A loaded model's answer, compiled in a hurry."""
    fn = jax.jit(
        lambda x: loaded.logits(loaded.params, x),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    with jax.default_matmul_precision("highest"):
        return np.asarray(fn(inputs))


@pytest.mark.parametrize("family", WORDS)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_words_as_transformers(family, scan_layers):
    expected = np.load(FIXTURES / family / "expected.npz")
    loaded = models.load_hf(
        FIXTURES / family, dtype=jnp.float32, scan_layers=scan_layers
    )
    found = logits(loaded, expected["tokens"])
    assert np.ptp(expected["logits"]) > 1
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "larger_"])
def test_images_as_transformers(prefix):
    expected = np.load(FIXTURES / "vit" / "expected.npz")
    loaded = models.load_hf(FIXTURES / "vit", dtype=jnp.float32)
    found = logits(loaded, expected[f"{prefix}images"])
    wanted = expected[f"{prefix}logits"]
    assert np.ptp(wanted) > 0.5
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", [*WORDS, "vit"])
def test_parameters_are_those_the_model_would_make(family):
    loaded = models.load_hf(FIXTURES / family)
    side = getattr(loaded.config, "image_size", None)
    example = jnp.zeros((1, side, side, 3)) if side else jnp.zeros((1, 4), jnp.int32)
    made = jax.eval_shape(loaded.model.init, jax.random.key(0), example)["params"]
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded.params) == shapes


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of a fixture with its configuration and tensors changed."""

    def make(family, config=None, tensors=None):
        directory = tmp_path / family
        shutil.copytree(FIXTURES / family, directory)
        if config:
            path = directory / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        if tensors:
            path = directory / "model.safetensors"
            kept = dict(read_file(path))
            write_file(path, tensors({k: np.array(v) for k, v in kept.items()}))
        return directory

    return make


def write_file(path, tensors, dtype="F32"):
    """Writes a safetensors file."""
    header, data = {}, b""
    for name, value in tensors.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {
            "dtype": dtype,
            "shape": value.shape,
            "data_offsets": offsets,
        }
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_names_may_lack_the_prefix(copy):
    # As in the checkpoint called "gpt2" on the hub, which has masks besides.
    def bare(tensors):
        bare = {k.removeprefix("transformer."): v for k, v in tensors.items()}
        return {**bare, "h.0.attn.bias": np.zeros((1, 1, 24, 24), np.float32)}

    loaded = models.load_hf(copy("gpt2", tensors=bare))
    wanted = models.load_hf(FIXTURES / "gpt2")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted.params)


def test_older_files_keep_rotary_settings_apart(copy):
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    rope = config["rope_parameters"]
    old = {
        "rope_parameters": None,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
    }
    loaded = models.load_hf(copy("llama", config=old))
    assert loaded.config == models.load_hf(FIXTURES / "llama").config


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {"model_type": "qwen3"}, "type 'qwen3'; what can be loaded is gpt2,"),
        ("llama", {"attention_bias": True}, "attention_bias = True; models here have"),
        ("llama", {"head_dim": 16}, "head_dim = 16; models here have None or 8"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "of type 'yarn' are not"),
        ("llama", {"num_hidden_layers": 3}, "no tensor 'model.layers.2.mlp"),
        ("llama", {"num_hidden_layers": 1}, "9 tensors that the model it names has no"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("vit", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'"),
    ],
)
def test_what_is_not_ours_is_refused(copy, family, config, message):
    with pytest.raises(models.CheckpointError, match=message):
        models.load_hf(copy(family, config=config))


def test_missing_files_say_what_is_missing(copy, tmp_path):
    with pytest.raises(models.CheckpointError, match=r"cannot read .*config\.json"):
        models.load_hf(tmp_path / "nothing")
    directory = copy("mixtral")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(models.CheckpointError, match=r"cannot read .*00002-of-00003"):
        models.load_hf(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(models.CheckpointError, match="has neither model"):
        models.load_hf(directory)


def test_an_index_names_no_file_elsewhere(copy):
    directory = copy("mixtral")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(models.CheckpointError, match="has no usable weight_map"):
        models.load_hf(directory)


def test_a_file_cut_short_is_refused(copy):
    path = copy("llama") / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(models.CheckpointError):
            read_file(path)


@settings(max_examples=200, deadline=None)
@given(where=st.integers(0, 3000), what=st.binary(min_size=1, max_size=8))
def test_any_bytes_are_read_or_refused(tmp_path_factory, where, what):
    whole = bytearray((FIXTURES / "llama" / "model.safetensors").read_bytes())
    whole[where : where + len(what)] = what
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    path.write_bytes(whole)
    try:
        tensors = read_file(path)
    except models.CheckpointError:
        return
    assert all(isinstance(value, np.ndarray) for value in tensors.values())


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_every_width_becomes_fp32(tmp_path, dtype):
    from remat.models._safetensors import DTYPES, open_tensors

    path = tmp_path / "model.safetensors"
    values = np.arange(6).reshape(2, 3).astype(DTYPES[dtype])
    write_file(path, {"x": values}, dtype)
    found = open_tensors(tmp_path).read("x")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.arange(6.0).reshape(2, 3))


@pytest.mark.live
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", [*WORDS, "vit"])
def test_live_against_transformers(tmp_path, family, seed):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make", FIXTURES / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    sizes = [{}, {"tie_word_embeddings": True}, {"rope_parameters": None}]
    model = getattr(make, family)(seed, **(sizes[seed] if family == "llama" else {}))
    model.save_pretrained(tmp_path, max_shard_size=["5GB", "10KB", "30KB"][seed])
    loaded = models.load_hf(tmp_path, dtype=jnp.float32)
    if family == "vit":
        inputs = make.images(seed, 24)
        wanted = make.logits_of_images(model, inputs)
    else:
        inputs = make.words(seed, (3, 24))
        wanted = make.logits_of_words(model, inputs)
    found = logits(loaded, inputs)
    print(f"{family}, seed {seed}: logits differ by {np.abs(found - wanted).max():.1e}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
