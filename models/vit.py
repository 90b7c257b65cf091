"""Vision Transformer in Flax Linen: config, attention, MLP, block, model.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words". Pre-norm blocks, exact GELU,
a class token, learned positions. Any image size that patches divide: the position
table keeps the grid it was trained on and is interpolated to the image's own, so one
set of parameters serves 224 and 1024 pixels. Parameters are fp32, computation bf16.

Tensors carry the names MaxText gives to a decoder's, so its named policies apply.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from remat.models._attention import AttentionKind, attend
from remat.models._checks import check_config, check_multiple
from remat.models._layers import apply_layers, make_layers
from remat.models._sharding import constrain
from remat.models.gpt2 import LayerNorm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """Sizes and choices of one ViT."""

    n_layers: int
    """Blocks."""
    n_heads: int
    """Attention heads a block; the head size is `d_model // n_heads`."""
    d_model: int
    """Width of the residual stream."""
    image_size: int = 224
    """Side of the images a preset is built for, in pixels; others work as well."""
    patch_size: int = 16
    """Side of a patch, in pixels."""
    position_grid: int = 14
    """Side of the position table, in patches: what the weights were trained on."""
    n_channels: int = 3
    """Colours."""
    n_classes: int = 1000
    """Labels."""
    norm_epsilon: float = 1e-12
    """Added to the variance."""
    dropout: float = 0.0
    """Share of activations dropped while a dropout key is given."""
    dtype: Any = jnp.bfloat16
    """What is computed in. Parameters are fp32 always."""
    scan_layers: bool = True
    """One traced block and a loop over stacked parameters, or `n_layers` blocks."""
    policy: Any = "nothing"
    """What each block keeps; "none" makes no regions."""
    attention: AttentionKind = "xla"
    """How attention is computed: "xla", "pallas" (TPU flash) or "cudnn" (GPU flash)."""
    mesh: Mesh | None = None
    """Devices that arrays are spread over, as `_sharding.py` says; None for one."""

    def __post_init__(self):
        check_config(
            self,
            ("image_size", "patch_size", "position_grid", "n_channels", "n_classes"),
        )
        check_multiple(self, "image_size", "patch_size")

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        """Width inside the MLP."""
        return 4 * self.d_model


def dense(
    config: ViTConfig,
    features: int | tuple[int, ...],
    name: str | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
) -> nn.DenseGeneral:
    """A linear layer, initially normal with deviation 0.02."""
    return nn.DenseGeneral(
        features,
        axis=axis,
        dtype=config.dtype,
        kernel_init=nn.initializers.truncated_normal(0.02),
        name=name,
    )


# Attention

QUERY_PROJ = "query_proj"
KEY_PROJ = "key_proj"
VALUE_PROJ = "value_proj"
CONTEXT = "context"
ATTENTION_OUT = "attention_out"
OUT_PROJ = "out_proj"


class Attention(nn.Module):
    """Self-attention, every patch to every patch, with a projection in and out."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        config = self.config
        heads = (config.n_heads, config.d_head)
        query = checkpoint_name(dense(config, heads, "query")(x), QUERY_PROJ)
        key = checkpoint_name(dense(config, heads, "key")(x), KEY_PROJ)
        value = checkpoint_name(dense(config, heads, "value")(x), VALUE_PROJ)
        context = attend(
            query, key, value, causal=False, kind=config.attention, mesh=config.mesh
        )
        context = checkpoint_name(context, CONTEXT)
        context = checkpoint_name(context, ATTENTION_OUT)
        out = dense(config, config.d_model, "out", axis=(-2, -1))(context)
        return checkpoint_name(out, OUT_PROJ)


# MLP

MLP_WI = "mlpwi"
MLP_WO = "mlpwo"


class MLP(nn.Module):
    """Two linear layers with an exact GELU between."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        config = self.config
        x = checkpoint_name(dense(config, config.d_mlp, "wi")(x), MLP_WI)
        x = nn.gelu(x, approximate=False)
        return checkpoint_name(dense(config, config.d_model, "wo")(x), MLP_WO)


# Block

LAYER_INPUT = "decoder_layer_input"


class Block(nn.Module):
    """One layer: attention, then MLP, each normed before and added back."""

    config: ViTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], *, deterministic: bool = True
    ) -> Float[Array, "B P D"]:
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        x = checkpoint_name(constrain(x, config.mesh, "batch"), LAYER_INPUT)
        normed = LayerNorm(config.norm_epsilon, name="attention_norm")(x)
        x = x + dropout(Attention(config, name="attention")(normed))
        normed = LayerNorm(config.norm_epsilon, name="mlp_norm")(x)
        return x + dropout(MLP(config, name="mlp")(normed))


# Model


def patches(images: Float[Array, "B Y X C"], patch_size: int) -> Float[Array, "B P S"]:
    """Cuts images into rows of patches, each patch's pixels in one vector."""
    n_images, height, width, n_channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"images of {height} x {width} pixels do not divide into patches of "
            f"{patch_size} x {patch_size}; crop or resize them to a multiple"
        )
    rows, columns = height // patch_size, width // patch_size
    shape = (n_images, rows, patch_size, columns, patch_size, n_channels)
    cut = images.reshape(shape).swapaxes(2, 3)  # (B, rows, columns, y, x, C)
    return cut.reshape(n_images, rows * columns, -1)


def interpolate(
    table: Float[Array, "G G D"], rows: int, columns: int
) -> Float[Array, "rows*columns D"]:
    """Resizes a position table to another grid, bicubically, as PyTorch does."""
    along_y = cubic_weights(table.shape[0], rows)
    along_x = cubic_weights(table.shape[1], columns)
    resized = jnp.einsum("yg,gxd->yxd", along_y, table)
    resized = jnp.einsum("xg,ygd->yxd", along_x, resized)
    return resized.reshape(rows * columns, -1)


def cubic_weights(n_in: int, n_out: int) -> np.ndarray:
    """Returns the fp32 (n_out, n_in) matrix of cubic interpolation along one axis.

    Keys' kernel with a = -0.75 and clamped borders, which PyTorch uses and published
    weights were evaluated with; `jax.image.resize` has a = -0.5 and other borders.
    """
    place = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
    weights = np.zeros((n_out, n_in), np.float32)
    for offset in range(-1, 3):
        source = np.floor(place).astype(int) + offset
        distance = np.abs(place - source)
        near = (1.25 * distance - 2.25) * distance**2 + 1
        far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
        value = np.where(distance <= 1, near, far)
        np.add.at(weights, (np.arange(n_out), source.clip(0, n_in - 1)), value)
    return weights


class ViT(nn.Module):
    """Patches, class token, positions, a stack of blocks, a norm, a linear head.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from remat.models.vit import ViT, PRESETS
        >>> model = ViT(PRESETS["vit-tiny"])
        >>> images = jnp.zeros((2, 32, 32, 3))
        >>> params = model.init(jax.random.key(0), images)["params"]
        >>> model.apply({"params": params}, jnp.zeros((2, 64, 48, 3))).shape
        (2, 10)
    """

    config: ViTConfig

    def setup(self):
        config = self.config
        self.patch_embedder = dense(config, config.d_model)
        normal = nn.initializers.truncated_normal(0.02)
        self.class_token = self.param("class_token", normal, (config.d_model,))
        n_positions = 1 + config.position_grid**2
        self.positions = self.param("positions", normal, (n_positions, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = make_layers(
            lambda: Block(config), config.n_layers, config.scan_layers
        )
        self.final_norm = LayerNorm(config.norm_epsilon)
        self.head = dense(config, config.n_classes)

    def __call__(
        self, images: Float[Array, "B Y X C"], *, deterministic: bool = True
    ) -> Float[Array, "B L"]:
        """Returns fp32 logits of each image's label, from the class token."""
        hidden = self.hidden(images, deterministic=deterministic)
        return self.head(hidden[:, 0]).astype(jnp.float32)

    def hidden(
        self, images: Float[Array, "B Y X C"], *, deterministic: bool = True
    ) -> Float[Array, "B 1+P D"]:
        """Returns the final hidden states: class token first, then patches by row."""
        config = self.config

        def block(layer: Block, x: jax.Array) -> jax.Array:
            return layer(x, deterministic=deterministic)

        x = self.dropout(self._embed(images), deterministic=deterministic)
        x = apply_layers(
            self.layers, block, x, n_layers=config.n_layers, policy=config.policy
        )
        return self.final_norm(x)

    def loss(
        self,
        images: Float[Array, "B Y X C"],
        labels: Int[Array, " B"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, ""]:
        """Returns the mean cross-entropy of `labels` in nats, fp32."""
        logits = self(images, deterministic=deterministic)
        at_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)

    def _embed(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B 1+P D"]:
        config = self.config
        size, grid, dtype = config.patch_size, config.position_grid, config.dtype
        x = self.patch_embedder(patches(images, size).astype(dtype))
        positions = self.positions[1:]
        rows, columns = images.shape[1] // size, images.shape[2] // size
        if (rows, columns) != (grid, grid):
            table = positions.reshape(grid, grid, -1)
            positions = interpolate(table, rows, columns)
        x = x + positions.astype(dtype)
        first = (self.class_token + self.positions[0]).astype(dtype)
        first = jnp.broadcast_to(first, (x.shape[0], 1, config.d_model))
        return jnp.concatenate([first, x], axis=1)


_BASE = ViTConfig(n_layers=12, n_heads=12, d_model=768)
_LARGE = ViTConfig(n_layers=24, n_heads=16, d_model=1024)

# The published sizes at two resolutions, and one for tests: seconds on a CPU.
PRESETS = {
    "vit-b16": _BASE,
    "vit-l16": _LARGE,
    "vit-b16-1024": dataclasses.replace(_BASE, image_size=1024),
    "vit-l16-1024": dataclasses.replace(_LARGE, image_size=1024),
    "vit-tiny": ViTConfig(
        n_layers=2,
        n_heads=4,
        d_model=64,
        image_size=32,
        patch_size=8,
        position_grid=4,
        n_classes=10,
    ),
}
