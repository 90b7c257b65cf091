"""Plans of sharded steps: FSDP and tensor parallelism under automatic sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat

LAYERS, WIDTH, BATCH = 4, 256, 4096


def layer(x, w):
    hidden = jnp.sin(x @ w["up"])
    return x + jnp.tanh(hidden @ w["down"])


def loss(ws, x):
    body = jax.checkpoint(layer, prevent_cse=False)
    x, _ = jax.lax.scan(lambda h, w: (body(h, w), None), x, ws)
    return (x**2).mean()


def shapes(mesh, batch=BATCH):
    """Weights over both axes (FSDP on `data`, tensor parallelism on `model`)."""

    def weights(*axes):
        sharding = NamedSharding(mesh, PartitionSpec(None, *axes))
        shape = (LAYERS, WIDTH, 4 * WIDTH)
        if axes[0] == "model":
            shape = (LAYERS, 4 * WIDTH, WIDTH)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    ws = {"up": weights("data", "model"), "down": weights("model", "data")}
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return ws, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32, sharding=rows)


def ends(target, args):
    table = remat.compare(
        loss, *args, policies=["none", "nothing"], target=target, exact=True
    )
    return table["nothing"].peak_bytes, table["none"].peak_bytes


def planned(target, args):
    """A plan for a budget between the two ends."""
    least, most = ends(target, args)
    budget = int(least + 0.7 * (most - least))
    return remat.plan(loss, *args, budget=budget, target=target), least, most


@pytest.fixture(scope="module")
def on_eight():
    if jax.device_count() < 8:
        pytest.skip("needs 8 CPU devices (XLA_FLAGS of tests/conftest.py)")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    args = shapes(mesh)
    return planned("cpu", args), args


def test_figures_are_of_one_device(on_eight):
    (plan, least, most), _ = on_eight
    assert least < plan.peak_bytes <= plan.budget_bytes < most
    # A device holds an eighth of these, and three such values a layer.
    whole = LAYERS * BATCH * 4 * WIDTH * 4
    assert most < whole


def of_the_model(plan, policy):
    return next(one for one in plan.named if policy in one.policies)


def test_figures_of_the_model_are_of_one_device(on_eight):
    (plan, _, _), _ = on_eight
    forward = LAYERS * 2 * (2 * BATCH * WIDTH * 4 * WIDTH) / 8
    again = of_the_model(plan, "nothing").recompute_flops
    assert again == pytest.approx(forward, rel=0.02)
    assert plan.forward_flops == pytest.approx(forward, rel=0.02)
    # Of what is kept, a device holds an eighth.
    found = [kept for choice in plan.choices for kept in choice.kept]
    assert found
    for kept in found:
        assert kept.bytes == np.prod(kept.shape) * 4 / 8


def test_figures_inside_shard_map_are_of_one_device():
    if jax.device_count() < 8:
        pytest.skip("needs 8 CPU devices (XLA_FLAGS of tests/conftest.py)")
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    rows = PartitionSpec("data")

    def one_shard(w, x):
        return jax.lax.pmean((jax.checkpoint(layer)(x, w) ** 2).mean(), "data")

    whole = jax.shard_map(
        one_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows),
        out_specs=PartitionSpec(),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    w = {
        "up": jax.ShapeDtypeStruct(
            (WIDTH, 4 * WIDTH), jnp.float32, sharding=everywhere
        ),
        "down": jax.ShapeDtypeStruct(
            (4 * WIDTH, WIDTH), jnp.float32, sharding=everywhere
        ),
    }
    x = jax.ShapeDtypeStruct(
        (BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, rows)
    )
    plan = remat.plan(whole, w, x, budget="1GiB", target="cpu")
    forward = 2 * (2 * BATCH * WIDTH * 4 * WIDTH) / 8
    again = of_the_model(plan, "nothing").recompute_flops
    assert again == pytest.approx(forward, rel=0.02)
    assert plan.forward_flops == pytest.approx(forward, rel=0.02)


def test_gradients_stay_as_they_are_on_eight_devices(on_eight):
    (plan, _, _), args = on_eight
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda s: jax.device_put(
            rng.normal(0, 0.1, s.shape).astype(np.float32), s.sharding
        ),
        args,
    )
    wanted = jax.jit(jax.grad(loss))(*arrays)
    have = jax.jit(jax.grad(plan.apply(loss)))(*arrays)
    for name in wanted:
        np.testing.assert_allclose(have[name], wanted[name], rtol=2e-5, atol=1e-9)
        assert have[name].sharding.is_equivalent_to(wanted[name].sharding, 3)


@pytest.mark.slow
def test_a_pod_slice_that_is_not_here():
    target = remat.target("v5e:4x4")
    args = shapes(target.mesh((4, 4), ("data", "model")), batch=2**18)
    plan, least, most = planned(target, args)
    assert least <= plan.peak_bytes <= plan.budget_bytes < most
    assert plan.target == "v5e:4x4" and plan.n_compiles <= 8
