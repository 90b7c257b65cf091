"""The peers' policies keep exactly the peers' tensors.

The sets are copied from the peers' sources, apart from the catalogue's own.
"""

import pytest
from jax.core import ShapedArray

from remat import policies
from remat.policies import Decision, Value

QKV = {"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"}
MLP = {"mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}

# MaxText, layers/decoders.py, Decoder.get_remat_policy: (saved, offloaded).
MAXTEXT = {
    "full": (set(), set()),
    "minimal": (QKV | MLP | {"out_proj"}, set()),
    "minimal_with_context": (QKV | MLP | {"out_proj", "context"}, set()),
    "minimal_flash": (QKV | MLP | {"out_proj", "context"}, set()),
    "minimal_with_quantization": (QKV | MLP | {"out_proj", "quantization"}, set()),
    "minimal_with_context_and_quantization": (
        QKV | MLP | {"out_proj", "context", "quantization"},
        set(),
    ),
    "save_dot_with_context_except_mlp": (QKV | {"context", "out_proj"}, set()),
    "save_dot_except_mlpwi": (QKV | {"out_proj", "mlpwo"}, set()),
    "save_dot_except_mlp": (QKV | {"out_proj"}, set()),
    "save_qkv_proj": (QKV, set()),
    "save_out_proj": ({"out_proj"}, set()),
    "qkv_proj_offloaded": (set(), QKV - {"qkv_proj"}),
    "minimal_offloaded": (set(), QKV | MLP | {"out_proj"}),
}

# Praxis, layers/checkpoint_policy.py, custom_policy.
PRAXIS_QKV = {"combined_qkv_proj", "query_proj", "value_proj", "key_proj"}
PRAXIS = {
    "save_nothing": set(),
    "save_qkv_out_proj": {"combined_qkv_proj", "out_proj"},
    "save_qkv_out_proj_separate": {"query_proj", "value_proj", "key_proj", "out_proj"},
    "save_context": {"context"},
    "save_out_proj": {"out_proj"},
    "save_encoded_and_out_proj": {"context", "out_proj"},
    "save_dot_for_mlperf_200b": PRAXIS_QKV | {"context", "out_proj"},
    "save_quantized": {
        "context",
        "out_proj",
        "combined_qkv_proj",
        "qlhs",
        "qrhs",
        "lhs_scale",
        "rhs_scale",
    },
    "save_iteration_input": {"iteration_input"},
    "save_transformer_layer_output": {"transformer_layer_out"},
    "save_dot_except_logits_ffn1": PRAXIS_QKV | {"context", "out_proj", "ffn2"},
    "save_dot_except_logits": PRAXIS_QKV | {"context", "out_proj", "ffn1", "ffn2"},
    "save_unet_conv": {"conv_out"},
    "save_unet_all_conv": {"conv_0", "conv_1", "conv_out"},
}
PRAXIS_BY_KIND = {
    "save_everything": policies.everything,
    "save_dot_only": policies.save_dots,
    "save_dot_with_no_batch_dims": policies.save_dots_no_batch,
}

# AXLearn, common/attention.py, RematRegexSavePatterns: names its layers emit.
AXLEARN_NAMES = {
    "GroupedQueryAttention.context",
    "MultiheadAttention.o_proj",
    "QLinear.q_proj",
    "QLinear.k_proj",
    "QLinear.v_proj",
    "TransformerFeedForwardLayer.linear1_0",
    "TransformerFeedForwardLayer.linear1_1",
    "TransformerFeedForwardLayer.linear2",
    "TransformerFeedForwardMoE.linear2_1",
    "TopKGating.gate_weights",
    "TopKGating.gate_assignment",
    "TransformerLayer.input",
    "tpu_attention.flash_residuals",
    "gpu_attention.flash_residuals",
}
AXLEARN = {
    "axlearn_qkv_proj": {"q_proj", "k_proj", "v_proj"},
    "axlearn_o_proj": {"o_proj"},
    "axlearn_context": {"context"},
    "axlearn_linear1": {"linear1_0", "linear1_1"},
    "axlearn_linear2": {"linear2", "linear2_1"},
    "axlearn_gate_weights": {"gate_weights"},
    "axlearn_gate_assignment": {"gate_assignment"},
    "axlearn_native_attention": {"q_proj", "k_proj", "v_proj", "o_proj", "context"},
    "axlearn_flash_context": {"flash_residuals"},
    "axlearn_flash_attention": {
        "flash_residuals",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    },
    "axlearn_feed_forward": {"linear1_0", "linear1_1", "linear2", "linear2_1"},
    "axlearn_moe_gating": {"gate_weights", "gate_assignment"},
    "axlearn_input": {"input"},
}


def _decide(policy, name):
    return policy.decide(Value(primitive="name", name=name))


@pytest.mark.parametrize("name", MAXTEXT)
def test_maxtext(name):
    policy, (saved, offloaded) = policies.get(name), MAXTEXT[name]
    assert policy.checkpoint_names == saved | offloaded
    assert all(_decide(policy, tensor) is Decision.SAVE for tensor in saved)
    assert all(_decide(policy, tensor) is Decision.OFFLOAD for tensor in offloaded)
    assert _decide(policy, "attention_out") is Decision.RECOMPUTE
    for primitive in ("dot_general", "exp"):
        assert policy.decide(Value(primitive=primitive)) is Decision.RECOMPUTE


def test_maxtext_has_fourteen_and_custom():
    assert len([*MAXTEXT, "none"]) == 14
    policy = policies.custom(query_proj="device", mlpwi_0="offload", mlpwo="remat")
    decided = {
        name: _decide(policy, name)
        for name in ("decoder_layer_input", "query_proj", "mlpwi_0", "mlpwo")
    }
    assert decided == {
        "decoder_layer_input": Decision.SAVE,
        "query_proj": Decision.SAVE,
        "mlpwi_0": Decision.OFFLOAD,
        "mlpwo": Decision.RECOMPUTE,
    }


@pytest.mark.parametrize("name", PRAXIS)
def test_praxis(name):
    policy = policies.get(name)
    assert policy.checkpoint_names == PRAXIS[name]
    assert all(_decide(policy, tensor) is Decision.SAVE for tensor in PRAXIS[name])
    assert policy.decide(Value(primitive="dot_general")) is Decision.RECOMPUTE


def test_praxis_has_seventeen():
    assert len(PRAXIS) + len(PRAXIS_BY_KIND) == 17
    for name, policy in PRAXIS_BY_KIND.items():
        assert policies.get(name) == policy


@pytest.mark.parametrize("name", AXLEARN)
def test_axlearn(name):
    policy = policies.get(name)
    kept = {
        emitted.split(".")[1]
        for emitted in AXLEARN_NAMES
        if _decide(policy, emitted) is Decision.SAVE
    }
    assert kept == AXLEARN[name]
    for tensor in AXLEARN[name]:
        assert _decide(policy, tensor) is Decision.SAVE, "a name without its class"


def test_axlearn_knows_the_kernel_that_emits_no_name():
    cudnn = Value(primitive="dot_product_attention_fwd_wrapper")
    assert policies.axlearn_flash_context.decide(cudnn) is Decision.SAVE


@pytest.mark.parametrize(
    ("name", "module_path", "primitive", "expected"),
    [
        ("core_attn", "h_0/attn", "exp", Decision.RECOMPUTE),
        ("core_attn", "h_0/self_attention", "dot_general", Decision.RECOMPUTE),
        ("core_attn", "h_0/attn/query", "dot_general", Decision.SAVE),
        ("core_attn", "h_0/mlp/wi", "dot_general", Decision.SAVE),
        ("layernorm", "h_0/ln_1", "mul", Decision.RECOMPUTE),
        ("layernorm", "h_0/post_self_attention_layer_norm", "mul", Decision.RECOMPUTE),
        ("layernorm", "h_0/mlp", "mul", Decision.SAVE),
        ("mlp", "h_0/mlp/wi", "dot_general", Decision.RECOMPUTE),
        ("mlp", "h_0/moe/mlp/wi", "dot_general", Decision.SAVE),
        ("moe", "h_0/moe/gate", "dot_general", Decision.RECOMPUTE),
        ("moe", "h_0/MoeBlock_0", "top_k", Decision.SAVE),
        ("moe_act", "h_0/moe", "logistic", Decision.RECOMPUTE),
        ("moe_act", "h_0/moe", "dot_general", Decision.SAVE),
        ("moe_act", "h_0/mlp", "logistic", Decision.SAVE),
        ("mla_up_proj", "h_0/attention/wq_b", "dot_general", Decision.RECOMPUTE),
        ("mla_up_proj", "h_0/mlp/up_proj", "dot_general", Decision.SAVE),
        ("shared_experts", "h_0/shared_experts/wi", "exp", Decision.RECOMPUTE),
        ("shared_experts", "h_0/moe/wi", "exp", Decision.SAVE),
        ("gdn_norm_out", "h_0/gated_delta_net/out_norm", "mul", Decision.RECOMPUTE),
        ("gdn_norm_out", "h_0/gated_delta_net", "mul", Decision.SAVE),
        ("gdn_norm_out", "h_0/attention/out_norm", "mul", Decision.SAVE),
        ("gdp_in_proj", "h_0/gdp/in_proj", "dot_general", Decision.RECOMPUTE),
        ("gdp_in_proj", "h_0/attn/in_proj", "dot_general", Decision.SAVE),
        ("gdp_qkv", "h_0/gated_delta_product/conv1d", "mul", Decision.RECOMPUTE),
        ("gdp_qkv", "h_0/gated_delta_product/in_proj", "mul", Decision.SAVE),
        ("mhc", "h_0/hyper_connection", "dot_general", Decision.RECOMPUTE),
        ("mhc", "h_0/mlp", "dot_general", Decision.SAVE),
    ],
)
def test_megatron_modules(name, module_path, primitive, expected):
    value = Value(primitive=primitive, module_path=module_path, params={"num_keys": 1})
    assert policies.get(f"megatron_{name}").decide(value) is expected


def test_megatron_has_eleven_modules():
    # megatron/core/transformer/transformer_config.py, allowed_modules.
    allowed = "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts "
    allowed += "gdn_norm_out gdp_in_proj gdp_qkv mhc"
    for module in allowed.split():
        assert policies.get(f"megatron_{module}") == policies.megatron_selective(module)


def test_megatron_core_attention_keeps_its_output():
    value = Value(primitive="name", name="context", module_path="h_0/attn")
    assert policies.megatron_core_attn.decide(value) is Decision.SAVE


def test_megatron_block_and_uniform():
    block = policies.megatron_block(2)
    assert [block.for_layer(i).name for i in range(3)] == [
        "nothing",
        "nothing",
        "everything",
    ]
    decided = [
        policies.megatron_uniform(2).decide(
            Value(primitive="name", name="decoder_layer_input", layer=layer)
        )
        for layer in range(4)
    ]
    assert decided == [Decision.SAVE, Decision.RECOMPUTE] * 2


def _products(*batched):
    values = []
    for is_batched in batched:
        batch = (0,) if is_batched else ()
        params = {"dimension_numbers": (((2,), (1,)), (batch, batch))}
        values.append(Value(primitive="dot_general", params=params))
    return policies.numbered(values)


def test_torchtitan_recomputes_every_second_product_with_weights():
    # query, key, value, scores, context, output, up, down
    products = _products(0, 0, 0, 1, 1, 0, 0, 0)
    save, redo = Decision.SAVE, Decision.RECOMPUTE
    decided = [policies.torchtitan_selective.decide(value) for value in products]
    assert decided == [save, redo, save, save, save, redo, save, redo]
    all_saved = [policies.torchtitan_compute_ops.decide(value) for value in products]
    assert all_saved == [save] * 8


@pytest.mark.parametrize(
    "primitive", ["reduce_scatter", "all_to_all", "top_k", "conv_general_dilated"]
)
def test_torchtitan_saves_communication_and_choices(primitive):
    value = Value(primitive=primitive)
    assert policies.torchtitan_compute_ops.decide(value) is Decision.SAVE


def test_keras_modes():
    small, large = (
        Value(primitive="exp", out_avals=(_array(n),), module_path="dense_1/act")
        for n in (256, 257)
    )
    larger_than = policies.keras_larger_than(1024)
    assert larger_than.decide(small) is Decision.SAVE
    assert larger_than.decide(large) is Decision.RECOMPUTE
    listed = policies.keras_list_of_layers("dense_1")
    assert listed.decide(small) is Decision.RECOMPUTE
    dot = Value(primitive="dot_general")
    assert policies.keras_activations.decide(dot) is Decision.SAVE
    assert policies.keras_activations.decide(small) is Decision.RECOMPUTE
    assert policies.keras_full == policies.nothing


def _array(n):
    return ShapedArray((n,), "float32")


CARRY, INPUT = "scan(layers)__carry", "scan(layers)__input"


@pytest.mark.parametrize(
    ("policy", "carry", "inputs", "inner"),
    [
        (policies.haliax_offload, "OFFLOAD", "OFFLOAD", "RECOMPUTE"),
        (policies.haliax_carries, "SAVE", "RECOMPUTE", "RECOMPUTE"),
        (policies.haliax_recompute, "RECOMPUTE", "RECOMPUTE", "RECOMPUTE"),
        (policies.haliax_save_all, "SAVE", "SAVE", "SAVE"),
        (policies.haliax_scan(), "SAVE", "RECOMPUTE", "RECOMPUTE"),
        (
            policies.haliax_scan(save_block_internals=["inner"]),
            "SAVE",
            "RECOMPUTE",
            "SAVE",
        ),
        (
            policies.haliax_scan(save_carries=False, save_block_internals=True),
            "RECOMPUTE",
            "RECOMPUTE",
            "SAVE",
        ),
        (
            policies.haliax_scan(
                save_carries="offload",
                save_inputs=True,
                offload_block_internals=["inner"],
            ),
            "OFFLOAD",
            "SAVE",
            "OFFLOAD",
        ),
    ],
)
def test_haliax(policy, carry, inputs, inner):
    decided = [_decide(policy, name).name for name in (CARRY, INPUT, "inner")]
    assert decided == [carry, inputs, inner]


TRANSFORMER = [
    name
    for name in policies.names()
    if "discrete choices" in policies.get(name).description.saves
]


@pytest.mark.parametrize("name", TRANSFORMER)
def test_transformer_policies_save_discrete_choices(name):
    for primitive in ("top_k", "argmax"):
        value = Value(primitive=primitive, module_path="h_0/moe/gate", ordinal=1)
        assert policies.get(name).decide(value) is Decision.SAVE


def test_sets_of_tensors_are_transformer_policies():
    by_name = {name for name in (*MAXTEXT, *PRAXIS, *AXLEARN)}
    plain = {"full", "save_nothing", "save_unet_conv", "save_unet_all_conv"}
    assert by_name - plain <= set(TRANSFORMER)
