"""The policy object and the registry."""

import copy
import pickle

import pytest
from jax.core import ShapedArray

from remat import policies
from remat.policies import Decision, PolicyError, Value

MADE = [
    policies.save_names("a", "b"),
    policies.offload_names("a"),
    policies.save_and_offload_names(save=["a"], offload=["b"]),
    policies.save_any_names_but("a"),
    policies.save_any_names_but(),
    policies.save_anything_except_names("a"),
    policies.save(policies.dots()),
    policies.save(policies.dots_no_batch() | policies.discrete()),
    policies.save(policies.anything() - policies.elementwise()),
    policies.save(policies.named_like("mlp*", "attn?") - policies.named("mlpwo")),
    policies.save(policies.named_matching(r".*[kqv]_proj")),
    policies.save(policies.named_other_than("a")),
    policies.save(policies.primitive("exp", "sin") & policies.dtype("bfloat16")),
    policies.save(~policies.in_module("*/mlp") & policies.directly_in("attn")),
    policies.save(policies.every_nth(policies.dots(), 3, start=1)),
    policies.offload(policies.larger_than(2**20)),
    policies.recompute(policies.in_module("mlp")),
    policies.save_dots | policies.offload_names("a"),
    (policies.save_dots | policies.minimal) & policies.named_like("mlp*"),
    policies.save_dots - (policies.minimal | policies.save_context),
    ~policies.save_dots,
    ~(policies.save_dots | policies.minimal),
    policies.layers(["nothing", policies.save_names("a"), "save_dots"]),
    policies.first_layers(2, "nothing", rest="save_dots"),
    policies.every_nth_layer(2, "save_dots", rest="nothing", start=1),
    policies.custom(query_proj="device", mlpwi="offload", mlpwo="remat"),
    policies.megatron_selective("layernorm", "moe_act"),
    policies.megatron_selective(),
    policies.megatron_block(3),
    policies.megatron_uniform(3),
    policies.keras_larger_than(10),
    policies.keras_list_of_layers("dense_1"),
    policies.haliax_scan(save_carries="offload", save_block_internals=["a"]),
    policies.haliax_scan(save_carries=False, save_block_internals=True),
    policies.as_policy({"*/attn": "save_dots", "*": policies.save_names("a")}),
]
REGISTERED = [policies.get(name) for name in policies.names()]


@pytest.mark.parametrize("policy", MADE + REGISTERED, ids=repr)
def test_repr_is_the_code_that_makes_it(policy):
    assert eval(repr(policy), {**vars(policies)}) == policy


@pytest.mark.parametrize("policy", MADE + REGISTERED, ids=repr)
def test_text_is_read_back(policy):
    assert policies.parse(repr(policy)) == policy


@pytest.mark.parametrize("policy", MADE + REGISTERED, ids=repr)
def test_pickles_copies_and_hashes(policy):
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy == copy.deepcopy(policy)
    assert hash(again) == hash(policy)
    assert again.name == policy.name
    assert again.description == policy.description


def test_equal_where_the_rule_is():
    by_selector = policies.save(policies.named_other_than("a"))
    assert by_selector == policies.save_any_names_but("a")
    assert len(set(MADE)) == len(MADE) - 1, "no other two of the list are equal"
    assert policies.none != policies.everything


def test_is_frozen():
    with pytest.raises(AttributeError):
        policies.save_dots.name = "mine"  # pyright: ignore


@pytest.mark.parametrize("name", policies.names())
def test_registered_are_attributes_under_their_name(name):
    policy = policies.get(name)
    assert vars(policies)[name] is policy
    assert policy.name == repr(policy) == name
    assert policies.as_policy(name) is policy


@pytest.mark.parametrize("policy", MADE + REGISTERED, ids=repr)
def test_description_has_one_line_each(policy):
    about = policy.description
    for line in (
        about.saves,
        about.offloads,
        about.recomputes,
        about.when,
        about.source,
    ):
        assert line and "\n" not in line


@pytest.mark.parametrize("policy", REGISTERED, ids=repr)
def test_description_says_whether_it_offloads(policy):
    assert policy.offloads == (policy.description.offloads != "nothing")


def test_register_keeps_the_code_and_refuses_a_second():
    mine = policies.register("test_mine", policies.save_names("a"))
    assert mine == policies.get("test_mine")
    assert mine.name == "test_mine"
    assert repr(mine) == "save_names('a')"
    with_spaces = policies.register("my own (test)", policies.save_dots)
    assert policies.as_policy("my own (test)") is with_spaces
    with pytest.raises(policies.DuplicatePolicyError, match="'test_mine' is taken"):
        policies.register("test_mine", policies.save_dots)


def test_register_wants_a_name_and_a_policy():
    with pytest.raises(PolicyError, match="non-empty string, got ''"):
        policies.register("", policies.save_dots)
    with pytest.raises(PolicyError, match="takes a Policy, got 'save_dots'"):
        policies.register("test_other", "save_dots")  # pyright: ignore


def test_user_can_give_a_description():
    about = policies.Description(saves="a", when="always")
    mine = policies.register("test_described", policies.save_names("a"), about)
    assert mine.description is about


def test_decide_gives_the_three_decisions():
    policy = policies.save_names("a") | policies.offload_names("b")
    decided = [policy.decide(Value(primitive="name", name=name)) for name in "abc"]
    assert decided == [Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE]


def test_value_counts_the_bytes_of_all_results():
    results = (
        ShapedArray((3, 4), "float32"),
        ShapedArray((5,), "int8"),
    )
    assert Value(primitive="top_k", out_avals=results).bytes == 3 * 4 * 4 + 5
    assert Value(primitive="top_k").bytes is None


def test_numbered_counts_batched_products_apart():
    def dot(batch):
        params = {"dimension_numbers": (((1,), (0,)), (batch, batch))}
        return Value(primitive="dot_general", params=params)

    values = [dot(()), dot((0,)), Value(primitive="exp"), dot(()), dot((0,))]
    ordinals = [value.ordinal for value in policies.numbered(values)]
    assert ordinals == [0, 0, 0, 1, 1]


def test_names_mentioned_by_pattern_are_not_spelled_out():
    policy = policies.save(policies.named_like("mlp*") | policies.named("context"))
    assert policy.checkpoint_names == {"context"}
    assert policy.mentions("mlpwo") and policy.mentions("context")
    assert not policy.mentions("out_proj")


def test_makers_are_attributes_and_make_policies():
    for name, make in policies.makers().items():
        assert vars(policies)[name] is make
    assert policies.makers()["save_names"]("a") == policies.save_names("a")
