"""Policies: what to keep between the forward and the backward pass.

What each keeps of a region, besides the region's inputs:

    none                     everything: `with_policy` removes the region
    everything               all that the backward pass reads; the region stays
    nothing                  nothing; JAX's `policy=None` means the same
    save_dots, …             values of one kind
    save_names("context")    values that the model gave these names
    save(selector)           values by kind, name, size, dtype, module or position
    offload(selector), …     the same, in host memory
    a | b, a & b, a - b, ~a  what either, both, only the first, or not the first keeps
    layers([…])              what the policy of each layer says
    {"*/attn": "save_dots"}  what the policy of each region says, by its path

The carry that a scan hands to a region is an input, and kept under every policy:
naming it adds nothing.

No policy decides on side effects: `jax.debug.callback` and `jax.debug.print` in a
region run in both passes, `jax.pure_callback` again where its result is not kept, and a
region with an `io_callback` in it cannot be differentiated by JAX. `remat.lint` lists
them.

Example:
    >>> from remat import policies
    >>> policies.parse("save_dots | offload_names(mlpwo)").description.offloads
    'values named mlpwo'
"""

# The order of the catalogue is the order in which it is listed.
from remat.policies._catalogue import everything as everything
from remat.policies._catalogue import none as none
from remat.policies._catalogue import nothing as nothing
from remat.policies._catalogue import offload_dots as offload_dots
from remat.policies._catalogue import offload_dots_no_batch as offload_dots_no_batch
from remat.policies._catalogue import (
    offload_dots_with_weights as offload_dots_with_weights,
)
from remat.policies._catalogue import save_dots as save_dots
from remat.policies._catalogue import save_dots_no_batch as save_dots_no_batch
from remat.policies._catalogue import save_dots_with_weights as save_dots_with_weights

# isort: split
from remat.policies._maxtext import custom as custom
from remat.policies._maxtext import full as full
from remat.policies._maxtext import minimal as minimal
from remat.policies._maxtext import minimal_flash as minimal_flash
from remat.policies._maxtext import minimal_offloaded as minimal_offloaded
from remat.policies._maxtext import minimal_with_context as minimal_with_context
from remat.policies._maxtext import (
    minimal_with_context_and_quantization as minimal_with_context_and_quantization,
)
from remat.policies._maxtext import (
    minimal_with_quantization as minimal_with_quantization,
)
from remat.policies._maxtext import qkv_proj_offloaded as qkv_proj_offloaded
from remat.policies._maxtext import save_dot_except_mlp as save_dot_except_mlp
from remat.policies._maxtext import save_dot_except_mlpwi as save_dot_except_mlpwi
from remat.policies._maxtext import (
    save_dot_with_context_except_mlp as save_dot_with_context_except_mlp,
)
from remat.policies._maxtext import save_out_proj as save_out_proj
from remat.policies._maxtext import save_qkv_proj as save_qkv_proj

# isort: split
from remat.policies._praxis import save_context as save_context
from remat.policies._praxis import save_dot_except_logits as save_dot_except_logits
from remat.policies._praxis import (
    save_dot_except_logits_ffn1 as save_dot_except_logits_ffn1,
)
from remat.policies._praxis import save_dot_for_mlperf_200b as save_dot_for_mlperf_200b
from remat.policies._praxis import save_dot_only as save_dot_only
from remat.policies._praxis import (
    save_dot_with_no_batch_dims as save_dot_with_no_batch_dims,
)
from remat.policies._praxis import (
    save_encoded_and_out_proj as save_encoded_and_out_proj,
)
from remat.policies._praxis import save_everything as save_everything
from remat.policies._praxis import save_iteration_input as save_iteration_input
from remat.policies._praxis import save_nothing as save_nothing
from remat.policies._praxis import save_qkv_out_proj as save_qkv_out_proj
from remat.policies._praxis import (
    save_qkv_out_proj_separate as save_qkv_out_proj_separate,
)
from remat.policies._praxis import save_quantized as save_quantized
from remat.policies._praxis import (
    save_transformer_layer_output as save_transformer_layer_output,
)
from remat.policies._praxis import save_unet_all_conv as save_unet_all_conv
from remat.policies._praxis import save_unet_conv as save_unet_conv

# isort: split
from remat.policies._axlearn import axlearn_context as axlearn_context
from remat.policies._axlearn import axlearn_feed_forward as axlearn_feed_forward
from remat.policies._axlearn import axlearn_flash_attention as axlearn_flash_attention
from remat.policies._axlearn import axlearn_flash_context as axlearn_flash_context
from remat.policies._axlearn import axlearn_gate_assignment as axlearn_gate_assignment
from remat.policies._axlearn import axlearn_gate_weights as axlearn_gate_weights
from remat.policies._axlearn import axlearn_input as axlearn_input
from remat.policies._axlearn import axlearn_linear1 as axlearn_linear1
from remat.policies._axlearn import axlearn_linear2 as axlearn_linear2
from remat.policies._axlearn import axlearn_moe_gating as axlearn_moe_gating
from remat.policies._axlearn import axlearn_native_attention as axlearn_native_attention
from remat.policies._axlearn import axlearn_o_proj as axlearn_o_proj
from remat.policies._axlearn import axlearn_qkv_proj as axlearn_qkv_proj

# isort: split
from remat.policies._megatron import megatron_block as megatron_block
from remat.policies._megatron import megatron_core_attn as megatron_core_attn
from remat.policies._megatron import megatron_full as megatron_full
from remat.policies._megatron import megatron_gdn_norm_out as megatron_gdn_norm_out
from remat.policies._megatron import megatron_gdp_in_proj as megatron_gdp_in_proj
from remat.policies._megatron import megatron_gdp_qkv as megatron_gdp_qkv
from remat.policies._megatron import megatron_layernorm as megatron_layernorm
from remat.policies._megatron import megatron_mhc as megatron_mhc
from remat.policies._megatron import megatron_mla_up_proj as megatron_mla_up_proj
from remat.policies._megatron import megatron_mlp as megatron_mlp
from remat.policies._megatron import megatron_moe as megatron_moe
from remat.policies._megatron import megatron_moe_act as megatron_moe_act
from remat.policies._megatron import megatron_selective as megatron_selective
from remat.policies._megatron import megatron_shared_experts as megatron_shared_experts
from remat.policies._megatron import megatron_uniform as megatron_uniform

# isort: split
from remat.policies._torchtitan import torchtitan_compute_ops as torchtitan_compute_ops
from remat.policies._torchtitan import torchtitan_full as torchtitan_full
from remat.policies._torchtitan import torchtitan_selective as torchtitan_selective

# isort: split
from remat.policies._keras import keras_activations as keras_activations
from remat.policies._keras import keras_full as keras_full
from remat.policies._keras import keras_larger_than as keras_larger_than
from remat.policies._keras import keras_list_of_layers as keras_list_of_layers

# isort: split
from remat.policies._haliax import haliax_carries as haliax_carries
from remat.policies._haliax import haliax_offload as haliax_offload
from remat.policies._haliax import haliax_recompute as haliax_recompute
from remat.policies._haliax import haliax_save_all as haliax_save_all
from remat.policies._haliax import haliax_scan as haliax_scan

# isort: split
from remat.policies._jax_names import checkpoint_dots as checkpoint_dots
from remat.policies._jax_names import (
    checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims,
)
from remat.policies._jax_names import dots_saveable as dots_saveable
from remat.policies._jax_names import (
    dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable,
)
from remat.policies._jax_names import everything_saveable as everything_saveable
from remat.policies._jax_names import nothing_saveable as nothing_saveable
from remat.policies._jax_names import (
    offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims,
)
from remat.policies._jax_names import (
    save_and_offload_only_these_names as save_and_offload_only_these_names,
)
from remat.policies._jax_names import (
    save_any_names_but_these as save_any_names_but_these,
)
from remat.policies._jax_names import (
    save_anything_except_these_names as save_anything_except_these_names,
)
from remat.policies._jax_names import save_from_both_policies as save_from_both_policies
from remat.policies._jax_names import save_only_these_names as save_only_these_names

# isort: split
from remat.policies._by_kind import discrete as discrete
from remat.policies._by_kind import dots as dots
from remat.policies._by_kind import dots_no_batch as dots_no_batch
from remat.policies._by_kind import elementwise as elementwise
from remat.policies._by_kind import every_nth as every_nth
from remat.policies._by_kind import primitive as primitive
from remat.policies._by_name import named as named
from remat.policies._by_name import named_like as named_like
from remat.policies._by_name import named_matching as named_matching
from remat.policies._by_name import named_other_than as named_other_than
from remat.policies._by_place import directly_in as directly_in
from remat.policies._by_place import dtype as dtype
from remat.policies._by_place import in_module as in_module
from remat.policies._by_place import larger_than as larger_than
from remat.policies._by_place import reads_input as reads_input
from remat.policies._coerce import as_policy as as_policy
from remat.policies._description import Description as Description
from remat.policies._errors import DuplicatePolicyError as DuplicatePolicyError
from remat.policies._errors import PolicyError as PolicyError
from remat.policies._errors import UnboundPolicyError as UnboundPolicyError
from remat.policies._errors import UnknownPolicyError as UnknownPolicyError
from remat.policies._factories import offload as offload
from remat.policies._factories import offload_names as offload_names
from remat.policies._factories import recompute as recompute
from remat.policies._factories import save as save
from remat.policies._factories import save_and_offload_names as save_and_offload_names
from remat.policies._factories import save_any_names_but as save_any_names_but
from remat.policies._factories import (
    save_anything_except_names as save_anything_except_names,
)
from remat.policies._factories import save_names as save_names
from remat.policies._jax_callables import from_jax as from_jax
from remat.policies._layered import every_nth_layer as every_nth_layer
from remat.policies._layered import first_layers as first_layers
from remat.policies._layered import layers as layers
from remat.policies._parse import parse as parse
from remat.policies._policy import Policy as Policy
from remat.policies._policy_map import PolicyMap as PolicyMap
from remat.policies._registry import get as get
from remat.policies._registry import makers as makers
from remat.policies._registry import names as names
from remat.policies._registry import register as register
from remat.policies._selector import Selector as Selector
from remat.policies._selector import anything as anything
from remat.policies._value import Decision as Decision
from remat.policies._value import Value as Value
from remat.policies._value import kind_of as kind_of
from remat.policies._value import numbered as numbered
