"""Llama 3 in Flax NNX: the same functions, numbers and names as in `llama.py`.

Modules hold only parameters; what they compute is in the pure functions both versions
share. Scanned layers are one layer with stacked parameters, made under `nnx.vmap`: the
tree of parameters is then the Linen version's. Dropout takes its key as an argument, so
that the model holds no state but parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from remat.models._attention import AttentionKind, attend
from remat.models._layers import as_region
from remat.models._loss import cross_entropy, unembed
from remat.models._rotary import Rotary, rotary_table, rotate
from remat.models._sharding import constrain
from remat.models.llama import (
    ATTENTION_OUT,
    CONTEXT,
    KEY_PROJ,
    LAYER_INPUT,
    MLP_GATE,
    MLP_UP,
    MLP_WO,
    OUT_PROJ,
    QUERY_PROJ,
    VALUE_PROJ,
    LlamaConfig,
    rms_norm,
    swiglu,
)


def dense(
    config: LlamaConfig,
    features_in: int | tuple[int, ...],
    features_out: int | tuple[int, ...],
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A linear layer without bias, initially normal with deviation 0.02."""
    axis = (-2, -1) if isinstance(features_in, tuple) else -1
    return nnx.LinearGeneral(
        features_in,
        features_out,
        axis=axis,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


def scoped(name: str, module: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """Calls a module under its name, which compiled programs and reports then show.

    Linen does this by itself, NNX does not.
    """
    with jax.named_scope(name):
        return module(*args)


# Norm


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned scale."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (config.d_model,)))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.scale[...], self.epsilon)


# Attention


class Attention(nnx.Module):
    """Causal grouped-query attention with a projection in and out."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        heads = (config.n_heads, config.d_head)
        kv_heads = (config.n_kv_heads, config.d_head)
        self.query = dense(config, config.d_model, heads, rngs)
        self.key = dense(config, config.d_model, kv_heads, rngs)
        self.value = dense(config, config.d_model, kv_heads, rngs)
        self.out = dense(config, heads, config.d_model, rngs)
        self.kind: AttentionKind = config.attention
        self.mesh = config.mesh

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary
    ) -> Float[Array, "B T D"]:
        query = rotate(scoped("query", self.query, x), rotary)
        query = checkpoint_name(query, QUERY_PROJ)
        key = checkpoint_name(rotate(scoped("key", self.key, x), rotary), KEY_PROJ)
        value = checkpoint_name(scoped("value", self.value, x), VALUE_PROJ)
        context = attend(query, key, value, causal=True, kind=self.kind, mesh=self.mesh)
        context = checkpoint_name(context, CONTEXT)
        context = checkpoint_name(context, ATTENTION_OUT)
        return checkpoint_name(scoped("out", self.out, context), OUT_PROJ)


# MLP


class MLP(nnx.Module):
    """SwiGLU between two linear layers in and one out."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.wi_0 = dense(config, config.d_model, config.d_mlp, rngs)
        self.wi_1 = dense(config, config.d_model, config.d_mlp, rngs)
        self.wo = dense(config, config.d_mlp, config.d_model, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = checkpoint_name(scoped("wi_0", self.wi_0, x), MLP_GATE)
        up = checkpoint_name(scoped("wi_1", self.wi_1, x), MLP_UP)
        return checkpoint_name(scoped("wo", self.wo, swiglu(gate, up)), MLP_WO)


# Block


class Block(nnx.Module):
    """One layer: attention, then MLP, each normed before and added back."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config, rngs)
        self.mlp = MLP(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.mesh = config.mesh

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T D"]:
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x = checkpoint_name(constrain(x, self.mesh, "batch"), LAYER_INPUT)
        normed = scoped("attention_norm", self.attention_norm, x)
        out = scoped("attention", self.attention, normed, rotary)
        x = x + self._drop(out, keys[0])
        normed = scoped("mlp_norm", self.mlp_norm, x)
        return x + self._drop(scoped("mlp", self.mlp, normed), keys[1])

    def _drop(self, x: jax.Array, key: Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


# Model


class Llama(nnx.Module):
    """Token embedding, a stack of blocks, a final norm, tied or own output.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from remat.models.llama import PRESETS
        >>> from remat.models.llama_nnx import Llama
        >>> model = Llama(PRESETS["llama-tiny"], nnx.Rngs(0))
        >>> model(jnp.zeros((2, 16), jnp.int32)).shape
        (2, 16, 256)
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.token_embedder = embedder(config, rngs)
        if not config.tie_embeddings:
            self.output_embedder = embedder(config, rngs)
        if config.scan_layers:
            keys = jax.random.split(rngs.params(), config.n_layers)
            self.layers = nnx.vmap(lambda key: Block(config, nnx.Rngs(params=key)))(
                keys
            )
        else:
            self.layers = nnx.List(
                [Block(config, rngs) for _ in range(config.n_layers)]
            )
        self.final_norm = RMSNorm(config, rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], *, dropout_key: Array | None = None
    ) -> Float[Array, "B T V"]:
        """Returns fp32 logits of the next word at each place."""
        hidden = self.hidden(tokens, dropout_key=dropout_key)
        return unembed(hidden, self._output_embedding())

    def hidden(
        self, tokens: Int[Array, "B T"], *, dropout_key: Array | None = None
    ) -> Float[Array, "B T D"]:
        """Returns the final hidden states, before the vocabulary."""
        config = self.config
        rotary = rotary_table(
            tokens.shape[1], config.d_head, config.rope_theta, config.rope_scaling
        )
        keys = None
        if dropout_key is not None:
            keys = jax.random.split(dropout_key, config.n_layers)
        x = scoped("token_embedder", self.token_embedder, tokens)
        apply = self._scan_layers if config.scan_layers else self._unroll_layers
        return scoped("final_norm", self.final_norm, apply(x, rotary, keys))

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        *,
        dropout_key: Array | None = None,
    ) -> Float[Array, ""]:
        """Returns the mean cross-entropy of `targets` in nats, fp32."""
        return cross_entropy(
            self.hidden(tokens, dropout_key=dropout_key),
            self._output_embedding(),
            targets,
            n_chunks=self.config.loss_chunks,
            mesh=self.config.mesh,
        )

    def _scan_layers(
        self, x: jax.Array, rotary: Rotary, keys: Array | None
    ) -> jax.Array:
        # Inside scan the loop itself keeps forward and recompute apart.
        region = _region(self.config, "layers", prevent_cse=False)
        in_axes = (0, nnx.Carry, None, 0)
        return nnx.scan(region, in_axes=in_axes, out_axes=nnx.Carry)(
            self.layers, x, rotary, keys
        )

    def _unroll_layers(
        self, x: jax.Array, rotary: Rotary, keys: Array | None
    ) -> jax.Array:
        # Outside a loop XLA's CSE would merge the recompute with the forward pass.
        assert isinstance(self.layers, nnx.List)
        for i, layer in enumerate(self.layers):
            region = _region(self.config, f"layers_{i}", prevent_cse=True)
            x = region(layer, x, rotary, None if keys is None else keys[i])
        return x

    def _output_embedding(self) -> Float[Array, "V D"]:
        if self.config.tie_embeddings:
            return self.token_embedder.embedding[...]
        return self.output_embedder.embedding[...]


def _region(config: LlamaConfig, name: str, *, prevent_cse: bool):
    def block(layer: Block, x: jax.Array, rotary: Rotary, key: Array | None):
        return scoped(name, layer, x, rotary, key)

    return as_region(block, config.policy, prevent_cse=prevent_cse, remat=nnx.remat)


def embedder(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """A row of `d_model` numbers for each word, initially of deviation 0.02."""
    return nnx.Embed(
        config.vocab_size,
        config.d_model,
        dtype=config.dtype,
        embedding_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


def from_params(config: LlamaConfig, params: Mapping[str, Any]) -> Llama:
    """Returns the model around a tree of parameters (arrays, tracers or shapes)."""
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, dict(params))
    return nnx.merge(graph, state)


def to_params(model: Llama) -> dict:
    """Returns the tree of a model's parameters; scanned, it is the Linen version's."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
