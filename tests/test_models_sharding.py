"""On a mesh: the same numbers as on one device, and each device its share."""

import functools
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat
from remat import models
from remat._compare._measure import Setup, forward_flops, prepare
from remat._compare._step import build_step
from remat.models._mesh import make_mesh
from remat.models._run_directory import read_rows
from remat.models._sharding import shardings
from tests.benchmarks import sharded
from tests.test_models import TINY, quick, real, regions

MESHES = ("fsdp=8", "tensor=2", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2")
BOTH = "fsdp=4,tensor=2"


def tiny(name, mesh=None, **overrides):
    """A tiny model in fp32: eight examples of a few tokens."""
    sizes: dict[str, Any] = {"batch": 8, "dtype": jnp.float32}
    if name != "vit-tiny":
        sizes["seq"] = 16
    return models.build(name, mesh=mesh, **{**sizes, **overrides})


def place(values, shapes):
    """Real values where shapes say they lie."""
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), values, shapes)


def specs(tree):
    """Path to partition, of a tree of shapes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def local_bytes(leaf):
    """Bytes of one device's share of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def test_the_table_places_a_llama():
    params, batch = tiny("llama-tiny", BOTH).args
    assert specs(params) == {
        "final_norm/scale": P(),
        "layers/attention/key/kernel": P(None, "fsdp", "tensor"),
        "layers/attention/out/kernel": P(None, "tensor", None, "fsdp"),
        "layers/attention/query/kernel": P(None, "fsdp", "tensor"),
        "layers/attention/value/kernel": P(None, "fsdp", "tensor"),
        "layers/attention_norm/scale": P(),
        "layers/mlp/wi_0/kernel": P(None, "fsdp", "tensor"),
        "layers/mlp/wi_1/kernel": P(None, "fsdp", "tensor"),
        "layers/mlp/wo/kernel": P(None, "tensor", "fsdp"),
        "layers/mlp_norm/scale": P(),
        "output_embedder/embedding": P("tensor", "fsdp"),
        "token_embedder/embedding": P("tensor", "fsdp"),
    }
    assert specs(batch) == {"targets": P("fsdp"), "tokens": P("fsdp")}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3.1-8b-nnx", "mixtral-8x7b", "vit-l16"]
)
def test_only_what_is_small_lies_whole(name):
    params, _ = models.build(name, mesh=BOTH).args
    whole = [
        leaf for leaf in jax.tree.leaves(params) if leaf.sharding.is_fully_replicated
    ]
    assert models.n_params(whole) < 0.005 * models.n_params(params)


def test_unrolled_layers_and_moments_lie_as_scanned_ones():
    built = tiny("gpt2-tiny", BOTH, scan_layers=False)
    wanted = P("fsdp", "tensor")
    assert specs(built.args[0])["layers_1/mlp/wi/kernel"] == wanted
    state = jax.eval_shape(optax.adamw(1e-3).init, built.args[0])
    placed = shardings(state, built.config.mesh)
    assert placed[0].mu["layers_1"]["mlp"]["wi"]["kernel"].spec == wanted
    assert placed[0].count.spec == P()


def test_a_dimension_the_mesh_does_not_divide_is_whole():
    params, _ = models.build("gpt2", mesh="fsdp=2,tensor=4").args  # 50257 words
    assert specs(params)["token_embedder/embedding"] == P(None, "fsdp")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if fast else pytest.mark.slow)
        for name in TINY
        for mesh in MESHES
        for fast in [(name, mesh) in [("llama-tiny", BOTH)]]
    ],
)
def test_loss_and_gradients_are_those_of_one_device(name, mesh):
    one, many = tiny(name), tiny(name, mesh)
    values = real(one.args)
    loss, gradients = quick(jax.value_and_grad(one.loss))(*values)
    placed = place(values, many.args)
    found, sharded = quick(jax.value_and_grad(many.loss))(*placed)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    # fp32 sums in another order: to 1e-5 of the largest gradient.
    largest = max(jnp.abs(g).max() for g in jax.tree.leaves(gradients))
    chex.assert_trees_all_close(sharded, gradients, rtol=0, atol=1e-5 * float(largest))
    for gradient, shape in zip(
        jax.tree.leaves(sharded), jax.tree.leaves(many.args[0]), strict=True
    ):
        assert gradient.sharding.is_equivalent_to(shape.sharding, gradient.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "save_dots", "save_qkv_proj"])
def test_policies_change_no_gradient_on_a_mesh(policy):
    built = tiny("llama-tiny", BOTH)
    placed = place(real(built.args), built.args)
    gradient = quick(jax.grad(built.loss))(*placed)
    other = quick(jax.grad(remat.with_policy(built.loss, policy)))(*placed)
    chex.assert_trees_all_close(other, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_a_mesh_changes_no_region(name):
    found = [
        [(r.path, r.times) for r in remat.find_regions(built.loss, *built.args)]
        for built in (tiny(name), tiny(name, BOTH))
    ]
    assert found[0] == found[1]
    names = [
        re.findall(r"name\[name=(\w+)\]", str(regions(built.loss, *built.args)[0]))
        for built in (tiny(name), tiny(name, BOTH))
    ]
    assert names[0] == names[1]


def test_each_device_holds_its_share():
    built = tiny("llama-tiny", BOTH)
    step = build_step(built.loss, built.args, optimizer=optax.adamw(1e-3))
    lowered = jax.jit(step.fn, donate_argnums=step.donate_argnums).lower(*step.args)
    compiled = lowered.compile({"xla_backend_optimization_level": "0"})
    used = compiled.memory_analysis()
    assert used is not None
    params, batch = (
        sum(local_bytes(x) for x in jax.tree.leaves(arg)) for arg in built.args
    )
    # Parameters and both moments, the count of steps, tokens and targets.
    assert used.argument_size_in_bytes == 3 * params + 4 + batch
    # The new ones lie where the old ones did, and take their memory.
    assert used.alias_size_in_bytes == 3 * params + 4


def test_flops_are_one_devices():
    def flops(built):
        make_step = functools.partial(build_step, args=built.args)
        setup = Setup(target=remat.target("cpu"), make_step=make_step)
        return prepare(built.loss, setup).flops, forward_flops(built.loss, setup)

    whole = flops(tiny("llama-tiny"))
    assert flops(tiny("llama-tiny", BOTH)) == tuple(n // 8 for n in whole)


def test_a_mesh_of_a_target_is_of_its_devices():
    built = models.build("llama-3.1-70b", mesh="fsdp=64", target="v5p:4x4x4")
    devices = built.args[0]["final_norm"]["scale"].sharding.device_set
    assert {device.platform for device in devices} == {"tpu"} and len(devices) == 64
    assert built.describe["batch"] == 64


def test_default_batches_grow_to_what_the_mesh_cuts():
    batches = [
        models.build(name, mesh=mesh).describe["batch"]
        for name in ("llama-3.1-8b", "gpt2")
        for mesh in (None, "fsdp=4", "data=2,fsdp=4", "tensor=8")
    ]
    assert batches == [1, 4, 8, 1, 8, 8, 8, 8]


def test_a_mesh_may_be_given_in_three_ways():
    text = models.build("gpt2-tiny", mesh="tensor=2, fsdp=4")
    mapping = models.build("gpt2-tiny", mesh={"fsdp": 4, "tensor": 2})
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = models.build("gpt2-tiny", mesh=Mesh(devices, ("fsdp", "tensor")))
    assert text.config.mesh == mapping.config.mesh == mesh.config.mesh
    assert text.describe["mesh"] == {"fsdp": 4, "tensor": 2}
    assert json.loads(json.dumps(text.describe)) == text.describe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "fsdp"}, 'as in "fsdp=4,tensor=2", given .fsdp.'),
        ({"mesh": "fsdp=2,fsdp=2"}, "given 'fsdp=2,fsdp=2'"),
        ({"mesh": "model=4"}, "one or more of data, fsdp, tensor"),
        ({"mesh": {"fsdp": 0}}, "given {'fsdp': 0}"),
        ({"mesh": "fsdp=16"}, "needs 16 devices; cpu has 8"),
        ({"mesh": "fsdp=17", "target": "v5e:4x4"}, "needs 17 devices"),
        ({"mesh": "fsdp=4", "batch": 6}, "batch must be a multiple of 4, .*given 6"),
    ],
)
def test_meshes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        models.build("gpt2-tiny", **options)


def test_make_mesh_orders_its_axes():
    assert dict(make_mesh("tensor=2,data=4").shape) == {"data": 4, "tensor": 2}


@pytest.mark.slow
def test_plans_for_a_mesh_hold_when_checked(tmp_path):
    sizes: dict[str, Any] = {"batch": 16, "seq": 512, "mesh": "fsdp=2,tensor=2"}
    built = models.build("llama-tiny", target="v5e:2x2", **sizes)
    table = remat.compare(
        built.loss, *built.args, policies=["none", "nothing"], target="v5e:2x2"
    )
    budget = sum(row.peak_bytes for row in table.rows) // 2
    plan = remat.plan(
        built.loss,
        *built.args,
        budget=budget,
        target="v5e:2x2",
        model="llama-tiny",
        options=built.describe,
    )
    assert plan.peak_bytes <= budget
    plan.save(tmp_path / "plan.json")
    checked = remat.check_plan(tmp_path / "plan.json")
    assert checked.ok, checked


@pytest.mark.slow
def test_the_command_takes_a_mesh(tmp_path):
    def run(*words):
        command = [sys.executable, "-c", "from remat.cli import main; main()", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    place = ("llama-tiny", "--target", "v5e:2x2", "--mesh", "fsdp=2,tensor=2")
    done = run("compare", *place, "--policies", "nothing", "--json", "c.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["options"]["mesh"] == {"fsdp": 2, "tensor": 2}
    assert found["options"]["batch"] == 2
    done = run(
        *("train", "gpt2-tiny", "--mesh", "fsdp=4,tensor=2", "--out", "many"),
        *("--steps", "3", "--warmup", "2", "--horizon", "9", "--dropout", "0.1"),
        *("--dtype", "bfloat16", "--clip-norm", "0.5", "--seed", "1", "--keep", "1"),
        *("--batch", "8", "--seq", "16", "--checkpoint-every", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "many")) == 3
    settings = json.loads((tmp_path / "many" / "run.json").read_text())
    assert settings["dtype"] == "bfloat16" and settings["clip_norm"] == 0.5
    assert [p.name for p in (tmp_path / "many" / "checkpoints").iterdir()] == ["3"]
    done = run("train", "gpt2-tiny", "--mesh", "fsdp=64", "--out", "run")
    assert done.returncode == 2
    assert "needs 64 devices" in done.stderr
    assert "xla_force_host_platform_device_count=64" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target", "mesh"),
    [(model, *place) for model in sharded.MODELS for place in sharded.PLACES],
)
def test_llama_on_a_pod(model, target, mesh):
    cell = {"model": model, "target": target, "mesh": mesh, "full": False}
    rows = {
        policy: sharded.measure({**cell, "policy": policy}, seq=4096)
        for policy in sharded.POLICIES
    }
    print(model, target, mesh, {p: row["peak_bytes"] for p, row in rows.items()})
    peaks = [rows[p]["peak_bytes"] for p in ("none", "save_dots", "nothing")]
    assert peaks == sorted(peaks, reverse=True)
    # fp32 parameters and both moments, cut by every device of the mesh.
    n_params = models.build(model).describe["n_params"]
    share = 12 * n_params / remat.target(target).n_devices
    for row in rows.values():
        assert share <= row["argument_bytes"] <= 1.02 * share
    if model == "llama-3.1-8b":
        assert rows["nothing"]["fits"]
    else:  # 53 GiB a device for what is kept alone: no policy helps on a v5e
        assert rows["nothing"]["fits"] == (target == "v5p:4x4x4")


# Flash attention


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "tensor=4", "fsdp=4"])
def test_flash_attention_compiles_on_a_mesh(mesh):
    built = models.build(
        "llama-tiny",
        batch=4,
        seq=256,
        d_model=512,
        attention="pallas",
        mesh=mesh,
        target="v5e:2x2",
    )
    table = remat.compare(
        built.loss, *built.args, policies=["nothing"], target="v5e:2x2"
    )
    assert not table.failed
    assert table.rows[0].peak_bytes > 0


# Training


RUN: dict[str, Any] = {
    "steps": 3,
    "batch": 4,
    "seq": 8,
    "dtype": "float32",
    "options": {"n_layers": 1, "n_heads": 2, "d_model": 8},
    "checkpoint_every": 2,
    "n_sample": 0,
}


def losses(out):
    """What a run logged."""
    return [row["loss"] for row in read_rows(pathlib.Path(out) / "metrics.jsonl")]


def test_trains_on_a_mesh(tmp_path):
    done = models.train("gpt2-tiny", out=tmp_path, mesh=BOTH, **RUN)
    kernel = done.params["layers"]["mlp"]["wi"]["kernel"]
    assert kernel.sharding.spec == P(None, "fsdp", "tensor")
    assert len(losses(tmp_path)) == 3


@pytest.mark.slow
def test_a_run_may_go_on_on_another_mesh(tmp_path):
    one = models.train("gpt2-tiny", out=tmp_path / "one", **{**RUN, "steps": 6})
    for steps, mesh in ((2, "fsdp=4"), (4, "tensor=2"), (6, None)):
        options = {**RUN, "steps": steps, "mesh": mesh}
        done = models.train("gpt2-tiny", out=tmp_path / "many", **options)
        assert done.started_at == steps - 2
    wanted = losses(tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "many"), wanted, rtol=1e-5)
    chex.assert_trees_all_close(done.params, one.params, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_run_on_a_mesh_goes_on_to_the_bit(tmp_path):
    options = {**RUN, "mesh": BOTH, "steps": 4}
    whole = models.train("gpt2-tiny", out=tmp_path / "whole", **options)
    models.train("gpt2-tiny", out=tmp_path / "cut", **{**options, "steps": 2})
    done = models.train("gpt2-tiny", out=tmp_path / "cut", **options)
    assert done.started_at == 2
    chex.assert_trees_all_equal(done.params, whole.params)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_several_hosts_take_the_step_that_is_documented():
    page = pathlib.Path(__file__).parents[1] / "docs" / "sharding.md"
    (code,) = re.findall(r"```python\n(import jax\n.*?)```", page.read_text(), re.S)
    # The same two hosts as the page's, small, and here.
    for published, small in (
        ('"llama-3.1-8b", mesh="fsdp=16"', '"llama-tiny", mesh="fsdp=8", seq=16'),
        ("jax.distributed.initialize()", "START"),
    ):
        assert published in code
        code = code.replace(published, small)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", code.replace("START", start)],
            env=flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for start in (
            f"jax.distributed.initialize('localhost:{port}', 2, {i})" for i in range(2)
        )
    ]
    said = [host.communicate(timeout=240) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    found = [re.findall(r"^\d+\.\d+$", out, re.M) for out, _ in said]
    assert found[0] == found[1] and len(found[0]) == 3
    assert float(found[0][-1]) < float(found[0][0])
