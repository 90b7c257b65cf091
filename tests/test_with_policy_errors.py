"""What `with_policy` refuses, and what it warns of."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import policies
from tests.helpers import saved_residuals
from tests.region_programs import (
    WS,
    X,
    block,
    unrolled,
)


def test_none_is_refused():
    with pytest.raises(policies.PolicyError, match="'nothing'"):
        remat.with_policy(block, None)  # pyright: ignore[reportArgumentType]


def test_no_region_is_an_error_that_says_how_to_make_one():
    with pytest.raises(remat.RegionError, match=r"no region.*jax\.checkpoint"):
        remat.with_policy(block, "save_dots")(WS[0], X)


def test_differentiated_function_is_refused():
    loss, args = unrolled()
    with pytest.raises(remat.RegionError, match=r"before jax\.grad"):
        remat.with_policy(jax.grad(loss), "save_dots")(*args)


def test_region_of_a_custom_vjp_is_refused():
    loss, args = unrolled()
    function = jax.custom_vjp(loss)
    function.defvjp(lambda *args: (loss(*args), args), lambda args, g: args)
    with pytest.raises(remat.RegionError, match="custom_vjp"):
        remat.with_policy(function, "save_dots")(*args)


def test_names_that_nothing_emits_are_an_error_with_near_matches():
    loss, args = unrolled()
    with pytest.raises(remat.NoNamesFound, match=r"emit: 'mid'.*mean 'mid'"):
        remat.with_policy(loss, policies.save_names("mid_"))(*args)


def test_names_that_nothing_emits_are_an_error_for_jax_policies():
    loss, args = unrolled()
    policy = jax.checkpoint_policies.save_only_these_names("mid_")
    with pytest.raises(remat.NoNamesFound, match="'mid'"):
        remat.with_policy(loss, policy)(*args)


def test_no_name_at_all_says_how_to_mark_one():
    def loss(x):
        return jax.checkpoint(jnp.sin)(x).sum()

    with pytest.raises(remat.NoNamesFound, match="checkpoint_name"):
        remat.with_policy(loss, policies.save_names("mid"))(X)


def test_some_names_missing_is_a_warning_at_the_users_line():
    loss, args = unrolled()
    changed = remat.with_policy(loss, policies.save_names("mid", "other"))
    with pytest.warns(remat.MissingNamesWarning, match="'other'") as caught:
        changed(*args)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(record=True) as repeated:
        warnings.simplefilter("default")
        for _ in range(3):
            changed(*args)
    assert len(repeated) == 1


def test_names_inside_a_custom_vjp_rule_count():
    @jax.custom_vjp
    def attention(w, x):
        return block(w, x)

    def forward(w, x):
        y, pull_back = jax.vjp(block, w, x)
        return checkpoint_name(y, "context"), pull_back

    attention.defvjp(forward, lambda pull_back, g: pull_back(g))

    def loss(w, x):
        return jax.checkpoint(lambda w, x: jnp.sin(attention(w, x)))(w, x).sum()

    changed = remat.with_policy(loss, policies.save_names("context"))
    expected = jax.grad(loss)(WS[0], X)
    chex.assert_trees_all_equal(jax.grad(changed)(WS[0], X), expected)
    assert "named 'context'" in saved_residuals(changed, WS[0], X)


def test_names_inside_a_rule_that_cannot_be_read_are_a_warning():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    @jax.custom_vjp
    def shifted(x):
        return jnp.sin(x) * (1 + jax.lax.axis_index("data"))

    def forward(x):
        return checkpoint_name(shifted(x), "context"), x

    def backward(x, g):
        return (g * jnp.cos(x) * (1 + jax.lax.axis_index("data")),)

    shifted.defvjp(forward, backward)
    spec = jax.sharding.PartitionSpec("data")
    apply = jax.shard_map(
        jax.checkpoint(shifted), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def loss(x):
        return (apply(x) ** 2).sum()

    changed = remat.with_policy(loss, policies.save_names("context"))
    # The rule needs the mesh axis, which only the shard_map around it knows.
    with pytest.warns(remat.MissingNamesWarning, match="could not be read"):
        actual = jax.grad(changed)(X)
    chex.assert_trees_all_equal(actual, jax.grad(loss)(X))
