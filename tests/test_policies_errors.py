"""What is wrong is said where it is written, with what to write instead."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import Offloadable, checkpoint_name

from remat import policies
from remat.policies import PolicyError, UnboundPolicyError, UnknownPolicyError
from tests.helpers import stable_id

JAX = jax.checkpoint_policies
# Typed Any: the point of most calls below is that a type checker would refuse them.
P = vars(policies)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "say 'nothing' to recompute everything .* or 'none' to remove"),
        (["a", "b"], r"got a list; for names write .*save_names\('a', 'b'\)"),
        (3, "a policy is a Policy, .* got 3 of type int"),
        (JAX.save_only_these_names, "save_only_these_names makes a policy and is none"),
        (JAX.offload_dot_with_no_batch_dims, "makes a policy and is none; call it"),
        (policies.save_names, r"remat.policies.save_names makes a policy and is none"),
        (policies.dots, "remat.policies.dots makes a policy and is none"),
        (
            JAX.save_anything_except_these_names("a"),
            "ignores the names it is given .*save_anything_except_names",
        ),
        ({}, "holds region patterns, got an empty one"),
        ({3: "nothing"}, "region patterns as keys, got 3"),
        ({"*": None}, "say 'nothing' to recompute everything"),
        ({"*": "nothin"}, "did you mean 'nothing'"),
    ],
    ids=stable_id,
)
def test_as_policy_says_what_to_write(given, message):
    with pytest.raises(PolicyError, match=message):
        policies.as_policy(given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("save_dot", "no policy is called 'save_dot'; did you mean 'save_dots'"),
        ("save-qkv-proj", "did you mean 'save_qkv_proj'"),
        ("save_names", r"it is a function that makes policies: .*save_names\(…\)"),
        ("save_nmes", r"did you mean save_names\(…\)"),
        ("zzzzzz", r"remat.policies.names\(\) lists them"),
        ("", r"no policy is called ''"),
    ],
)
def test_unknown_names_have_near_matches(name, message):
    with pytest.raises(UnknownPolicyError, match=message):
        policies.as_policy(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("save_dots minimal", "is no policy: .*write a registered name or code"),
        ("dots()", r"stands for a selector; .*save\(dots\(\)\)"),
        ("dots() | minimal", r"combines the selector dots\(\) with a policy"),
        ("savenames(a)", "makes neither a policy nor a selector; did you mean .*names"),
        ("__import__('os')", "makes neither a policy nor a selector"),
        ("save_names(a).rule", "no policy is called 'rule'"),
        ("save_dots + minimal", "is neither a name, nor a call"),
        ("larger_than()", "is no policy: .*missing"),
        ("as_policy({**a})", "is neither a name, nor a call"),
    ],
)
def test_text_that_is_no_policy(text, message):
    with pytest.raises(PolicyError, match=message):
        policies.parse(text)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        ("save_names", (["a", "b"],), {}, r"write save_names\('a', 'b'\)"),
        ("save_names", (), {}, "save_names needs at least one name, got none"),
        ("save_names", (3,), {}, "non-empty string, got 3"),
        ("save_names", ("",), {}, "non-empty string, got ''"),
        ("offload_names", ("a",), {"to": "pinned-host"}, "valid: 'pinned_host'"),
        ("offload_names", ("a",), {"to": "host"}, "'host' is no memory kind"),
        ("offload_names", ("a",), {"to": "unpinned_host"}, "moves nothing"),
        ("save_and_offload_names", ("ab",), {}, r"write save=\['ab'\]"),
        ("save_and_offload_names", (["a"], ["a"]), {}, "'a' stands in both save and"),
        ("save", ("a",), {}, r"takes a selector .* save\(named\('a'\)\)"),
        ("offload", (policies.dots(), "hbm"), {}, "'hbm' is no memory kind"),
        ("recompute", (policies.save_dots,), {}, "recompute takes a selector"),
        ("named", (["a"],), {}, r"write named\('a'\)"),
        ("named_matching", ("(",), {}, "takes a regular expression, got '\\('"),
        ("primitive", (), {}, "needs at least one primitive"),
        ("larger_than", ("1MiB",), {}, "a size in bytes as a whole number"),
        ("larger_than", (-1,), {}, "of at least 0, got -1"),
        ("dtype", ("floaty",), {}, "takes dtypes such as 'bfloat16', got 'floaty'"),
        ("dtype", (), {}, "needs at least one dtype"),
        ("every_nth", (policies.dots(), 0), {}, "n as a whole number of at least 1"),
        ("layers", ("nothing",), {}, "takes a list with one policy a layer"),
        ("layers", ([],), {}, "layers needs at least one policy"),
        ("layers", (["nothin"],), {}, "did you mean 'nothing'"),
        ("first_layers", (-1,), {}, "at least 0, got -1"),
        ("every_nth_layer", (0,), {}, "at least 1, got 0"),
        ("custom", (), {"mlpwi": "host"}, "valid: 'remat', 'device', 'offload'"),
        (
            "megatron_selective",
            ("attn",),
            {},
            "knows no module 'attn'; known: core_attn",
        ),
        ("haliax_scan", (), {"save_carries": "host"}, "True, False or 'offload'"),
        (
            "offload_dot_with_no_batch_dims",
            ("device", "pinned-host"),
            {},
            "valid: 'pinned_host'",
        ),
        (
            "offload_dot_with_no_batch_dims",
            ("hbm", "pinned_host"),
            {},
            "source 'hbm' is no memory kind .* valid: 'device'",
        ),
    ],
)
def test_arguments_are_checked_at_construction(function, args, kwargs, message):
    with pytest.raises(PolicyError, match=message):
        P[function](*args, **kwargs)


def _loss(x):
    return jnp.sin(checkpoint_name(x @ x, "y")).sum()


def _differentiate(policy):
    return jax.grad(jax.checkpoint(_loss, policy=policy))(jnp.ones((2, 2)))


def test_uncalled_maker_given_to_jax():
    with pytest.raises(
        PolicyError, match="save_names makes a policy and is none; call"
    ):
        _differentiate(policies.save_names)


@pytest.mark.parametrize(
    ("policy", "untold"),
    [
        (policies.save(policies.in_module("mlp")), "the module a value is made in"),
        (policies.save(policies.larger_than(3)), "the size and dtype of a result"),
        (policies.save_anything_except_names("y"), "the names that later equations"),
        (policies.layers(["nothing"]), "the layer a region belongs to"),
        (policies.torchtitan_selective, "the position of a value"),
        (policies.as_policy({"*": "nothing"}), "the region a value is made in"),
    ],
    ids=stable_id,
)
def test_unbound_rules_name_what_applies_them(policy, untold):
    with pytest.raises(UnboundPolicyError, match=untold) as raised:
        _differentiate(policy)
    assert "remat.with_policy(fn, policy)" in str(raised.value)
    assert "remat.remat(target, policy=policy)" in str(raised.value)


def test_jax_policies_that_offload_to_nowhere():
    made = JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned-host",
    )
    with pytest.raises(PolicyError, match="valid: 'pinned_host'"):
        policies.as_policy(made)

    def by_hand(primitive, *_, **__):
        return Offloadable(src="device", dst="host")

    with pytest.raises(PolicyError, match="offloads to 'host'"):
        _differentiate(policies.as_policy(by_hand))


def test_jax_policies_that_answer_something_else():
    def by_hand(*_, **__):
        return "save"

    with pytest.raises(PolicyError, match="answered 'save'; a policy answers True"):
        _differentiate(policies.as_policy(by_hand))
