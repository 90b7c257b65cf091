"""Llama 3 in Flax Linen: config, norm, attention, MLP, block, model.

Grattafiori et al. 2024, "The Llama 3 Herd of Models". RMSNorm, rotary positions with
Llama 3.1's frequency scaling, grouped-query attention, SwiGLU. Parameters are fp32,
computation bf16, norm statistics and loss fp32. The pure functions are shared with the
NNX version in `llama_nnx.py`.

Tensors carry MaxText's names, so its named policies apply.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from remat.models._attention import AttentionKind, attend
from remat.models._checks import check_config, check_multiple
from remat.models._layers import apply_layers, make_layers
from remat.models._loss import cross_entropy, unembed
from remat.models._rotary import RopeScaling, Rotary, rotary_table, rotate
from remat.models._sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes and choices of one Llama."""

    n_layers: int
    """Blocks."""
    n_heads: int
    """Query heads a block; the head size is `d_model // n_heads`."""
    n_kv_heads: int
    """Key and value heads a block; divides `n_heads`."""
    d_model: int
    """Width of the residual stream."""
    d_mlp: int
    """Width inside the MLP."""
    vocab_size: int = 128256
    """Words."""
    tie_embeddings: bool = False
    """Whether the output reuses the token embedding."""
    rope_theta: float = 500_000.0
    """The slowest rotary pair turns once in 2 pi times about this many tokens."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the low frequencies, if any."""
    norm_epsilon: float = 1e-5
    """Added to the mean square."""
    dropout: float = 0.0
    """Share of both branches dropped while a dropout key is given."""
    dtype: Any = jnp.bfloat16
    """What is computed in. Parameters are fp32 always."""
    scan_layers: bool = True
    """One traced block and a loop over stacked parameters, or `n_layers` blocks."""
    policy: Any = "nothing"
    """What each block keeps; "none" makes no regions."""
    attention: AttentionKind = "xla"
    """How attention is computed: "xla", "pallas" (TPU flash) or "cudnn" (GPU flash)."""
    loss_chunks: int = 8
    """Pieces of the sequence whose logits exist one at a time."""
    mesh: Mesh | None = None
    """Devices that arrays are spread over, as `_sharding.py` says; None for one."""

    def __post_init__(self):
        check_config(self, ("n_kv_heads", "d_mlp", "vocab_size", "loss_chunks"))
        check_multiple(self, "n_heads", "n_kv_heads")

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads


def dense(
    config: LlamaConfig,
    features: int | tuple[int, ...],
    name: str,
    *,
    axis: int | tuple[int, ...] = -1,
) -> nn.DenseGeneral:
    """A linear layer without bias, initially normal with deviation 0.02."""
    return nn.DenseGeneral(
        features,
        axis=axis,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nn.initializers.normal(0.02),
        name=name,
    )


# Norm


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "... D"]:
    """Returns x over its root mean square, times `scale`; statistics in fp32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)
    return normed * scale.astype(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return rms_norm(x, scale, self.epsilon)


# Attention

QUERY_PROJ = "query_proj"
KEY_PROJ = "key_proj"
VALUE_PROJ = "value_proj"
CONTEXT = "context"
ATTENTION_OUT = "attention_out"
OUT_PROJ = "out_proj"


class Attention(nn.Module):
    """Causal grouped-query attention with a projection in and out."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary
    ) -> Float[Array, "B T D"]:
        config = self.config
        heads = (config.n_heads, config.d_head)
        kv_heads = (config.n_kv_heads, config.d_head)
        # Named after rotation, as in MaxText: what attention's backward pass reads.
        query = rotate(dense(config, heads, "query")(x), rotary)
        query = checkpoint_name(query, QUERY_PROJ)
        key = rotate(dense(config, kv_heads, "key")(x), rotary)
        key = checkpoint_name(key, KEY_PROJ)
        value = checkpoint_name(dense(config, kv_heads, "value")(x), VALUE_PROJ)

        context = attend(
            query, key, value, causal=True, kind=config.attention, mesh=config.mesh
        )
        context = checkpoint_name(context, CONTEXT)
        context = checkpoint_name(context, ATTENTION_OUT)
        out = dense(config, config.d_model, "out", axis=(-2, -1))(context)
        return checkpoint_name(out, OUT_PROJ)


# MLP

MLP_GATE = "mlpwi_0"
MLP_UP = "mlpwi_1"
MLP_WO = "mlpwo"


def swiglu(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> jax.Array:
    """Returns silu(gate) * up."""
    return jax.nn.silu(gate) * up


class MLP(nn.Module):
    """SwiGLU between two linear layers in and one out."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        gate = checkpoint_name(dense(config, config.d_mlp, "wi_0")(x), MLP_GATE)
        up = checkpoint_name(dense(config, config.d_mlp, "wi_1")(x), MLP_UP)
        out = dense(config, config.d_model, "wo")(swiglu(gate, up))
        return checkpoint_name(out, MLP_WO)


# Block

LAYER_INPUT = "decoder_layer_input"


class Block(nn.Module):
    """One layer: attention, then MLP, each normed before and added back."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        x = checkpoint_name(constrain(x, config.mesh, "batch"), LAYER_INPUT)
        normed = RMSNorm(config.norm_epsilon, name="attention_norm")(x)
        x = x + dropout(Attention(config, name="attention")(normed, rotary))
        normed = RMSNorm(config.norm_epsilon, name="mlp_norm")(x)
        return x + dropout(MLP(config, name="mlp")(normed))


# Model


class Llama(nn.Module):
    """Token embedding, a stack of blocks, a final norm, tied or own output.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from remat.models.llama import Llama, PRESETS
        >>> model = Llama(PRESETS["llama-tiny"])
        >>> tokens = jnp.zeros((2, 16), jnp.int32)
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> model.apply({"params": params}, tokens).shape
        (2, 16, 256)
    """

    config: LlamaConfig

    def setup(self):
        config = self.config
        self.token_embedder = embedder(config)
        self.output_embedder = None if config.tie_embeddings else embedder(config)
        self.layers = make_layers(
            lambda: Block(config), config.n_layers, config.scan_layers
        )
        self.final_norm = RMSNorm(config.norm_epsilon)

    def __call__(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Returns fp32 logits of the next word at each place."""
        hidden = self.hidden(tokens, deterministic=deterministic)
        return unembed(hidden, self._output_embedding())

    def hidden(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Returns the final hidden states, before the vocabulary."""
        config = self.config
        rotary = rotary_table(
            tokens.shape[1], config.d_head, config.rope_theta, config.rope_scaling
        )

        def block(layer: Block, x: jax.Array) -> jax.Array:
            return layer(x, rotary, deterministic=deterministic)

        x = self.token_embedder(tokens)
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
        config = self.config
        return cross_entropy(
            self.hidden(tokens, deterministic=deterministic),
            self._output_embedding(),
            targets,
            n_chunks=config.loss_chunks,
            mesh=config.mesh,
        )

    def _output_embedding(self) -> Float[Array, "V D"]:
        if self.output_embedder is None:
            return self.token_embedder.embedding
        return self.output_embedder.embedding


def embedder(config: LlamaConfig) -> nn.Embed:
    """A row of `d_model` numbers for each word, initially of deviation 0.02."""
    return nn.Embed(
        config.vocab_size,
        config.d_model,
        dtype=config.dtype,
        embedding_init=nn.initializers.normal(0.02),
    )


def _published(
    n_layers: int, n_heads: int, d_model: int, d_mlp: int, stretched: float, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        d_model=d_model,
        d_mlp=d_mlp,
        tie_embeddings=tied,
        rope_scaling=RopeScaling(factor=stretched),
    )


# The published sizes, and one for tests: bytes as words, seconds on a CPU.
PRESETS = {
    "llama-3.2-1b": _published(16, 32, 2048, 8192, stretched=32.0, tied=True),
    "llama-3.2-3b": _published(28, 24, 3072, 8192, stretched=32.0, tied=True),
    "llama-3.1-8b": _published(32, 32, 4096, 14336, stretched=8.0, tied=False),
    "llama-3.1-70b": _published(80, 64, 8192, 28672, stretched=8.0, tied=False),
    "llama-tiny": LlamaConfig(
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=64,
        d_mlp=128,
        vocab_size=256,
        loss_chunks=2,
    ),
}
