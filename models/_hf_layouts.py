"""Where Hugging Face checkpoints keep what: their tensors as trees of parameters."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from remat.models import _hf_configs
from remat.models._errors import CheckpointError
from remat.models._safetensors import Tensors

Read = Callable[[str], np.ndarray]
Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a kind of checkpoint keeps what."""

    config: Callable[[Mapping[str, Any]], Any]
    """`config.json` to our configuration."""
    prefix: str
    """What names start with where the checkpoint has a head; else they lack it."""
    layer: str
    """What a layer's names start with, after the prefix."""
    read_outside: Callable[[Read, Read, Any], Tree]
    """(read, read without prefix, configuration) to the parameters around layers."""
    read_layer: Callable[[Read, Any], Tree]
    """(read within the layer, configuration) to one layer's parameters."""
    unused: str
    """Tensors that may be left unread: buffers, copies, heads for something else."""

    def read(self, tensors: Tensors, config: Any) -> Tree:
        """Returns all parameters, and refuses a checkpoint that has more."""
        seen = set()
        prefix = self.prefix
        if not any(name.startswith(prefix) for name in tensors.files):
            prefix = ""

        def read(name: str) -> np.ndarray:
            seen.add(name)
            return tensors.read(name)

        def read_inside(name: str) -> np.ndarray:
            return read(prefix + name)

        def layer(i: int) -> Tree:
            start = f"{prefix}{self.layer}{i}."
            return self.read_layer(lambda name: read(start + name), config)

        params = self.read_outside(read_inside, read, config)
        layers = [layer(i) for i in range(config.n_layers)]
        _refuse_unread(tensors, seen, self.unused)
        if config.scan_layers:
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
            return {**params, "layers": stacked}
        return {**params, **{f"layers_{i}": tree for i, tree in enumerate(layers)}}


def _refuse_unread(tensors: Tensors, seen: set[str], unused: str) -> None:
    names = sorted(set(tensors.files) - seen)
    left = [name for name in names if not re.search(unused, name)]
    if left:
        raise CheckpointError(
            f"{tensors.directory} has {len(left)} tensors that the model it names has "
            f"no place for, such as {left[0]!r}; it would not compute the same"
        )


# Linear layers: PyTorch keeps (out, in), Flax (in, out), with heads apart.


def _linear(read: Read, name: str) -> Tree:
    return {"kernel": read(f"{name}.weight").T}


def _biased(read: Read, name: str) -> Tree:
    return {"kernel": read(f"{name}.weight").T, "bias": read(f"{name}.bias")}


def _norm(read: Read, name: str) -> Tree:
    return {"scale": read(f"{name}.weight"), "bias": read(f"{name}.bias")}


def _into_heads(params: Tree, config: Any) -> Tree:
    """Splits what a projection in gives: (D, N * H) to (D, N, H)."""
    return {k: v.reshape(*v.shape[:-1], -1, config.d_head) for k, v in params.items()}


def _from_heads(params: Tree, config: Any) -> Tree:
    """Splits what a projection out takes: (N * H, D) to (N, H, D)."""
    kernel = params["kernel"]
    return {**params, "kernel": kernel.reshape(-1, config.d_head, kernel.shape[-1])}


# GPT-2: `Conv1D` keeps (in, out); query, key and value are one matrix.


def _gpt2_outside(read: Read, read_head: Read, config: Any) -> Tree:
    del read_head, config
    return {
        "token_embedder": {"embedding": read("wte.weight")},
        "position_embedder": {"embedding": read("wpe.weight")},
        "final_norm": _norm(read, "ln_f"),
    }


def _gpt2_layer(read: Read, config: Any) -> Tree:
    def linear(name: str) -> Tree:
        return {"kernel": read(f"{name}.weight"), "bias": read(f"{name}.bias")}

    fused = linear("attn.c_attn")
    parts = {k: np.split(v, 3, axis=-1) for k, v in fused.items()}
    attention = {
        name: _into_heads({k: v[i] for k, v in parts.items()}, config)
        for i, name in enumerate(("query", "key", "value"))
    }
    attention["out"] = _from_heads(linear("attn.c_proj"), config)
    return {
        "attention_norm": _norm(read, "ln_1"),
        "attention": attention,
        "mlp_norm": _norm(read, "ln_2"),
        "mlp": {"wi": linear("mlp.c_fc"), "wo": linear("mlp.c_proj")},
    }


# Llama and Mixtral


def _llama_outside(read: Read, read_head: Read, config: Any) -> Tree:
    params = {
        "token_embedder": {"embedding": read("embed_tokens.weight")},
        "final_norm": {"scale": read("norm.weight")},
    }
    if config.tie_embeddings:
        return params
    return {**params, "output_embedder": {"embedding": read_head("lm_head.weight")}}


def _llama_attention(read: Read, config: Any) -> Tree:
    def into_heads(name: str) -> Tree:
        return _into_heads(_linear(read, f"self_attn.{name}"), config)

    return {
        "attention_norm": {"scale": read("input_layernorm.weight")},
        "attention": {
            "query": into_heads("q_proj"),
            "key": into_heads("k_proj"),
            "value": into_heads("v_proj"),
            "out": _from_heads(_linear(read, "self_attn.o_proj"), config),
        },
        "mlp_norm": {"scale": read("post_attention_layernorm.weight")},
    }


def _llama_layer(read: Read, config: Any) -> Tree:
    mlp = {
        "wi_0": _linear(read, "mlp.gate_proj"),
        "wi_1": _linear(read, "mlp.up_proj"),
        "wo": _linear(read, "mlp.down_proj"),
    }
    return {**_llama_attention(read, config), "mlp": mlp}


def _mixtral_layer(read: Read, config: Any) -> Tree:
    def experts(name: str) -> np.ndarray:
        names = (f"experts.{i}.{name}.weight" for i in range(config.n_experts))
        return np.stack([read(f"block_sparse_moe.{each}").T for each in names])

    moe = {
        "router": _linear(read, "block_sparse_moe.gate"),
        "experts": {
            "wi_0": experts("w1"),
            "wi_1": experts("w3"),
            "wo": experts("w2"),
        },
    }
    return {**_llama_attention(read, config), "moe": moe}


# ViT


def _vit_outside(read: Read, read_head: Read, config: Any) -> Tree:
    # A convolution's (D, C, y, x) to the linear layer over a patch's pixels.
    kernel = read("embeddings.patch_embeddings.projection.weight")
    kernel = kernel.transpose(2, 3, 1, 0).reshape(-1, config.d_model)
    bias = read("embeddings.patch_embeddings.projection.bias")
    return {
        "patch_embedder": {"kernel": kernel, "bias": bias},
        "class_token": read("embeddings.cls_token").reshape(-1),
        "positions": read("embeddings.position_embeddings")[0],
        "final_norm": _norm(read, "layernorm"),
        "head": _biased(read_head, "classifier"),
    }


def _vit_layer(read: Read, config: Any) -> Tree:
    def into_heads(name: str) -> Tree:
        return _into_heads(_biased(read, f"attention.attention.{name}"), config)

    return {
        "attention_norm": _norm(read, "layernorm_before"),
        "attention": {
            "query": into_heads("query"),
            "key": into_heads("key"),
            "value": into_heads("value"),
            "out": _from_heads(_biased(read, "attention.output.dense"), config),
        },
        "mlp_norm": _norm(read, "layernorm_after"),
        "mlp": {
            "wi": _biased(read, "intermediate.dense"),
            "wo": _biased(read, "output.dense"),
        },
    }


LAYOUTS = {
    "gpt2": Layout(
        config=_hf_configs.gpt2_config,
        prefix="transformer.",
        layer="h.",
        read_outside=_gpt2_outside,
        read_layer=_gpt2_layer,
        unused=r"\.attn\.(masked_)?bias$|^lm_head\.weight$",
    ),
    "llama": Layout(
        config=_hf_configs.llama_config,
        prefix="model.",
        layer="layers.",
        read_outside=_llama_outside,
        read_layer=_llama_layer,
        unused=r"rotary_emb\.inv_freq$|^lm_head\.weight$",
    ),
    "mixtral": Layout(
        config=_hf_configs.mixtral_config,
        prefix="model.",
        layer="layers.",
        read_outside=_llama_outside,
        read_layer=_mixtral_layer,
        unused=r"rotary_emb\.inv_freq$",
    ),
    "vit": Layout(
        config=_hf_configs.vit_config,
        prefix="vit.",
        layer="encoder.layer.",
        read_outside=_vit_outside,
        read_layer=_vit_layer,
        unused=r"^(vit\.)?pooler\.",
    ),
}
