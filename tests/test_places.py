"""Rules by module on full paths, and rules that fit nothing."""

import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from flax import linen as nn

import remat
from remat import policies
from tests.region_programs import WS, D, X, block


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D, name="wo")(jnp.sin(nn.Dense(2 * D, name="wi")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Mlp(name="mlp")(x), None


class Net(nn.Module):
    scan: bool = False
    remat: bool = True

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            stack = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return stack(name="layers")(x)[0]
        for i in range(2):
            x, _ = layer(name=f"h_{i}")(x)
        return x


def kept(policy, pattern=None, **fields):
    net = Net(**fields, remat=pattern is None)
    params = jax.eval_shape(net.init, jr.key(0), X)
    loss = remat.with_policy(
        lambda params, x: jnp.sin(jnp.asarray(net.apply(params, x))).sum(),
        policies.save(policies.dots() & policy),
        regions=pattern,
    )
    labels = [residual.label for residual in remat.residuals(loss, params, X)]
    return sorted(label for label in labels if "wi: dot_general" in label)


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        ("wi", 2),
        ("*/mlp/wi", 2),
        ("mlp", 2),
        ("h_*/mlp/wi", 2),
        ("h_1/mlp/wi", 1),
        ("Net/h_0/mlp", 1),
        ("Net", 2),
    ],
)
@pytest.mark.parametrize("made", [None, "h_*", "*/mlp", "Net"], ids=str)
def test_paths_go_on_from_the_regions(pattern, n, made):
    assert len(kept(policies.in_module(pattern), made)) == n


def test_paths_in_a_scan():
    one = kept(policies.in_module("layers/*/wi"), scan=True)
    other = kept(policies.in_module("Net/layers/mlp"), scan=True)
    assert len(one) == 1
    assert one == other


def unrolled(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.checkpoint(block)(w, x)
    return x.sum()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            policies.save(policies.in_module("layr_0")),
            "'layer_0/block'.*mean 'lay",
        ),
        (policies.save(policies.larger_than(10**6)), r"largest has 32 B"),
        (policies.save(policies.dtype("bfloat16")), r"dtypes are 'float32'"),
        (
            policies.save(policies.dots() - policies.in_module("mlp")),
            r"in_module\('mlp'\) fits no value",
        ),
    ],
    ids=["module", "size", "dtype", "subtracted"],
)
def test_rules_that_fit_nothing_are_warned_of(policy, message):
    with pytest.warns(remat.UnmatchedRuleWarning, match=message) as caught:
        remat.with_policy(unrolled, policy)(WS, X)
    assert [warning.filename for warning in caught] == [__file__]


def test_rules_that_fit_something_are_not():
    either = policies.in_module("layer_2", "mlp")
    policy = policies.save(policies.dots() & either & policies.larger_than(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.with_policy(unrolled, policy)(WS, X)


def test_without_paths_the_warning_says_how_to_make_them():
    def loss(w, x):
        return jax.checkpoint(block)(w, x).sum()

    policy = policies.save(policies.in_module("mlp"))
    with pytest.warns(remat.UnmatchedRuleWarning, match="mlp"):
        remat.with_policy(loss, policy)(WS[0], X)
