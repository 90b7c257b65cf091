"""GPT-2 in Flax Linen: config, norm, attention, MLP, block, model.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Pre-norm
blocks, learned positions, GELU in its tanh form, output tied to the token embedding.
Parameters are fp32, computation bf16, norm statistics and loss fp32. Dropout acts on
the embeddings and on both residual branches; not on attention weights, which a fused
attention never shows.

Tensors carry MaxText's names where MaxText has one, so its named policies apply.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from remat.models._attention import AttentionKind, attend
from remat.models._checks import check_config
from remat.models._layers import apply_layers, make_layers
from remat.models._loss import cross_entropy, unembed
from remat.models._sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """Sizes and choices of one GPT-2."""

    n_layers: int
    """Blocks."""
    n_heads: int
    """Attention heads a block; the head size is `d_model // n_heads`."""
    d_model: int
    """Width of the residual stream."""
    vocab_size: int = 50257
    """Words."""
    n_positions: int = 1024
    """Rows of the position table: the longest sequence, in tokens."""
    dropout: float = 0.0
    """Share of activations dropped while a dropout key is given."""
    norm_epsilon: float = 1e-5
    """Added to the variance."""
    dtype: Any = jnp.bfloat16
    """What is computed in. Parameters are fp32 always."""
    scan_layers: bool = True
    """One traced block and a loop over stacked parameters, or `n_layers` blocks."""
    policy: Any = "nothing"
    """What each block keeps; "none" makes no regions."""
    attention: AttentionKind = "xla"
    """How attention is computed: "xla", "pallas" (TPU flash) or "cudnn" (GPU flash)."""
    loss_chunks: int = 1
    """Pieces of the sequence whose logits exist one at a time."""
    mesh: Mesh | None = None
    """Devices that arrays are spread over, as `_sharding.py` says; None for one."""

    def __post_init__(self):
        check_config(self, ("vocab_size", "n_positions", "loss_chunks"))

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        """Width inside the MLP."""
        return 4 * self.d_model


def dense(
    config: GPT2Config,
    features: int | tuple[int, ...],
    name: str,
    *,
    axis: int | tuple[int, ...] = -1,
    init_scale: float = 1.0,
) -> nn.DenseGeneral:
    """A linear layer with GPT-2's initial values: normal with deviation 0.02."""
    return nn.DenseGeneral(
        features,
        axis=axis,
        dtype=config.dtype,
        kernel_init=nn.initializers.normal(0.02 * init_scale),
        name=name,
    )


def residual_init_scale(config: GPT2Config) -> float:
    """Keeps the variance of the residual stream from growing with depth."""
    return 1 / math.sqrt(2 * config.n_layers)


# Norm


class LayerNorm(nn.Module):
    """Centres and scales each vector; statistics in fp32, output as the input."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normed * scale + bias).astype(x.dtype)


# Attention

QUERY_PROJ = "query_proj"
KEY_PROJ = "key_proj"
VALUE_PROJ = "value_proj"
CONTEXT = "context"
ATTENTION_OUT = "attention_out"
OUT_PROJ = "out_proj"


class Attention(nn.Module):
    """Causal self-attention with a projection in and out."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        heads = (config.n_heads, config.d_head)
        query = checkpoint_name(dense(config, heads, "query")(x), QUERY_PROJ)
        key = checkpoint_name(dense(config, heads, "key")(x), KEY_PROJ)
        value = checkpoint_name(dense(config, heads, "value")(x), VALUE_PROJ)

        # MaxText names what a fused kernel returns `context` and what its attention
        # layer goes on with `attention_out`: here both are one value, (B, T, N, H).
        context = attend(
            query, key, value, causal=True, kind=config.attention, mesh=config.mesh
        )
        context = checkpoint_name(context, CONTEXT)
        context = checkpoint_name(context, ATTENTION_OUT)

        out = dense(
            config,
            config.d_model,
            "out",
            axis=(-2, -1),
            init_scale=residual_init_scale(config),
        )(context)
        return checkpoint_name(out, OUT_PROJ)


# MLP

MLP_WI = "mlpwi"
MLP_WO = "mlpwo"


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        x = checkpoint_name(dense(config, config.d_mlp, "wi")(x), MLP_WI)
        x = nn.gelu(x, approximate=True)
        scale = residual_init_scale(config)
        x = dense(config, config.d_model, "wo", init_scale=scale)(x)
        return checkpoint_name(x, MLP_WO)


# Block

LAYER_INPUT = "decoder_layer_input"


class Block(nn.Module):
    """One layer: attention, then MLP, each normed before and added back."""

    config: GPT2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        # The name goes on the input: on the output, scan's carry, it would do nothing.
        x = checkpoint_name(constrain(x, config.mesh, "batch"), LAYER_INPUT)
        normed = LayerNorm(config.norm_epsilon, name="attention_norm")(x)
        x = x + dropout(Attention(config, name="attention")(normed))
        normed = LayerNorm(config.norm_epsilon, name="mlp_norm")(x)
        return x + dropout(MLP(config, name="mlp")(normed))


# Model


class GPT2(nn.Module):
    """Token and position embeddings, a stack of blocks, a final norm, tied logits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from remat.models.gpt2 import GPT2, PRESETS
        >>> model = GPT2(PRESETS["gpt2-tiny"])
        >>> tokens = jnp.zeros((2, 16), jnp.int32)
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> model.apply({"params": params}, tokens).shape
        (2, 16, 256)
    """

    config: GPT2Config

    def setup(self):
        config = self.config
        self.token_embedder = nn.Embed(
            config.vocab_size,
            config.d_model,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.02),
        )
        self.position_embedder = nn.Embed(
            config.n_positions,
            config.d_model,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.01),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = make_layers(
            lambda: Block(config), config.n_layers, config.scan_layers
        )
        self.final_norm = LayerNorm(config.norm_epsilon)

    def __call__(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Returns fp32 logits of the next word at each place."""
        hidden = self.hidden(tokens, deterministic=deterministic)
        return unembed(hidden, self.token_embedder.embedding)

    def hidden(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Returns the final hidden states, before the vocabulary."""
        config = self.config
        positions = jnp.arange(tokens.shape[1])
        x = self.token_embedder(tokens) + self.position_embedder(positions)
        x = self.dropout(x, deterministic=deterministic)

        def block(layer: Block, x: jax.Array) -> jax.Array:
            return layer(x, deterministic=deterministic)

        x = apply_layers(
            self.layers, block, x, n_layers=config.n_layers, policy=config.policy
        )
        return self.final_norm(x)

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, ""]:
        """Returns the mean cross-entropy of `targets` in nats, fp32."""
        hidden = self.hidden(tokens, deterministic=deterministic)
        return cross_entropy(
            hidden,
            self.token_embedder.embedding,
            targets,
            n_chunks=self.config.loss_chunks,
            mesh=self.config.mesh,
        )


# The published sizes, and one for tests: bytes as words, seconds on a CPU.
PRESETS = {
    "gpt2": GPT2Config(n_layers=12, n_heads=12, d_model=768),
    "gpt2-medium": GPT2Config(n_layers=24, n_heads=16, d_model=1024),
    "gpt2-large": GPT2Config(n_layers=36, n_heads=20, d_model=1280),
    "gpt2-xl": GPT2Config(n_layers=48, n_heads=25, d_model=1600),
    "gpt2-tiny": GPT2Config(
        n_layers=2, n_heads=4, d_model=64, vocab_size=256, n_positions=128
    ),
}
