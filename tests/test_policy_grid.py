"""Every named policy on every kind of program: exact residuals, recompute, gradients.

What is kept and recomputed is held against `tests.grid_oracle`, which works it out from
what each policy says of each value. Gradients are those without regions: to the bit
where every operation runs by itself, and within rounding where XLA fuses them. Policies
that keep the same values of a program are the same program, so each is run once.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import remat
from remat import policies, testing
from remat._lint._program import Traced
from tests.grid_oracle import Actual, expected_of
from tests.grid_programs import (
    PROGRAMS,
    conv_net,
    flash_attention,
    moe,
    plain_jax,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.MissingNamesWarning"),
    pytest.mark.filterwarnings("ignore::remat.UnmatchedRuleWarning"),
]

ALL = tuple(policies.names())
SLICE = (
    "none",
    "everything",
    "nothing",
    "save_dots",
    "save_dots_no_batch",
    "offload_dots",
    "save_dots_with_weights",
    "minimal_with_context",
    "save_unet_conv",
    "axlearn_qkv_proj",
    "megatron_core_attn",
    "megatron_moe_act",
    "torchtitan_selective",
    "keras_activations",
    "haliax_offload",
)
SMALL = (plain_jax, moe, conv_net, flash_attention)
RUN_IN_CI = ("nothing", "save_dots", "offload_dots", "megatron_core_attn")
DTYPES = ("float32", "bfloat16")
IN_FULL = [
    pytest.param(p, d, ALL, id=f"{p.__name__}-{d}", marks=pytest.mark.slow)
    for p in PROGRAMS
    for d in DTYPES
]


@functools.cache
def opened(program, dtype):
    loss, args = program(jnp.dtype(dtype))
    return Actual(loss, args), Traced.of(loss, args, {})


def distinct(names):
    """Policies of different rules, with all the names of each."""
    named = {}
    for name in names:
        named.setdefault(policies.get(name).rule, []).append(name)
    return [policies.get(same[0]) for same in named.values()]


def applying(actual, policy):
    """Whether a program emits a name that the policy needs to keep anything."""
    regions = remat.find_regions(actual.loss, *actual.args)
    emitted = {name for region in regions for name in region.emitted_names}
    return not policy.keeps_by_name_only or any(map(policy.mentions, emitted))


@pytest.mark.parametrize(
    ("program", "dtype", "names"),
    [pytest.param(p, "float32", SLICE, id=f"{p.__name__}-slice") for p in SMALL]
    + IN_FULL,
)
def test_keeps_and_recomputes_exactly(program, dtype, names):
    actual, traced = opened(program, dtype)
    for policy in distinct(names):
        if not applying(actual, policy):
            with pytest.raises(remat.NoNamesFound):
                actual.of(policy)
        elif policy != policies.none:
            assert actual.of(policy) == expected_of(traced, policy), policy.name


@functools.cache
def representatives(program, dtype, names):
    """One policy for each set of values kept."""
    actual, _ = opened(program, dtype)
    found = {}
    for policy in distinct(names):
        if applying(actual, policy):
            kept = tuple((r.label, r.source, r.on_host) for r in actual.kept(policy))
            found.setdefault(kept, policy)
    return tuple(found.values())


@pytest.mark.parametrize(
    ("program", "dtype", "names"),
    [
        pytest.param(p, "float32", RUN_IN_CI, id=f"{p.__name__}-slice")
        for p in (plain_jax, conv_net)
    ]
    + IN_FULL,
)
def test_gradients_are_those_without_regions(program, dtype, names):
    actual, _ = opened(program, dtype)
    without = gradients(actual, "none")
    with jax.disable_jit():
        exact = without(*actual.args)
    fused = jitted(without)(*actual.args)
    tolerance = 1e-5 if dtype == "float32" else 1e-2

    largest = testing._largest(fused[1])

    def close(expected, given):
        if testing._is_rounding(largest, tolerance, expected, given):
            return True  # the bias of attention's keys, which moves no probability
        return testing._difference(expected, given) <= tolerance

    for policy in representatives(program, dtype, names):
        step = gradients(actual, policy)
        with jax.disable_jit():
            chex.assert_trees_all_equal(step(*actual.args), exact)
        chex.assert_trees_all_equal_comparator(
            close,
            lambda *_, policy=policy: f"differs under {policy.name}",
            fused,
            jitted(step)(*actual.args),
        )


def jitted(step):
    # XLA may else leave out roundings to 16 bits, by what it fuses.
    return jax.jit(step, compiler_options={"xla_allow_excess_precision": False})


def gradients(actual, policy):
    return jax.value_and_grad(remat.with_policy(actual.loss, policy))


def test_the_grid_is_over_every_policy():
    assert set(SLICE) | set(RUN_IN_CI) <= set(ALL) and len(ALL) >= 74
