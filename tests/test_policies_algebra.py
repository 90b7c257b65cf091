"""`|`, `&`, `-` and `~` of policies and selectors, and what they need to know."""

import itertools

import jax
import pytest
from jax.core import ShapedArray

from remat import policies
from remat.policies import Decision, PolicyError, Value
from tests.helpers import stable_id

NAMES = ("kept", "hosted", "dropped")
FIRST = policies.save_names("kept") | policies.offload_names("hosted")
SECOND = {
    decision: {
        Decision.SAVE: policies.save_any_names_but(),
        Decision.OFFLOAD: policies.offload(policies.named_other_than()),
        Decision.RECOMPUTE: policies.nothing,
    }[decision]
    for decision in Decision
}
EXPECTED = {
    "|": max,
    "&": min,
    "-": lambda a, b: Decision.RECOMPUTE if b is not Decision.RECOMPUTE else a,
}


def _decide(policy, name):
    return policy.decide(Value(primitive="name", name=name))


def _combine(operator, left, right):
    return {
        "|": lambda: left | right,
        "&": lambda: left & right,
        "-": lambda: left - right,
    }[operator]()


@pytest.mark.parametrize("operator", EXPECTED)
def test_operators_follow_the_order_recompute_offload_save(operator):
    for name, (second, right) in itertools.product(NAMES, SECOND.items()):
        combined = _combine(operator, FIRST, right)
        expected = EXPECTED[operator](_decide(FIRST, name), second)
        assert _decide(combined, name) == expected, (operator, name, second)


def test_complement_saves_what_was_recomputed():
    decided = [_decide(~FIRST, name) for name in NAMES]
    assert decided == [Decision.RECOMPUTE, Decision.RECOMPUTE, Decision.SAVE]


def test_precedence_is_pythons():
    left, middle, right = (policies.save_names(name) for name in "abc")
    assert left | middle & right == left | (middle & right)
    assert left & middle - right == left & (middle - right)
    assert ~left - middle == (~left) - middle


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("save_dots | minimal", "save_dots | minimal"),
        ("(save_dots | minimal) | full", "(save_dots | minimal) | full"),
        ("save_dots - (minimal & full)", "save_dots - (minimal & full)"),
        ("~(save_dots | minimal)", "~(save_dots | minimal)"),
        ("save(~(dots() | named('a')))", "save(~(dots() | named('a')))"),
    ],
)
def test_repr_keeps_the_parentheses(code, expected):
    assert repr(eval(code, {**vars(policies)})) == expected


def test_selectors_combine_as_sets():
    def matches(selector, **fields):
        return selector.matches(Value(**fields))

    a, like = policies.named("mlpwo"), policies.named_like("mlp*")
    for name in ("mlpwo", "mlpwi", "context"):
        fields = {"primitive": "name", "name": name}
        is_a, is_like = name == "mlpwo", name.startswith("mlp")
        assert matches(a | like, **fields) == (is_a or is_like)
        assert matches(a & like, **fields) == (is_a and is_like)
        assert matches(like - a, **fields) == (is_like and not is_a)
        assert matches(~like, **fields) == (not is_like)


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("h_0/mlp/wi", "*/mlp/wi", True),
        ("mlp/wi", "*/mlp/wi", True),
        ("h_0/mlp/wi", "mlp", True),
        ("h_0/mlp/wi", "h_*", True),
        ("h_0/mlp/wi", "mlp/wo", False),
        ("h_0/mlp/wi", "ml", False),
        ("h_0/attention/query", "attention/*", True),
        ("h_0/attention", "attention/*", False),
        (None, "mlp", False),
        (None, "*", False),
        ("h_0/attention/query", "*attention*", True),
        ("h_0/attention/query", "h_0/*", True),
    ],
)
def test_in_module_matches_enclosing_modules(path, pattern, expected):
    value = Value(primitive="exp", module_path=path)
    assert policies.in_module(pattern).matches(value) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("h_0/attn", True), ("attn", True), ("h_0/attn/query", False), (None, False)],
)
def test_directly_in_leaves_submodules_out(path, expected):
    value = Value(primitive="exp", module_path=path)
    assert policies.directly_in("*attn*").matches(value) == expected


def test_size_and_dtype_are_of_the_results():
    aval = ShapedArray((256,), "float32")
    value = Value(primitive="exp", out_avals=(aval,))
    assert policies.larger_than(1023).matches(value)
    assert not policies.larger_than(1024).matches(value)
    assert policies.dtype("float32", "bfloat16").matches(value)
    assert not policies.dtype("bfloat16").matches(value)


def test_discrete_is_choices_and_sorts_with_a_payload():
    def sort(n_operands):
        avals = (ShapedArray((4,), "float32"),) * n_operands
        return Value(primitive="sort", params={"num_keys": 1}, in_avals=avals)

    chosen = policies.discrete()
    assert all(chosen.matches(Value(primitive=p)) for p in ("top_k", "argmax"))
    assert chosen.matches(sort(2))
    assert not chosen.matches(sort(1))
    assert not chosen.matches(Value(primitive="exp"))


@pytest.mark.parametrize(
    ("policy", "needs"),
    [
        (policies.save(policies.larger_than(1)), {"out_avals"}),
        (policies.save(policies.dtype("int8")), {"out_avals"}),
        (policies.save(policies.in_module("a")), {"module_path"}),
        (policies.save(policies.every_nth(policies.dots(), 2)), {"ordinal"}),
        (policies.layers(["nothing"]), {"layer"}),
        (
            policies.first_layers(1, policies.keras_larger_than()),
            {"layer", "out_avals"},
        ),
        (policies.as_policy({"*": "nothing"}), {"region_path"}),
        # Leaving a named value out means to leave out the value before the name too.
        (policies.save_anything_except_names("a"), {"aliases"}),
        (policies.save_dots - policies.named("a"), {"aliases"}),
        (~policies.minimal, {"aliases"}),
        (policies.save(policies.dots() - policies.named("a")), {"aliases"}),
        (policies.recompute(policies.named("a")), {"aliases"}),
        # No equation both multiplies and names; a value can be both.
        (policies.save_dots & policies.named("a"), {"aliases"}),
        (policies.save(policies.dots() & policies.named("a")), {"aliases"}),
        # The equation that names a value knows the name itself.
        (policies.save(policies.named_like("a*") - policies.named("a")), set()),
        (policies.minimal - policies.named("mlpwo"), set()),
        (policies.minimal & policies.named_like("mlp*"), set()),
        (policies.save_any_names_but("a"), set()),
        (policies.save_dots | policies.save_names("a"), set()),
        (~~policies.save_names("a"), set()),
        (~policies.save_dots, set()),
    ],
    ids=stable_id,
)
def test_needs_is_what_jax_does_not_tell(policy, needs):
    assert policy.needs == needs
    assert policy.needs_binding == bool(needs)


def test_aliases_leave_out_the_value_before_the_name():
    policy = policies.save_dots - policies.named("a")
    params = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    dot = Value(primitive="dot_general", params=params)
    named = Value(primitive="dot_general", params=params, aliases=("b", "a"))
    assert policy.decide(dot) is Decision.SAVE
    assert policy.decide(named) is Decision.RECOMPUTE


def test_a_selector_alone_does_not_say_what_to_do():
    with pytest.raises(PolicyError, match=r"write save\(dots\(\)\) or offload"):
        _ = policies.minimal | policies.dots()
    with pytest.raises(PolicyError, match=r"got a selector; write save\(dots\(\)\)"):
        policies.as_policy(policies.dots())


def test_operands_may_be_names_and_jax_callables():
    jax_policy = jax.checkpoint_policies.save_only_these_names("a")
    assert policies.save_dots | jax_policy == policies.save_dots | policies.save_names(
        "a"
    )
    assert policies.save_dots | "minimal" == policies.save_dots | policies.minimal


def test_layers_choose_by_index():
    by_list = policies.layers(["nothing", "save_dots", "everything"])
    assert [by_list.for_layer(i).name for i in range(3)] == [
        "nothing",
        "save_dots",
        "everything",
    ]
    block = policies.first_layers(2, "nothing", rest="save_dots")
    assert [block.for_layer(i, 4).name for i in range(4)] == ["nothing"] * 2 + [
        "save_dots"
    ] * 2
    second = policies.every_nth_layer(2, "nothing", rest="save_dots", start=1)
    assert [second.for_layer(i, 4).name for i in range(4)] == [
        "save_dots",
        "nothing",
    ] * 2


def test_layers_decide_by_the_layer_of_the_value():
    policy = policies.layers(["nothing", "everything"])
    decided = [
        policy.decide(Value(primitive="exp", layer=layer, n_layers=2))
        for layer in range(2)
    ]
    assert decided == [Decision.RECOMPUTE, Decision.SAVE]


def test_layers_must_be_as_many_as_the_stack_has():
    policy = policies.layers(["nothing", "everything"])
    with pytest.raises(PolicyError, match="has 2 policies, but the stack has 3 layers"):
        policy.for_layer(0, 3)
    with pytest.raises(PolicyError, match="belongs to no stack of layers"):
        policy.decide(Value(primitive="exp"))


def test_composition_goes_by_layer_too():
    policy = policies.layers(["nothing", "save_dots"]) | policies.save_names("a")
    assert policy.for_layer(0) == policies.nothing | policies.save_names("a")
    assert policy.for_layer(1) == policies.save_dots | policies.save_names("a")
    assert policies.save_dots.for_layer(1) is policies.save_dots


def test_map_takes_the_first_pattern_that_matches():
    by_region = policies.as_policy({"*/attn": "save_dots", "h_*": "nothing"})
    assert isinstance(by_region, policies.PolicyMap)
    assert by_region.for_region("h_0/attn") is policies.save_dots
    assert by_region.for_region("h_0/mlp") is policies.nothing
    assert by_region.for_region("embed") is None
    assert dict(by_region) == {"*/attn": policies.save_dots, "h_*": policies.nothing}
    value = Value(primitive="exp", region_path="embed")
    with pytest.raises(PolicyError, match="no pattern matches the region 'embed'"):
        by_region.decide(value)


def test_a_value_goes_by_the_names_that_later_equations_give_it():
    value = Value(primitive="tanh", aliases=("a", "b"))
    assert policies.save_names("b").decide(value) is Decision.SAVE
    assert policies.save_any_names_but("a").decide(value) is Decision.SAVE
    assert policies.save_any_names_but("a", "b").decide(value) is Decision.RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (policies.save_names("a"), True),
        (policies.minimal, True),
        (policies.axlearn_qkv_proj, True),
        (policies.haliax_offload, True),
        (policies.minimal - policies.named("mlpwo"), True),
        (policies.save_dots | policies.save_names("a"), False),
        (policies.megatron_core_attn, False),
        (policies.nothing, False),
        (policies.everything, False),
    ],
    ids=stable_id,
)
def test_keeps_by_name_only(policy, expected):
    assert policy.keeps_by_name_only == expected
