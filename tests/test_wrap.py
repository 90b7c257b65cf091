"""`remat.remat` on functions and callable pytrees."""

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import remat
from remat._wrap._hold import Static, StaticArgumentError, hold, release
from tests.helpers import stable_id


def block(w, x, train=False):
    h = checkpoint_name(jnp.sin(x @ w), "h")
    return jnp.tanh(h @ w) * (0.5 if train else 1.0)


W, X = jnp.eye(4) * 0.3, jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def regions_in(fn, *args, **kwargs):
    return remat.find_regions(fn, *args, **kwargs)


def saved_shapes(fn, *args):
    """Shapes of the floating-point values kept for the backward pass."""
    _, pull = jax.eval_shape(functools.partial(jax.vjp, fn), *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull))


# --- functions


@pytest.mark.parametrize("policy", ["nothing", "save_dots", "everything", "none"])
def test_values_and_gradients_are_those_without_a_region(policy):
    wrapped = remat.remat(block, policy=policy)
    expected = jax.value_and_grad(lambda w: block(w, X).sum())(W)
    chex.assert_trees_all_equal(
        jax.value_and_grad(lambda w: wrapped(w, X).sum())(W), expected
    )


@pytest.mark.parametrize(("policy", "count"), [("nothing", 1), ("none", 0)])
def test_makes_one_region_unless_the_policy_is_none(policy, count):
    assert len(regions_in(remat.remat(block, policy=policy), W, X)) == count


def test_policy_given_by_name_object_or_jax_callable_keeps_the_same():
    by_name = remat.remat(block, policy="save_dots")
    by_object = remat.remat(block, policy=remat.policies.save_dots)
    by_callable = remat.remat(block, policy=jax.checkpoint_policies.dots_saveable)
    sizes = [saved_shapes(fn, W, X) for fn in (by_name, by_object, by_callable)]
    assert sizes[0] == sizes[1] == sizes[2] != saved_shapes(remat.remat(block), W, X)


def test_policy_of_names_keeps_them():
    extra = set(saved_shapes(remat.remat(block, policy="everything"), W, X))
    kept = saved_shapes(remat.remat(block, policy=remat.policies.save_names("h")), W, X)
    assert len(kept) == len(saved_shapes(remat.remat(block), W, X)) + 1
    assert set(kept) <= extra


@pytest.mark.parametrize("policy", [None, "save_dotz", ["h"], 3])
def test_wrong_policy_raises_when_wrapping(policy):
    with pytest.raises(remat.policies.PolicyError):
        remat.remat(block, policy=policy)


def test_policy_that_names_what_nothing_emits_raises_with_the_near_name():
    wrapped = remat.remat(block, policy=remat.policies.save_names("hh"))
    with pytest.raises(ValueError, match="'h'"):
        wrapped(W, X)


def test_policy_of_which_some_names_exist_warns():
    wrapped = remat.remat(block, policy=remat.policies.save_names("h", "other"))
    with pytest.warns(UserWarning, match="other"):
        wrapped(W, X)


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        (remat.policies.save(remat.policies.larger_than(32)), 0),
        (remat.policies.save(remat.policies.larger_than(31)), 3),
        ({"*": remat.policies.save_names("h")}, 1),
        ({"*": "nothing"}, 0),
    ],
    ids=stable_id,
)
def test_policies_that_jax_alone_cannot_apply(policy, extra):
    kept = saved_shapes(remat.remat(block, policy=policy), W, X)
    assert len(kept) == len(saved_shapes(remat.remat(block), W, X)) + extra


def test_policy_by_layer_needs_the_whole_program():
    by_layer = remat.policies.layers(["nothing", "save_dots"])
    with pytest.raises(remat.policies.PolicyError, match="sees one module at a time"):
        remat.remat(block, policy=by_layer)


def test_with_policy_changes_what_remat_made():
    wrapped = remat.remat(block, policy=remat.policies.save_names("h"))
    changed = remat.with_policy(wrapped, "save_dots")
    expected = saved_shapes(remat.remat(block, policy="save_dots"), W, X)
    assert saved_shapes(changed, W, X) == expected


def test_keeps_name_and_signature():
    assert remat.remat(block).__name__ == "block"
    assert inspect.signature(remat.remat(block)) == inspect.signature(block)


def test_traces_a_repeated_call_once():
    calls = []

    @functools.partial(remat.remat, policy="save_dots")
    def counted(x, flag, scale):
        calls.append(flag)
        return x * scale if flag else x

    for _ in range(3):
        counted(X, True, scale=2)
    counted(X, False, scale=2)
    counted(X, True, scale=2.0)
    assert calls == [True, False, True]


# --- arguments that are not arrays


ODD_VALUES = [True, "relu", None, jnp.tanh, 3, 2.5, jnp.float32, (1, "a"), {"k": True}]


@pytest.mark.parametrize("value", ODD_VALUES, ids=stable_id)
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_values_that_are_no_arrays_arrive_and_return_as_given(value, by):
    def fn(x, option):
        return jnp.sin(x), option

    args, kwargs = ((X, value), {}) if by == "position" else ((X,), {"option": value})
    _, back = remat.remat(fn)(*args, **kwargs)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("train", [True, False])
def test_flag_passed_by_position_or_keyword(train):
    wrapped = remat.remat(block, static_argnames="train")
    expected = block(W, X, train)
    chex.assert_trees_all_equal(wrapped(W, X, train), expected)
    chex.assert_trees_all_equal(wrapped(W, X, train=train), expected)
    chex.assert_trees_all_equal(wrapped(x=X, train=train, w=W), expected)


def test_traced_value_for_a_static_argument_names_argument_and_function():
    wrapped = jax.jit(remat.remat(block, static_argnames=("train",)))
    with pytest.raises(
        StaticArgumentError, match=r"block: argument 'train' .*bool\[\]"
    ):
        wrapped(W, X, True)


def test_traced_flag_that_was_not_named_is_named_by_the_error():
    wrapped = jax.jit(remat.remat(block))
    with pytest.raises(StaticArgumentError, match=r"block: .*'train' \(bool\[\]\)"):
        wrapped(W, X, True)


def test_trace_error_without_a_scalar_argument_is_left_alone():
    wrapped = remat.remat(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        wrapped(X)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, np.ones(2)], ids=stable_id)
def test_static_argument_without_a_hash_is_named(value):
    wrapped = remat.remat(lambda x, axes: x, static_argnames="axes")
    with pytest.raises(StaticArgumentError, match=r"'axes' is static.*hashable"):
        wrapped(X, value)


def test_unknown_static_name_raises_with_the_near_one():
    with pytest.raises(ValueError, match="no argument 'trian'; did you mean 'train'"):
        remat.remat(block, static_argnames="trian")


def test_variadic_arguments_are_held_by_name():
    def fn(x, *rest, **options):
        return x * (2 if options["double"] else 1), rest

    wrapped = remat.remat(fn, static_argnames=("rest", "double"))
    doubled, rest = wrapped(X, "a", (1, 2), double=True)
    chex.assert_trees_all_equal(doubled, X * 2)
    assert rest == ("a", (1, 2))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        ("a", "a", True),
        ([1], [1], False),
    ],
)
def test_held_values_compare_by_kind_and_value(a, b, same):
    assert (Static(a) == Static(b)) is same


def test_release_undoes_hold():
    tree = {"a": (X, "s", None), "b": [True, 2, jnp.sin]}
    assert release(hold(tree))["b"] == tree["b"]
    assert jax.tree.leaves(hold(tree)) == [X]


# --- what the region is made of


class Layer(eqx.Module):
    weight: jax.Array
    activation: Callable[..., jax.Array]

    def __call__(self, x):
        return self.activation(x @ self.weight)

    def twice(self, x, flag=True):
        return self(self(x)) if flag else x


LAYER = Layer(W, jnp.tanh)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (LAYER, (X,)),
        (LAYER.twice, (X, True)),
        (functools.partial(block, W), (X,)),
        (functools.partial(block, train=True), (W, X)),
        (jax.tree_util.Partial(block, W), (X,)),
        (Layer.twice, (LAYER, X)),
        (jax.jit(block), (W, X)),
    ],
    ids=["module", "method", "partial", "partial kw", "Partial", "unbound", "jit"],
)
def test_callables_of_every_kind_pass_their_arrays_as_inputs(target, args):
    wrapped = remat.remat(target)
    chex.assert_trees_all_close(wrapped(*args), target(*args))
    (region,) = regions_in(lambda: wrapped(*args))
    assert len(region.eqn.invars) == 2  # the weight and x
    assert not region.jaxpr.constvars


def test_gradient_reaches_the_arrays_of_a_callable_pytree():
    def loss(layer):
        return remat.remat(layer.twice)(X).sum()

    expected = eqx.filter_grad(lambda layer: layer.twice(X).sum())(LAYER)
    chex.assert_trees_all_equal(eqx.filter_grad(loss)(LAYER).weight, expected.weight)


@pytest.mark.parametrize("target", [3, object(), Layer, dict])
def test_what_cannot_be_wrapped_is_refused(target):
    with pytest.raises(TypeError, match=r"remat\.remat takes a function"):
        remat.remat(target)


def test_closure_over_a_traced_value():
    grad = jax.grad(lambda w: remat.remat(lambda x: jnp.sin(x * w))(1.0))(2.0)
    assert grad == jax.grad(lambda w: jnp.sin(w))(2.0)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.hessian(f),
        lambda f: jax.jacfwd(f),
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2),
    ],
    ids=["hessian", "jacfwd", "vmap of grad", "jvp", "scan"],
)
def test_under_transformations(transform):
    def fn(x):
        return jnp.sin(jnp.sin(x) @ W)

    chex.assert_trees_all_close(
        transform(remat.remat(fn))(X), transform(fn)(X), rtol=1e-6
    )


def test_integers_keys_and_masks_pass_through():
    def fn(x, i, mask, key):
        return jnp.where(mask, x[i], 0.0).sum() + jax.random.normal(key), i + 1

    args = (jnp.ones(4), jnp.array([1, 2]), np.array([True, False]), jax.random.key(0))
    value, grads = jax.value_and_grad(remat.remat(fn), has_aux=True)(*args)
    expected = jax.value_and_grad(fn, has_aux=True)(*args)
    chex.assert_trees_all_equal((value, grads), expected)


def test_while_loop_is_refused_by_jax_as_without_a_region():
    loop = remat.remat(
        lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: jnp.sin(c) + 9, x)
    )
    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(loop)(1.0)


# --- the barrier against common-subexpression elimination


def test_prevents_cse_in_a_straight_line_and_in_a_users_scan():
    def loss(w, x):
        layer = remat.remat(block)
        x = layer(w, x)
        return jax.lax.scan(lambda h, _: (layer(w, h), None), x, None, length=3)[0]

    assert [r.prevent_cse for r in regions_in(loss, W, X)] == [True, True]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_explicit_prevent_cse_is_obeyed(prevent_cse):
    (region,) = regions_in(remat.remat(block, prevent_cse=prevent_cse), W, X)
    assert region.prevent_cse is prevent_cse


def test_prevent_cse_must_be_a_choice():
    wrong: Any = "yes"
    with pytest.raises(ValueError, match="'auto', got 'yes'"):
        remat.remat(block, prevent_cse=wrong)


# --- jax_remat3, and what importing costs


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="jax 0.12 and later")
@pytest.mark.parametrize("policy", ["nothing", "save_dots", "everything"])
def test_keeps_the_same_with_remat3_on(policy):
    wrapped = remat.remat(block, policy=policy)
    expected = saved_shapes(wrapped, W, X)
    jax.config.update("jax_remat3", True)
    try:
        assert saved_shapes(remat.remat(block, policy=policy), W, X) == expected
    finally:
        jax.config.update("jax_remat3", False)


def test_importing_and_wrapping_a_function_does_not_import_flax():
    code = (
        "import sys, remat; f = remat.remat(lambda x, flag: x, static_argnames='flag');"
        "f(1.0, flag=True); sys.exit('flax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- effects and control flow


@pytest.mark.parametrize("remat3", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_run_in_both_passes(ordered, remat3):
    if remat3 and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("no jax_remat3")
    calls = []

    def noisy(x):
        jax.debug.callback(lambda x: calls.append(float(x)), x, ordered=ordered)
        return jnp.sin(jnp.sin(x))

    if remat3:
        jax.config.update("jax_remat3", True)
    try:
        jax.jit(jax.grad(remat.remat(noisy)))(2.0)
        jax.effects_barrier()
    finally:
        if remat3:
            jax.config.update("jax_remat3", False)
    assert calls == [2.0, 2.0]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("remat3", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [remat.remat, lambda fn: remat.with_policy(jax.checkpoint(fn), "save_dots")],
    ids=["remat", "with_policy"],
)
def test_error_about_an_io_callback_names_its_line(wrap, ordered, remat3, jitted):
    if remat3 and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("no jax_remat3")

    def noisy(x):
        io_callback(print, None, jax.lax.stop_gradient(x), ordered=ordered)
        return jnp.sin(jnp.sin(x))

    line = noisy.__code__.co_firstlineno + 1
    grad = jax.grad(wrap(noisy))
    if remat3:
        jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(
            NotImplementedError, match=rf"called at test_wrap.py:{line}"
        ):
            (jax.jit(grad) if jitted else grad)(2.0)
    finally:
        if remat3:
            jax.config.update("jax_remat3", False)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x),
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.exp, x),
        lambda x: jax.nn.relu(jax.nn.silu(x)),
        lambda x: jax.lax.scan(lambda c, _: (c * 2.0, None), x, None, length=2)[0],
        lambda x: jax.lax.stop_gradient(x) * x,
    ],
    ids=["fori", "cond", "custom_jvp", "scan", "stop_gradient"],
)
@pytest.mark.parametrize("policy", ["nothing", "save_dots"])
def test_control_flow_inside(body, policy):
    def loss(fn):
        return jax.grad(lambda x: fn(x).sum())(X)

    chex.assert_trees_all_close(loss(remat.remat(body, policy)), loss(body), rtol=1e-6)
