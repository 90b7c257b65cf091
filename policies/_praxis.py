"""Praxis' policies: each `AutodiffCheckpointType`, under its own name.

From `praxis/layers/checkpoint_policy.py`. `save_out_proj` is MaxText's too.
"""

from remat.policies._catalogue import (
    everything,
    nothing,
    save_dots,
    save_dots_no_batch,
)
from remat.policies._description import Description
from remat.policies._factories import save_names
from remat.policies._registry import entry, same
from remat.policies._tensors import transformer

_SOURCE = "Praxis"
_QKV = ("combined_qkv_proj", "query_proj", "value_proj", "key_proj")

save_nothing = same("save_nothing", nothing, _SOURCE)
save_everything = same("save_everything", everything, _SOURCE)
save_dot_only = same("save_dot_only", save_dots, _SOURCE)
save_dot_with_no_batch_dims = same(
    "save_dot_with_no_batch_dims", save_dots_no_batch, _SOURCE
)
save_qkv_out_proj = transformer(
    "save_qkv_out_proj",
    ("combined_qkv_proj", "out_proj"),
    saves="the combined query-key-value projection; attention's output projection",
    recomputes="attention itself, the MLP, norms",
    when="one product makes query, key and value",
    source=_SOURCE,
)
save_qkv_out_proj_separate = transformer(
    "save_qkv_out_proj_separate",
    ("query_proj", "value_proj", "key_proj", "out_proj"),
    saves="query, key and value projections; attention's output projection",
    recomputes="attention itself, the MLP, norms",
    when="query, key and value are products of their own",
    source=_SOURCE,
)
save_context = transformer(
    "save_context",
    ("context",),
    saves="attention's output before its projection",
    recomputes="projections, the MLP, norms; scores and softmax too where "
    "attention is not a fused kernel",
    when="there is memory for one value a layer, and attention is dear",
    source=_SOURCE,
)
save_encoded_and_out_proj = transformer(
    "save_encoded_and_out_proj",
    ("context", "out_proj"),
    saves="attention's output, before and after its projection",
    recomputes="query, key and value projections, the MLP, norms",
    when="there is memory for two values a layer",
    source=_SOURCE,
)
save_dot_for_mlperf_200b = transformer(
    "save_dot_for_mlperf_200b",
    (*_QKV, "context", "out_proj"),
    saves="projections of attention; attention's output",
    recomputes="scores, the MLP, norms",
    when="large dense models, whose MLP is too wide to keep",
    source=_SOURCE,
)
save_quantized = transformer(
    "save_quantized",
    (
        "context",
        "out_proj",
        "combined_qkv_proj",
        "qlhs",
        "qrhs",
        "lhs_scale",
        "rhs_scale",
    ),
    saves="attention's projections and output; quantized operands with their scales",
    recomputes="scores, the MLP, norms",
    when="matrix products are quantized",
    source=_SOURCE,
)
save_dot_except_logits_ffn1 = transformer(
    "save_dot_except_logits_ffn1",
    (*_QKV, "context", "out_proj", "ffn2"),
    saves="projections of attention; attention's output; the MLP's output",
    recomputes="scores, the MLP's wide inner values, norms",
    when="`save_dot_except_logits` does not fit",
    source=_SOURCE,
)
save_dot_except_logits = transformer(
    "save_dot_except_logits",
    (*_QKV, "context", "out_proj", "ffn1", "ffn2"),
    saves="projections of attention and MLP; attention's output",
    recomputes="attention scores, norms, activation functions",
    when="you want the least recompute without keeping T x T scores",
    source=_SOURCE,
)
save_iteration_input = transformer(
    "save_iteration_input",
    ("iteration_input",),
    saves="the input of each pipeline iteration",
    recomputes="everything inside an iteration",
    when="layers are pipelined, and each iteration is a region",
    source=_SOURCE,
)
save_transformer_layer_output = transformer(
    "save_transformer_layer_output",
    ("transformer_layer_out",),
    saves="the output of each layer",
    recomputes="everything inside a layer",
    when="one region holds several layers",
    source=_SOURCE,
)
save_unet_conv = entry(
    "save_unet_conv",
    save_names("conv_out"),
    Description(
        saves="the last convolution of each block",
        recomputes="the other convolutions, norms, activation functions",
        when="a U-Net, of which little fits",
        source=_SOURCE,
    ),
)
save_unet_all_conv = entry(
    "save_unet_all_conv",
    save_names("conv_0", "conv_1", "conv_out"),
    Description(
        saves="every convolution of each block",
        recomputes="norms, activation functions",
        when="a U-Net",
        source=_SOURCE,
    ),
)
