"""What policies really keep: JAX's residuals, as exact lists, and gradients."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import policies
from tests.helpers import saved_residuals, stable_id

JAX = jax.checkpoint_policies
HAS_REMAT3 = jax.__version_info__ >= (0, 12)
REGISTERED = [policies.get(name) for name in policies.names()]
PLAIN = [policy for policy in REGISTERED if not policy.needs_binding]


def block(weights, x):
    """A transformer block with MaxText's names; T x T scores are batched products."""
    x = checkpoint_name(x, "decoder_layer_input")
    q, k, v = (
        checkpoint_name(x @ weight, name)
        for weight, name in zip(
            weights[:3], ("query_proj", "key_proj", "value_proj"), strict=True
        )
    )
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
    context = checkpoint_name(jnp.einsum("bts,bsd->btd", scores, v), "context")
    h = x + checkpoint_name(context @ weights[3], "out_proj")
    up = checkpoint_name(h @ weights[4], "mlpwi")
    return jnp.sin(h + checkpoint_name(jax.nn.gelu(up) @ weights[5], "mlpwo"))


def block_args():
    keys = jax.random.split(jax.random.key(0), 7)
    weights = [jax.random.normal(key, (4, 4)) for key in keys[:6]]
    return weights, jax.random.normal(keys[6], (2, 3, 4))


def named(*names):
    return sorted(f"named '{name}'" for name in names)


QKV = ("query_proj", "key_proj", "value_proj")
KEPT = {
    "nothing": [],
    "full": [],
    "save_dots": ["output of dot_general"] * 8,
    "save_dots_no_batch": ["output of dot_general"] * 6,
    "offload_dots": ["host output of device_put"] * 8,
    "offload_dots_no_batch": ["host output of device_put"] * 6,
    "minimal": named(*QKV, "out_proj", "mlpwi", "mlpwo"),
    "minimal_with_context": named(*QKV, "context", "out_proj", "mlpwi", "mlpwo"),
    "save_dot_with_context_except_mlp": named(*QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": named(*QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": named(*QKV, "out_proj"),
    "save_qkv_proj": named(*QKV),
    "save_out_proj": named("out_proj"),
    "qkv_proj_offloaded": ["host output of device_put"] * 3,
    "minimal_offloaded": ["host output of device_put"] * 6,
    "save_context": named("context"),
    "save_encoded_and_out_proj": named("context", "out_proj"),
    "save_dot_for_mlperf_200b": named(*QKV, "context", "out_proj"),
    "axlearn_context": named("context"),
    "axlearn_input": named("decoder_layer_input"),
    "torchtitan_compute_ops": ["output of dot_general"] * 8,
}


@pytest.mark.parametrize("name", KEPT)
def test_keeps_exactly(name):
    region = jax.checkpoint(block, policy=policies.get(name))
    assert saved_residuals(region, *block_args()) == KEPT[name]


def _made_by_jax(save, offload=()):
    return JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )


@pytest.mark.parametrize(
    ("ours", "jaxs"),
    [
        (policies.everything, JAX.everything_saveable),
        (policies.nothing, JAX.nothing_saveable),
        (policies.save_dots, JAX.dots_saveable),
        (policies.save_dots_no_batch, JAX.dots_with_no_batch_dims_saveable),
        (
            policies.offload_dots_no_batch,
            JAX.offload_dot_with_no_batch_dims("device", "pinned_host"),
        ),
        (
            policies.save_names("context", "mlpwi"),
            JAX.save_only_these_names("context", "mlpwi"),
        ),
        (policies.nothing, JAX.save_only_these_names()),
        (
            policies.save_any_names_but("mlpwi"),
            JAX.save_any_names_but_these("mlpwi"),
        ),
        (
            policies.save_and_offload_names(["context"], ["mlpwi"]),
            _made_by_jax(["context"], ["mlpwi"]),
        ),
        (
            policies.save_dots | policies.save_names("context"),
            JAX.save_from_both_policies(
                JAX.dots_saveable, JAX.save_only_these_names("context")
            ),
        ),
    ],
    ids=stable_id,
)
def test_jax_policies_become_ours_and_keep_the_same(ours, jaxs):
    assert policies.as_policy(jaxs) == ours
    kept = saved_residuals(jax.checkpoint(block, policy=ours), *block_args())
    assert kept == saved_residuals(jax.checkpoint(block, policy=jaxs), *block_args())


def test_a_callable_decides_as_it_did():
    def by_hand(primitive, *in_avals, **params):
        return primitive is jax.lax.dot_general_p and in_avals[0].ndim == 2

    def loss(weights, x):
        return block(weights, x) @ weights[0]

    kept = [
        saved_residuals(jax.checkpoint(loss, policy=policy), *block_args())
        for policy in (by_hand, policies.as_policy(by_hand))
    ]
    assert kept[0] == kept[1]
    asked = policies.as_policy(lambda primitive, *_, **__: primitive.name == "exp")
    assert asked.decide(policies.Value(primitive="exp")) is policies.Decision.SAVE


def test_ours_stand_in_jaxs_combinators():
    both = JAX.save_from_both_policies(policies.save_dots, policies.save_context)
    kept = saved_residuals(jax.checkpoint(block, policy=both), *block_args())
    ours = policies.save_dots | policies.save_context
    assert kept == saved_residuals(jax.checkpoint(block, policy=ours), *block_args())


def test_one_policy_saves_dots_offloads_one_and_saves_another():
    policy = (
        policies.save_dots_no_batch
        | policies.offload_names("decoder_layer_input")
        | policies.save_names("context")
    )
    kept = saved_residuals(jax.checkpoint(block, policy=policy), *block_args())
    assert kept == sorted(
        [
            "host output of device_put",
            "named 'context'",
            *["output of dot_general"] * 6,
        ]
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = checkpoint_name(nn.Dense(8, name="wi")(x), "mlpwi")
        return x + jnp.sin(checkpoint_name(nn.Dense(4, name="wo")(up), "mlpwo"))


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (policies.minimal, named("mlpwi", "mlpwo")),
        (policies.save_dots, ["output of dot_general"] * 2),
        (policies.offload_dots, ["host output of device_put"] * 2),
    ],
    ids=stable_id,
)
def test_linen_takes_a_policy(policy, kept):
    module, x = nn.remat(Block, policy=policy)(), jnp.ones((3, 4))
    variables = module.init(jax.random.key(0), x)
    assert saved_residuals(module.apply, variables, x) == kept


def route(weights, x):
    """The router of a mixture of experts: the choice is an integer."""
    gates, chosen = jax.lax.top_k(x @ weights[0], 1)
    return jnp.sin(gates * weights[1][chosen[..., 0]])


def test_transformer_policies_keep_the_routing_of_the_forward_pass():
    kept = saved_residuals(
        jax.checkpoint(route, policy=policies.minimal), *block_args()
    )
    assert "output of top_k" in kept
    by_jax = JAX.save_only_these_names(*policies.minimal.checkpoint_names)
    assert "output of top_k" not in saved_residuals(
        jax.checkpoint(route, policy=by_jax), *block_args()
    )


# Case: JAX's own exclusion policy keeps what it was told to leave out.


def excluded(x, w):
    big = checkpoint_name(jnp.sin(x @ w), "big_dont_save")
    return jnp.sin(big).sum()


def test_exclusion_leaves_the_named_value_out_under_either_name():
    args = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    region = jax.checkpoint(excluded)
    policy = policies.save_anything_except_names("big_dont_save")
    kept = saved_residuals(remat.with_policy(region, policy), *args)
    assert kept == ["named 'remat.save:dot_general'"]
    by_jax = JAX.save_anything_except_these_names("big_dont_save")
    kept = saved_residuals(jax.checkpoint(excluded, policy=by_jax), *args)
    assert kept == ["output of cos"] * 2, "JAX's keeps all, as everything_saveable"


def test_a_dots_policy_leaves_a_named_dot_out():
    def fn(x, w):
        return jnp.sin(checkpoint_name(x @ w, "a") @ w).sum()

    args = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    policy = policies.save_dots - policies.named("a")
    kept = saved_residuals(remat.with_policy(jax.checkpoint(fn), policy), *args)
    assert kept == ["named 'remat.save:dot_general.2'"]


# Case: None, nothing, everything and names; naming the carry.


def scanned(policy, where=None):
    def body(carry, weight):
        if where == "in":
            carry = checkpoint_name(carry, "r")
        carry = carry + jnp.tanh(jnp.sin(carry @ weight))
        if where == "out":
            carry = checkpoint_name(carry, "r")
        return carry, None

    region = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return lambda weights, x: (jax.lax.scan(region, x, weights)[0] ** 2).sum()


def _stacked(policy, where=None):
    """Shapes of the residuals that scan stacks, one for each layer."""
    args = (jnp.ones((3, 4, 4)), jnp.ones((2, 4)))
    backward = jax.eval_shape(lambda *a: jax.vjp(scanned(policy, where), *a)[1], *args)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    return sorted(shape for shape in shapes if shape[:1] == (3,) and shape != (3, 4, 4))


def test_nothing_is_none_and_naming_the_carry_adds_nothing():
    carries = [(3, 2, 4)]
    assert _stacked(None) == carries
    assert _stacked(policies.nothing) == carries
    assert _stacked(policies.save_names("r"), "out") == carries
    # The named copy takes the carry's place: the carry is saved either way.
    assert _stacked(policies.save_names("r"), "in") in (carries, carries * 2)
    assert len(_stacked(policies.everything)) > 1


# Case: the same under both implementations of jax.checkpoint.


@pytest.fixture
def remat3():
    if not HAS_REMAT3:
        pytest.skip("jax_remat3 asks user policies from jax 0.12 on")
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


SAME_UNDER_REMAT3 = {p.rule: p for p in PLAIN if p.remat3_ignores is not None}


@pytest.mark.parametrize("policy", SAME_UNDER_REMAT3.values(), ids=stable_id)
def test_keeps_the_same_under_remat3(policy, remat3):
    del remat3
    kept = saved_residuals(jax.checkpoint(block, policy=policy), *block_args())
    jax.config.update("jax_remat3", False)
    before = saved_residuals(jax.checkpoint(block, policy=policy), *block_args())
    assert kept == before


def test_policies_say_what_remat3_ignores():
    assert policies.save_dots.remat3_ignores == {"scaled_matmul_wrapper"}
    assert policies.save_qkv_proj.remat3_ignores == {
        "top_k",
        "approx_top_k",
        "argmax",
        "argmin",
        "sort",
    }
    assert policies.save_names("a").remat3_ignores == set()
    assert policies.everything.remat3_ignores is None
    assert (~policies.save_dots).remat3_ignores is None


# Case: values are the same under every policy, eager and jitted, offload included.


def _loss(policy):
    region = jax.checkpoint(block, policy=policy)
    return lambda weights, x: (region(weights, x) ** 2).sum()


def _plain_gradients(args):
    return jax.grad(lambda weights, x: (block(weights, x) ** 2).sum())(*args)


def _one_for_each_set_of_residuals():
    kept = {}
    for policy in PLAIN:
        region = jax.checkpoint(block, policy=policy)
        kept[tuple(saved_residuals(region, *block_args()))] = policy
    return kept.values()


def test_gradients_are_the_same_under_every_policy_eager():
    args = block_args()
    # A jitted function inside (gelu) is compiled in two parts where a region divides
    # it, and then rounds otherwise; without, every operation runs by itself.
    with jax.disable_jit():
        plain = _plain_gradients(args)
        for policy in _one_for_each_set_of_residuals():
            chex.assert_trees_all_equal(jax.grad(_loss(policy))(*args), plain)


@pytest.mark.parametrize(
    "policy",
    [
        policies.nothing,
        policies.save_dots,
        policies.offload_dots,
        policies.offload_dots_no_batch,
        policies.minimal_offloaded,
        policies.save_dots_no_batch | policies.offload_names("context"),
    ],
    ids=stable_id,
)
def test_gradients_are_the_same_jitted(policy):
    args = block_args()
    plain = _plain_gradients(args)
    grads = jax.jit(jax.grad(_loss(policy)))(*args)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    chex.assert_trees_all_close(grads, plain, atol=1e-5 * largest, rtol=0)


def _scanned_loss(policy):
    region = jax.checkpoint(
        lambda x, w: (jnp.sin(checkpoint_name(x @ w, "mlpwi")), None), policy=policy
    )
    return lambda x, weights: (jax.lax.scan(region, x, weights)[0] ** 2).sum()


@pytest.mark.parametrize(
    "policy",
    [policies.save_dots, policies.minimal, policies.minimal_offloaded],
    ids=stable_id,
)
def test_gradients_are_the_same_under_scan_and_vmap(policy):
    xs, weights = jnp.linspace(-1, 1, 16).reshape(2, 2, 4), jnp.ones((3, 4, 4)) / 4
    kept, plain = (
        jax.vmap(jax.grad(_scanned_loss(policy), argnums=1), (0, None))(xs, weights)
        for policy in (policy, policies.everything)
    )
    chex.assert_trees_all_close(kept, plain, rtol=1e-5)


# With offload jax 0.12 raises on this program: a cotangent stays on the host.
@pytest.mark.parametrize("policy", [policies.save_dots], ids=stable_id)
def test_second_derivatives_are_the_same(policy):
    x, weights = jnp.linspace(-1, 1, 8).reshape(2, 4), jnp.ones((3, 4, 4)) / 4

    def slope(policy):
        return lambda x: jax.grad(_scanned_loss(policy))(x, weights).sum()

    kept, plain = (jax.grad(slope(p))(x) for p in (policy, policies.everything))
    chex.assert_trees_all_close(kept, plain, rtol=1e-5)


def test_every_second_product_with_weights_is_counted_among_those():
    policy = policies.save(policies.every_nth(policies.dots_no_batch(), 2, start=1))
    region = remat.with_policy(jax.checkpoint(block), policy)
    kept = saved_residuals(region, *block_args())
    # Products are query, key, value, scores, context, output, up and down; with
    # weights are all but scores and context: kept are key, output and down.
    assert kept == [
        "named 'remat.save:dot_general.2'",
        "named 'remat.save:dot_general.6'",
        "named 'remat.save:dot_general.8'",
    ]


# Case: dimension numbers do not tell an expert's product from attention's.


def experts(weights, x):
    """Attention and a mixture of experts: every product but the last is batched."""
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x + 1, x + 2))
    context = jnp.einsum("bts,bsd->btd", scores, jnp.sin(x))
    up = jnp.einsum("etd,edf->etf", context, weights["wi"].astype(x.dtype))
    down = jnp.einsum("etf,edf->etd", jnp.sin(up), weights["wo"])
    return jnp.sin(down) @ weights["out"]


def expert_args():
    weights = {"wi": jnp.ones((2, 4, 5)), "wo": jnp.ones((2, 4, 5))}
    return {**weights, "out": jnp.ones((4, 4))}, jnp.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("policy", "n_kept"),
    [
        (policies.save_dots, 4),
        (policies.save_dots_no_batch, 0),
        (policies.save_dots_with_weights, 2),
        (policies.offload_dots_with_weights, 2),
    ],
    ids=stable_id,
)
def test_products_with_weights_are_those_of_experts_too(policy, n_kept):
    region = remat.with_policy(jax.checkpoint(experts), policy)
    kept = saved_residuals(region, *expert_args())
    assert len(kept) == n_kept
    assert all(residual.startswith("host ") for residual in kept) == (
        policy.offloads or not kept
    )


def test_products_with_weights_in_a_dense_block_are_the_unbatched_ones():
    kept = {
        policy: saved_residuals(
            remat.with_policy(jax.checkpoint(block), policy), *block_args()
        )
        for policy in (policies.save_dots_no_batch, policies.save_dots_with_weights)
    }
    n_kept = [len(residuals) for residuals in kept.values()]
    assert n_kept == [6, 6]


def test_patterns_that_no_name_fits_are_an_error():
    region = jax.checkpoint(block)
    kept = saved_residuals(remat.with_policy(region, "axlearn_context"), *block_args())
    assert kept == named("context")
    for policy in ("axlearn_qkv_proj", policies.haliax_offload):
        with pytest.raises(
            ValueError, match=r"no region emits one that fits.*'context'"
        ):
            saved_residuals(remat.with_policy(region, policy), *block_args())


def test_module_rules_work_on_models_without_names():
    def fn(x):
        return jnp.sin(jnp.sin(x)).sum()

    region = remat.with_policy(jax.checkpoint(fn), "megatron_core_attn")
    assert saved_residuals(region, jnp.ones(3)) != []


# Case: an operation of several results, each of a size of its own.


def test_a_size_is_that_of_one_result_and_not_of_all_its_equation_makes():
    def fn(x):
        values, places = jax.lax.top_k(jnp.sin(x), 3)  # 3 x 4 bytes each, 24 together
        return jnp.sin(values) @ jnp.sin(x[places])

    def kept(policy):
        region = remat.with_policy(jax.checkpoint(fn), policy)
        found = remat.residuals(region, jnp.ones(5))
        return sorted((r.dtype, r.bytes) for r in found if r.primitive == "top_k")

    of_top_k = policies.primitive("top_k")
    both = [("float32", 12), ("int32", 12)]
    for size, expected in ((11, both), (12, []), (23, [])):
        chosen = policies.save(of_top_k & policies.larger_than(size))
        assert kept(chosen) == expected
    assert kept(policies.save(of_top_k & policies.dtype("int32"))) == both[1:]
    assert kept(policies.keras_larger_than(12) & policies.save(of_top_k)) == both
