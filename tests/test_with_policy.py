"""`with_policy`: another policy from outside, the same values and gradients."""

import functools
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import remat
from remat import policies
from tests.helpers import saved_residuals, stable_id
from tests.region_programs import (
    PROGRAMS,
    WS,
    X,
    block,
    custom_jvp,
    jitted_inside,
    layer,
    nested,
    scanned,
    unrolled,
)


def assert_within(actual, expected, tolerance: float) -> None:
    """Leaves equal within a share of each expected leaf's largest entry."""

    def check(a, e) -> None:
        atol = tolerance * float(jnp.abs(e.astype(jnp.float32)).max())
        chex.assert_trees_all_close(a, e, rtol=0, atol=atol)

    jax.tree.map(check, actual, expected)


# --- values and gradients


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_eager_gradients_are_bit_equal(program):
    loss, args = program()
    expected = jax.value_and_grad(loss)(*args)
    actual = jax.value_and_grad(remat.with_policy(loss, "save_dots"))(*args)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "nothing",
        "everything",
        "offload_dots",
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ],
    ids=stable_id,
)
@pytest.mark.parametrize(
    "program", [unrolled, scanned, nested], ids=lambda p: p.__name__
)
def test_eager_gradients_are_bit_equal_under_every_policy(program, policy):
    loss, args = program()
    expected = jax.value_and_grad(loss)(*args)
    actual = jax.value_and_grad(remat.with_policy(loss, policy))(*args)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_jitted_gradients_agree(program):
    loss, args = program()
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    actual = jax.jit(jax.value_and_grad(remat.with_policy(loss, "none")))(*args)
    assert_within(actual, expected, 1e-5)


def test_bfloat16_gradients_agree():
    loss, args = scanned()
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args)
    expected = jax.jit(jax.grad(loss))(*args)
    actual = jax.jit(jax.grad(remat.with_policy(loss, "none")))(*args)
    assert_within(actual, expected, 1e-2)


# --- what is kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("nothing", []),
        ("save_dots", ["output of dot_general"] * 6),
        (policies.save_names("mid"), ["named 'mid'"] * 3),
        ({"block": policies.save_names("mid")}, ["named 'mid'"] * 3),
    ],
    ids=stable_id,
)
def test_policy_decides_what_is_kept(policy, kept):
    loss, args = unrolled()
    residuals = saved_residuals(remat.with_policy(loss, policy), *args)
    # The layers' inputs are kept under any policy; slices and sums make them.
    inside = ("dot_general", "named", "sin", "cos", "tanh")
    assert [r for r in residuals if any(word in r for word in inside)] == kept


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_none_leaves_no_region(program):
    loss, args = program()
    assert remat.find_regions(loss, *args)
    assert remat.find_regions(remat.with_policy(loss, "none"), *args) == ()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_region_gets_the_policy(program):
    loss, args = program()
    changed = remat.find_regions(remat.with_policy(loss, "save_dots"), *args)
    assert len(changed) == len(remat.find_regions(loss, *args))
    assert {region.policy for region in changed} == {policies.save_dots}


def test_custom_jvp_rule_gets_the_policy_too():
    @jax.custom_jvp
    def function(w, x):
        return layer(w, x)

    function.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))

    def loss(w, x):
        return function(w, x).sum()

    def n_kept(policy):
        return len(saved_residuals(remat.with_policy(loss, policy), WS[0], X))

    assert n_kept("nothing") < n_kept("save_dots") < n_kept("everything")


def test_last_policy_counts():
    loss, args = unrolled()
    twice = remat.with_policy(remat.with_policy(loss, "save_dots"), "nothing")
    assert {r.policy for r in remat.find_regions(twice, *args)} == {policies.nothing}


def test_last_policy_counts_where_values_are_marked():
    def n_kept(*given):
        changed = loss
        for policy in given:
            changed = remat.with_policy(changed, policy)
        return len(saved_residuals(changed, *args))

    loss, args = unrolled()
    large = policies.save(policies.larger_than(1))
    dots = policies.save(policies.dots() & policies.larger_than(1))
    assert n_kept("nothing") < n_kept(dots) < n_kept(large)
    for last in (dots, "nothing", "save_dots"):
        for first in (dots, large):
            assert n_kept(first, large, last) == n_kept(last)


# --- policies by pattern and by layer


def named_layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.checkpoint(block)(w, x)
    return (x**2).sum()


def test_mapping_gives_each_region_its_own():
    mapping = {"layer_0/*": "save_dots", "layer_1/*": "none"}
    changed = remat.find_regions(remat.with_policy(named_layers, mapping), WS, X)
    assert [(r.path, r.policy) for r in changed] == [
        ("layer_0/block", policies.save_dots),
        ("layer_2/block", None),  # matched by no pattern: as it was
    ]


def test_first_matching_pattern_counts():
    mapping = {"layer_1/*": "everything", "*": "save_dots"}
    changed = remat.find_regions(remat.with_policy(named_layers, mapping), WS, X)
    assert [str(r.policy) for r in changed] == ["save_dots", "everything", "save_dots"]


def test_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(remat.RegionError, match=r"'layer_9/\*'.*'layer_0/block'"):
        remat.with_policy(named_layers, {"layer_9/*": "save_dots"})(WS, X)


def test_shared_jaxpr_can_get_two_policies():
    inner = jax.jit(layer)

    def loss(w, x):
        with jax.named_scope("first"):
            x = inner(w, x)
        with jax.named_scope("second"):
            return inner(w, x).sum()

    changed = remat.with_policy(loss, {"first/*": "save_dots", "second/*": "none"})
    regions = remat.find_regions(changed, WS[0], X)
    assert [(r.path, r.policy) for r in regions] == [
        ("first/block", policies.save_dots)
    ]


def test_policy_by_layer():
    policy = policies.first_layers(1, "save_dots", "nothing")
    changed = remat.find_regions(remat.with_policy(named_layers, policy), WS, X)
    assert [r.policy == policies.save_dots for r in changed] == [True, False, False]


def test_policy_that_jax_alone_cannot_apply():
    loss, args = scanned()
    policy = policies.save(policies.larger_than(1))
    assert policy.needs_binding
    changed = remat.with_policy(loss, policy)
    expected = jax.value_and_grad(loss)(*args)
    chex.assert_trees_all_equal(jax.value_and_grad(changed)(*args), expected)
    (region,) = remat.find_regions(changed, *args)
    assert region.n_equations > remat.find_regions(loss, *args)[0].n_equations

    (plain,) = remat.find_regions(
        remat.with_policy(loss, policies.save(policies.larger_than(10**9))), *args
    )
    assert plain.emitted_names == ("mid",)  # nothing is that large: nothing is kept


def test_nested_regions_are_marked_once():
    loss, args = nested()
    changed = remat.with_policy(loss, policies.save(policies.larger_than(1)))
    expected = jax.value_and_grad(loss)(*args)
    chex.assert_trees_all_equal(jax.value_and_grad(changed)(*args), expected)
    outer, *inner = remat.find_regions(changed, *args)
    assert [region.policy for region in inner] == [outer.policy] * 2
    marks = re.findall(r"name=(remat\.save:\S+)\]", str(outer.jaxpr))
    assert len(marks) == len(set(marks)) > 0


def test_policy_that_reads_the_path_of_a_shared_jaxpr():
    inner = jax.jit(layer)

    def loss(w, x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = inner(w, x)
        return x.sum()

    by_path = policies.as_policy({"first/*": "save_dots", "*": "nothing"})
    changed = remat.with_policy(loss, by_path | policies.save(policies.dtype("int32")))
    first, second = remat.find_regions(changed, WS[0], X)
    assert "remat.save:dot_general" in first.emitted_names
    assert second.emitted_names == ("mid",)


def test_policy_that_jax_alone_cannot_apply_is_refused_in_a_rule():
    loss, args = custom_jvp()
    changed = remat.with_policy(loss, policies.save(policies.larger_than(1)))
    with pytest.raises(remat.RegionError, match="custom_jvp"):
        jax.grad(changed)(*args)


# --- static leaves and Python numbers


def test_static_leaves_pass_in_and_out():
    marker, dtype = object(), jnp.dtype("bfloat16")

    def fn(w, x, options, *, train, scale):
        assert train is True
        assert options["marker"] is marker
        assert isinstance(scale, float)
        y = layer(w, options["act"](x)) * scale
        return y, {**options, "train": train, "scale": scale, "n": len(x), "none": None}

    options = {"act": jnp.sin, "mode": "train", "dtype": dtype, "marker": marker}
    kwargs = dict(train=True, scale=0.5)
    expected = fn(WS[0], X, options, **kwargs)
    actual = remat.with_policy(fn, "save_dots")(WS[0], X, options, **kwargs)
    chex.assert_trees_all_equal(actual[0], expected[0])
    assert actual[1] == expected[1]


def test_has_aux_and_keywords():
    def loss(w, x, *, train):
        y = layer(w, x) if train else x
        return (y**2).sum(), {"y": y, "train": train, "count": 3}

    expected = jax.value_and_grad(loss, has_aux=True)(WS[0], X, train=True)
    changed = remat.with_policy(loss, "save_dots")
    actual = jax.value_and_grad(changed, has_aux=True)(WS[0], X, train=True)
    chex.assert_trees_all_equal(actual, expected)
    assert actual[0][1]["train"] is True


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), True, 1 + 0j])
def test_numbers_are_what_they_were(number):
    seen = []

    def fn(x, number):
        seen.append(number)
        return jax.checkpoint(lambda x: jnp.sin(x * number))(x), number

    x = jnp.arange(3, dtype=jnp.bfloat16)
    expected = fn(x, number)
    actual = remat.with_policy(fn, "nothing")(x, number)
    chex.assert_trees_all_equal(actual[0], expected[0])
    assert actual[0].dtype == expected[0].dtype
    assert all(n is number for n in seen)
    assert actual[1] is number


def test_weak_types_are_kept():
    fn = jax.checkpoint(lambda x: x * 2)
    for x in (jnp.asarray(1.0), jnp.float32(1), jax.numpy.ones(2)):
        expected, actual = fn(x), remat.with_policy(fn, "nothing")(x)
        assert jax.typeof(actual) == jax.typeof(expected)
    assert jax.grad(remat.with_policy(fn, "nothing"))(3.0) == 2.0


def test_numpy_inputs_and_outputs():
    table = np.arange(4)

    def fn(w, x):
        return layer(w, x), table

    y, out = remat.with_policy(fn, "nothing")(np.asarray(WS[0]), np.asarray(X))
    assert out is table
    chex.assert_trees_all_equal(y, layer(WS[0], X))


# --- transformations and odd inputs


def test_result_can_be_transformed():
    loss, (ws, x) = scanned()
    changed = remat.with_policy(loss, "save_dots")
    batch = jnp.stack([x, 2 * x])
    expected = jax.vmap(jax.grad(loss), in_axes=(None, 0))(ws, batch)
    actual = jax.vmap(jax.grad(changed), in_axes=(None, 0))(ws, batch)
    assert_within(actual, expected, 1e-5)

    def total(fn):
        return jax.lax.scan(lambda s, x: (s + fn(ws, x), None), 0.0, batch)[0]

    assert_within(total(changed), total(loss), 1e-5)
    hessian = jax.hessian(changed, argnums=1)(ws, x)
    assert_within(hessian, jax.hessian(loss, argnums=1)(ws, x), 1e-5)


def test_closure_over_tracers():
    def loss(ws, x):
        inner = remat.with_policy(lambda h: layer(ws[0], h).sum(), "save_dots")
        return inner(x)

    expected = jax.grad(lambda ws, x: layer(ws[0], x).sum())(WS, X)
    chex.assert_trees_all_equal(jax.grad(loss)(WS, X), expected)
    assert_within(jax.jit(jax.grad(loss))(WS, X), expected, 1e-5)


def test_control_flow_on_values_says_that_the_function_is_traced():
    def fn(w, x):
        return layer(w, x) if x.sum() > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        remat.with_policy(fn, "nothing")(WS[0], X)
    assert "traced here, as by jax.jit" in "".join(caught.value.__notes__)


def test_axis_names_and_collectives():
    def loss(w, x):
        return jax.lax.psum(layer(w, x).sum(), "batch")

    def mapped(fn):
        return jax.vmap(fn, in_axes=(None, 0), axis_name="batch")(WS[0], X[:, None])

    assert_within(mapped(remat.with_policy(loss, "none")), mapped(loss), 1e-5)


@pytest.mark.parametrize("policy", ["none", "nothing", "save_dots"])
def test_odd_inputs_and_outputs(policy):
    def body(x, index, flag, key, missing):
        assert missing is None
        y = jnp.where(flag, x[index], 0.0) + jr.normal(key, x.shape)
        return {"y": jnp.sin(y), "index": index, "unused": (), "const": jnp.int32(3)}

    def fn(x, *rest):
        out = jax.checkpoint(body)(x, *rest)
        return out["y"].sum(), out

    args = (X, jnp.array([1, 0]), jnp.array(True), jr.key(0), None)
    expected = jax.value_and_grad(fn, has_aux=True)(*args)
    changed = remat.with_policy(fn, policy)
    actual = jax.value_and_grad(changed, has_aux=True)(*args)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("policy", ["none", "nothing"])
def test_regions_that_pass_inputs_and_constants_through(policy):
    @jax.checkpoint
    def body(x, y):
        return y, x, 2.0, x, jnp.sin(x)

    def fn(x, y):
        a, b, c, d, e = body(*body(x, y)[:2])
        return (a * b * c * d * e).sum(), (a, b, c)

    expected = jax.value_and_grad(fn, (0, 1), has_aux=True)(X, 2 * X)
    actual = jax.value_and_grad(remat.with_policy(fn, policy), (0, 1), has_aux=True)(
        X, 2 * X
    )
    chex.assert_trees_all_equal(actual, expected)


def test_while_loop_forward_values():
    def fn(w, x):
        def keep_going(carry):
            return carry[0] < 3

        def step(carry):
            return carry[0] + 1, layer(w, carry[1])

        return jax.lax.while_loop(keep_going, step, (0, x))[1]

    for policy in ("none", "save_dots"):
        actual = remat.with_policy(fn, policy)(WS[0], X)
        chex.assert_trees_all_equal(actual, fn(WS[0], X))


def test_callbacks_run_as_often_as_before():
    calls = []

    def fn(x):
        def body(x):
            jax.debug.callback(calls.append, x)
            return jnp.sin(jnp.sin(x))

        return jax.checkpoint(body)(x)

    def n_calls(fn):
        calls.clear()
        jax.block_until_ready(jax.jit(fn)(2.0))
        jax.effects_barrier()
        return len(calls)

    for policy in ("none", "nothing"):
        assert n_calls(remat.with_policy(fn, policy)) == n_calls(fn) == 1
    # A region that recomputes runs its callback twice; one that is gone, once.
    assert n_calls(jax.grad(remat.with_policy(fn, "nothing"))) == 2
    assert n_calls(jax.grad(remat.with_policy(fn, "none"))) == 1


def test_keeps_the_functions_name():
    def my_loss(w, x):
        """Docs."""
        return layer(w, x).sum()

    changed = remat.with_policy(my_loss, "nothing")
    assert (changed.__name__, changed.__doc__) == ("my_loss", "Docs.")
    assert (
        remat.with_policy(functools.partial(my_loss, WS[0]), "nothing")(X).shape == ()
    )


# --- size and cost of the rewritten program


def n_functions(fn, *args) -> int:
    return jax.jit(jax.grad(fn)).lower(*args).as_text().count("func.func")


@pytest.mark.parametrize("policy", ["nothing", "save_dots", "none"])
def test_shared_functions_stay_shared(policy):
    def stacked(one_layer):
        inner = jax.jit(one_layer)

        def loss(w, x):
            for _ in range(80):
                x = inner(w, x)
            return x.sum()

        return loss

    def n_functions(fn) -> int:
        return jax.jit(jax.grad(fn)).lower(WS[0], X).as_text().count("func.func")

    by_hand = {
        "nothing": jax.checkpoint(block),
        "save_dots": jax.checkpoint(block, policy=policies.save_dots),
        "none": block,
    }
    changed = n_functions(remat.with_policy(stacked(layer), policy))
    assert changed == n_functions(stacked(by_hand[policy]))


def test_inner_functions_are_the_same_object_in_every_call():
    # JAX compiles an inner jit again when its jaxpr is another object.
    loss, args = jitted_inside()
    changed = remat.with_policy(loss, "save_dots")

    def inner_jaxprs():
        eqns = jax.make_jaxpr(changed)(*args).eqns
        return [eqn.params["jaxpr"] for eqn in eqns if eqn.primitive.name == "jit"]

    first, second = inner_jaxprs(), inner_jaxprs()
    assert len({id(jaxpr) for jaxpr in first + second}) == 1


def test_tracers_do_not_leak():
    with jax.checking_leaks():
        loss, args = unrolled()
        jax.grad(remat.with_policy(loss, "save_dots"))(*args)


# --- jax_remat3


@pytest.fixture
def remat3():
    before = jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("program", [unrolled, scanned, nested, jitted_inside])
def test_under_remat3(program, remat3):
    loss, args = program()
    expected = jax.grad(loss)(*args)
    for policy in ("none", "save_dots", policies.save_names("mid")):
        changed = remat.with_policy(loss, policy)
        assert_within(jax.grad(changed)(*args), expected, 1e-5)
    assert {r.policy for r in remat.find_regions(changed, *args)} == {policy}


def test_functions_wrapped_under_remat3(remat3):
    wrapped = jax.checkpoint(block)
    inner = jax.jit(lambda w, x: wrapped(w, x))

    def loss(ws, x):
        x = inner(ws[1], inner(ws[0], wrapped(ws[2], x)))
        return jax.lax.scan(lambda h, w: (wrapped(w, h), None), x, ws)[0].sum()

    expected = jax.grad(loss)(WS, X)
    for policy in ("none", policies.save_names("mid")):
        changed = remat.with_policy(loss, policy)
        assert_within(jax.grad(changed)(WS, X), expected, 1e-5)
    regions = remat.find_regions(changed, WS, X)
    assert [(r.times, r.policy) for r in regions] == [
        (times, policies.save_names("mid")) for times in (1, 1, 1, 3)
    ]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="jax 0.10 reads the flag when a function is wrapped",
)
def test_static_argnames_under_remat3_are_explained(remat3):
    fn = jax.checkpoint(lambda x, mode: jnp.sin(x), static_argnames="mode")
    assert fn(X, mode="a").shape == X.shape
    with pytest.raises(TypeError) as caught:
        remat.find_regions(lambda x: fn(x, mode="a"), X)
    assert "static_argnums" in "".join(caught.value.__notes__)


# --- imports


def test_importing_remat_imports_no_flax():
    code = "import sys, remat; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
