"""Mixtral in Flax Linen: Llama's attention, a mixture of experts for an MLP.

Jiang et al. 2024, "Mixtral of Experts". Each token goes through the 2 experts its
router likes best. Dropless: tokens are sorted by expert and multiplied as ragged
groups (`jax.lax.ragged_dot`), so no expert has a capacity and none is dropped.

What the router decided is discrete: were it recomputed with other rounding, a token
near a tie would take another expert in the backward pass than it took in the forward
pass. The choice is therefore read through one named value, `ROUTED_EXPERTS`, that a
policy can keep: `remat.policies.save_names("routed_experts")`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from remat.models._checks import positive
from remat.models._errors import PresetError
from remat.models._layers import apply_layers, make_layers
from remat.models._loss import cross_entropy, unembed
from remat.models._rotary import Rotary, rotary_table
from remat.models._sharding import constrain
from remat.models.llama import (
    LAYER_INPUT,
    Attention,
    LlamaConfig,
    RMSNorm,
    dense,
    embedder,
    swiglu,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtralConfig(LlamaConfig):
    """Sizes and choices of one Mixtral; `d_mlp` is the width of one expert."""

    n_experts: int = 8
    """Experts a block."""
    n_experts_per_token: int = 2
    """Experts each token goes through."""
    load_balance_weight: float = 0.02
    """Weight of the load-balance loss beside the cross-entropy."""

    def __post_init__(self):
        LlamaConfig.__post_init__(self)
        positive("n_experts_per_token", self.n_experts_per_token)
        if self.n_experts < self.n_experts_per_token:
            raise PresetError(
                f"n_experts must be at least n_experts_per_token, "
                f"given {self.n_experts} and {self.n_experts_per_token}"
            )


# Mixture of experts

ROUTED_EXPERTS = "routed_experts"
EXPERT_ORDER = "expert_order"
MLP_GATE = ("mlpwi_0", "moe_mlpwi_0")
MLP_UP = ("mlpwi_1", "moe_mlpwi_1")
MLP_WO = ("mlpwo", "moe_mlpwo")


def route(
    logits: Float[Array, "S E"], n_experts_per_token: int
) -> tuple[Int[Array, "S K"], Float[Array, "S K"], Float[Array, "S E"]]:
    """Chooses each token's experts.

    Returns:
        The experts' indices, their weights (of sum 1), and all probabilities, fp32.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    # top_k's own gradient would read its unnamed indices, and saving the name would
    # save nothing. Reading the weights through the named ones makes the name count.
    _, experts = jax.lax.top_k(
        jax.lax.stop_gradient(probabilities), n_experts_per_token
    )
    experts = checkpoint_name(experts, ROUTED_EXPERTS)
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    return experts, weights / weights.sum(-1, keepdims=True), probabilities


def load_balance_loss(
    experts: Int[Array, "S K"], probabilities: Float[Array, "S E"]
) -> Float[Array, ""]:
    """Returns n_experts * sum over experts of (tokens' share * mean probability).

    Fedus et al. 2021, "Switch Transformers", equation 4; K where the load is even.
    """
    n_experts = probabilities.shape[-1]
    chosen = jax.nn.one_hot(experts, n_experts, dtype=jnp.float32)  # (S, K, E)
    share = chosen.sum(1).mean(0)
    return n_experts * jnp.sum(share * probabilities.mean(0))


class Experts(nn.Module):
    """SwiGLU MLPs side by side; tokens come sorted by expert."""

    config: MixtralConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "R D"], n_rows: Int[Array, " E"]
    ) -> Float[Array, "R D"]:
        config = self.config
        d_model, d_mlp = config.d_model, config.d_mlp

        def matmul(x: jax.Array, name: str, d_in: int, d_out: int) -> jax.Array:
            shape = (config.n_experts, d_in, d_out)
            kernel = self.param(name, nn.initializers.normal(0.02), shape)
            return jax.lax.ragged_dot(x, kernel.astype(config.dtype), n_rows)

        gate = name_twice(matmul(x, "wi_0", d_model, d_mlp), MLP_GATE)
        up = name_twice(matmul(x, "wi_1", d_model, d_mlp), MLP_UP)
        return name_twice(matmul(swiglu(gate, up), "wo", d_mlp, d_model), MLP_WO)


def name_twice(x: jax.Array, names: tuple[str, str]) -> jax.Array:
    """Names a value as the MLP's and as the experts', as MaxText does."""
    return checkpoint_name(checkpoint_name(x, names[0]), names[1])


class MoE(nn.Module):
    """A router, the experts, and the weighted sum of what they return."""

    config: MixtralConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        config = self.config
        n_chosen = config.n_experts_per_token
        tokens = x.reshape(-1, config.d_model)  # (S, D)
        logits = dense(config, config.n_experts, "router")(tokens)
        experts, weights, probabilities = route(logits, n_chosen)

        order = jnp.argsort(experts.reshape(-1))  # rows (S * K) by expert
        order = checkpoint_name(order, EXPERT_ORDER)
        n_rows = jnp.bincount(experts.reshape(-1), length=config.n_experts)
        sorted_tokens = tokens[order // n_chosen]
        rows = Experts(config, name="experts")(sorted_tokens, n_rows)
        rows = rows[jnp.argsort(order)].reshape(*weights.shape, -1)  # (S, K, D)

        out = jnp.einsum("skd,sk->sd", rows, weights.astype(config.dtype))
        return out.reshape(x.shape), load_balance_loss(experts, probabilities)


# Block


class Block(nn.Module):
    """One layer: attention, then experts, each normed before and added back."""

    config: MixtralConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, *, deterministic: bool = True
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        x = checkpoint_name(constrain(x, config.mesh, "batch"), LAYER_INPUT)
        normed = RMSNorm(config.norm_epsilon, name="attention_norm")(x)
        x = x + dropout(Attention(config, name="attention")(normed, rotary))
        normed = RMSNorm(config.norm_epsilon, name="mlp_norm")(x)
        out, load_balance = MoE(config, name="moe")(normed)
        return x + dropout(out), load_balance


# Model


class Mixtral(nn.Module):
    """Token embedding, a stack of blocks, a final norm, an output of its own.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from remat.models.mixtral import Mixtral, PRESETS
        >>> model = Mixtral(PRESETS["mixtral-tiny"])
        >>> tokens = jnp.zeros((2, 16), jnp.int32)
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> model.apply({"params": params}, tokens).shape
        (2, 16, 256)
    """

    config: MixtralConfig

    def setup(self):
        config = self.config
        self.token_embedder = embedder(config)
        self.output_embedder = embedder(config)
        self.layers = make_layers(
            lambda: Block(config), config.n_layers, config.scan_layers
        )
        self.final_norm = RMSNorm(config.norm_epsilon)

    def __call__(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Returns fp32 logits of the next word at each place."""
        hidden, _ = self.hidden(tokens, deterministic=deterministic)
        return unembed(hidden, self.output_embedder.embedding)

    def hidden(
        self, tokens: Int[Array, "B T"], *, deterministic: bool = True
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """Returns the final hidden states and the layers' mean load-balance loss."""
        config = self.config
        rotary = rotary_table(
            tokens.shape[1], config.d_head, config.rope_theta, config.rope_scaling
        )

        def block(layer: Block, carry: tuple) -> tuple:
            x, load_balance = carry
            x, more = layer(x, rotary, deterministic=deterministic)
            return x, load_balance + more

        carry = (self.token_embedder(tokens), jnp.zeros((), jnp.float32))
        x, load_balance = apply_layers(
            self.layers, block, carry, n_layers=config.n_layers, policy=config.policy
        )
        return self.final_norm(x), load_balance / config.n_layers

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, ""]:
        """Returns mean cross-entropy in nats plus the weighted load-balance loss."""
        config = self.config
        hidden, load_balance = self.hidden(tokens, deterministic=deterministic)
        loss = cross_entropy(
            hidden,
            self.output_embedder.embedding,
            targets,
            n_chunks=config.loss_chunks,
            mesh=config.mesh,
        )
        return loss + config.load_balance_weight * load_balance


# The published size, and one for tests: bytes as words, seconds on a CPU.
PRESETS = {
    "mixtral-8x7b": MixtralConfig(
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_model=4096,
        d_mlp=14336,
        vocab_size=32000,
        rope_theta=1e6,
    ),
    "mixtral-tiny": MixtralConfig(
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=64,
        d_mlp=96,
        vocab_size=256,
        n_experts=4,
        loss_chunks=2,
    ),
}
