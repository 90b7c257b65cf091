"""The assertions for users' tests: each holds where it should and fails where not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat
from remat import testing
from tests.helpers import stable_id

W, X = jnp.eye(4) * 0.3, jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
SHAPES = jax.eval_shape(lambda: (W, X))


def block(w, x):
    h = checkpoint_name(jnp.sin(x @ w), "h")
    return x + jnp.tanh(h @ w)


def unrolled(w, x):
    for _ in range(2):
        x = jax.checkpoint(block)(w, x)
    return (x**2).mean()


def scanned(w, x):
    def body(x, _):
        return jax.checkpoint(block)(w, x), None

    return (jax.lax.scan(body, x, None, length=3)[0] ** 2).mean()


def with_aux(params, x, *, train):
    y = jax.checkpoint(block)(params["w"], x) * (2 if train else 1)
    return {"loss": y.sum(), "y": y, "n": jnp.int32(3)}


# --- gradients


@pytest.mark.parametrize("policy", ["nothing", "save_dots", remat.policies.everything])
@pytest.mark.parametrize("fn", [unrolled, scanned])
def test_same_gradients(fn, policy):
    testing.assert_same_gradients(fn, policy, W, X)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_same_gradients_of_pytrees_flags_and_every_float(dtype):
    params = {"w": W.astype(dtype), "unused": jnp.arange(3)}
    testing.assert_same_gradients(
        with_aux, "nothing", params, X.astype(dtype), train=True
    )


def test_different_gradients_are_named_with_their_size():
    calls = []

    def grows(x):
        calls.append(1)
        return jax.checkpoint(lambda x: len(calls) * jnp.sin(x))(x).sum()

    with pytest.raises(AssertionError, match=r"gradients.*differs by 1\.00e\+00"):
        testing.assert_same_gradients(grows, "nothing", X)


def test_tolerance_is_a_share_of_the_largest_value():
    assert testing._difference(jnp.array([1e6, 1.0]), jnp.array([1e6, 2.0])) == 1e-6
    assert testing._difference(jnp.array([jnp.nan]), jnp.array([1.0])) == jnp.inf
    assert testing._difference(jnp.zeros(2), jnp.zeros(2)) == 0


def test_gradients_that_are_zero_but_for_rounding_have_no_scale_of_their_own():
    def attend(bias, x):
        # What is added to every score moves no probability.
        return (jax.nn.softmax(x @ x.T + bias.sum(), axis=-1) @ x).var()

    bias, x = jnp.ones(3), X * 3
    noise = jnp.abs(jax.grad(attend)(bias, x)).max()
    assert 0 < noise < 1e-6
    testing.assert_same_gradients(jax.checkpoint(attend), "nothing", bias, x)
    assert testing._is_rounding(1.0, 1e-5, noise, -noise)
    assert not testing._is_rounding(1.0, 1e-5, noise, 1e-3)


def test_gradients_need_arrays_and_regions():
    with pytest.raises(TypeError, match="give it arrays"):
        testing.assert_same_gradients(unrolled, "nothing", *SHAPES)
    with pytest.raises(remat.RegionError, match="no region"):
        testing.assert_same_gradients(lambda x: x, "nothing", X)


# --- what is saved


@pytest.mark.parametrize("fn", [unrolled, scanned])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("nothing", []),
        ("save_dots", ["dot_general"]),
        (remat.policies.save_names("h"), ["h"]),
        (remat.policies.save_names("h"), ["*"]),
        (remat.policies.offload_names("h"), ["host: h"]),
    ],
    ids=stable_id,
)
def test_saves(fn, policy, expected):
    testing.assert_saves(fn, policy, expected, *SHAPES)


@pytest.mark.parametrize(
    ("policy", "expected", "message"),
    [
        ("save_dots", [], r"kept, and not expected: .*dot_general float32\[2,4\]"),
        ("nothing", ["h"], "expected, and not kept: 'h'"),
        (remat.policies.offload_names("h"), ["h"], "not expected: host: 'h'"),
        (remat.policies.save_names("h"), ["host: h"], "expected, and not kept"),
    ],
)
def test_saves_lists_what_differs(policy, expected, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_saves(unrolled, policy, expected, *SHAPES)


# --- what is recomputed

# Each region has two matrix products; the second feeds tanh, so both run again.


@pytest.mark.parametrize(
    ("fn", "policy", "expected"),
    [
        (unrolled, "nothing", {"dot_general": 4, "sin": 2}),
        (unrolled, "save_dots", {"dot_general": 0, "sin": 2}),
        (unrolled, "everything", {"dot_general": 0, "sin": 0, "tanh": 0}),
        (scanned, "nothing", {"dot_general": 6, "tanh": 3}),
        (scanned, remat.policies.save_names("h"), {"dot_general": 6, "sin": 0}),
    ],
    ids=stable_id,
)
def test_recomputes(fn, policy, expected):
    testing.assert_recomputes(fn, policy, expected, *SHAPES)


def test_recomputes_states_the_counts():
    with pytest.raises(AssertionError, match=r"recomputes 4 dot_general \(expected 1"):
        testing.assert_recomputes(unrolled, "nothing", {"dot_general": 1}, *SHAPES)


# --- the peak


def test_peak_below():
    wide = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    fn = lambda x: (x @ x).sum()  # noqa: E731
    testing.assert_peak_below(fn, "4MiB", wide, target="cpu")
    with pytest.raises(
        AssertionError, match=r"(?s)255\.0 KiB above the limit.*argument .*256"
    ):
        testing.assert_peak_below(fn, "1KiB", wide, target="cpu")


def test_linen_and_nnx_models():
    from flax import linen as nn
    from flax import nnx

    model = remat.remat(nn.Dense)(4)
    variables = model.init(jax.random.key(0), X)

    def loss(variables, x):
        y: Any = model.apply(variables, x)
        return jnp.sin(jnp.sin(y)).sum()

    testing.assert_same_gradients(loss, "save_dots", variables, X)

    layer = remat.remat(nnx.Linear)(4, 4, rngs=nnx.Rngs(0))
    testing.assert_same_gradients(lambda m, x: jnp.sin(m(x)), "save_dots", layer, X)
