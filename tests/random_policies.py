"""Random policies, for Hypothesis: by kind, name, size, dtype, module and position."""

from hypothesis import strategies as st

from remat import policies

NAMES = ("a", "b", "c")


def combined(leaves, max_leaves):
    """What the four operators make of selectors or policies."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a - b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=max_leaves,
    )


told_by_jax = [
    policies.anything(),
    policies.dots(),
    policies.dots_no_batch(),
    policies.elementwise(),
    policies.discrete(),
    policies.primitive("sin", "mul"),
    policies.named("a", "b"),
    policies.named_like("[bc]"),
]
told_by_remat = [
    policies.larger_than(12),
    policies.dtype("float32"),
    policies.in_module("inner"),
    policies.directly_in("inner"),
    policies.reads_input(),
    policies.every_nth(policies.dots(), 2),
    policies.named("a") & policies.dots(),
]


def _policies(selectors):
    chosen = combined(st.sampled_from(selectors), max_leaves=3)
    fixed = [policies.nothing, policies.everything, policies.minimal]
    leaves = st.one_of(
        st.builds(policies.save, chosen),
        st.builds(policies.offload, chosen),
        st.sampled_from(fixed),
    )
    return combined(leaves, max_leaves=4)


anything = _policies(told_by_jax)
"""Policies that JAX can mostly apply by itself."""
bound = _policies(told_by_jax + told_by_remat)
"""Policies of every kind, for `with_policy`."""
