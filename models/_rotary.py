"""Rotary positions, and Llama 3.1's stretching of them to longer contexts.

Su et al. 2021, "RoFormer". Pairs are (x[i], x[i + H/2]), as in the weights that Meta
and Hugging Face publish for Transformers.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotary frequencies to longer contexts."""

    factor: float
    """How much slower the slowest pairs turn."""
    low_frequency_factor: float = 1.0
    """Pairs that turn less often than this in the original context are stretched."""
    high_frequency_factor: float = 4.0
    """Pairs that turn more often than this stay."""
    original_context: int = 8192
    """Tokens of the context before stretching."""


Rotary = tuple[Float[Array, "T H/2"], Float[Array, "T H/2"]]


def rotary_table(
    n_tokens: int, d_head: int, theta: float, scaling: RopeScaling | None
) -> Rotary:
    """Returns fp32 (cosine, sine) of each place's angle in each rotary pair."""
    pair = jnp.arange(0, d_head, 2, dtype=jnp.float32)
    frequency = theta ** -(pair / d_head)  # radians a token
    if scaling is not None:
        frequency = stretch(frequency, scaling)
    angle = jnp.arange(n_tokens, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def stretch(frequency: Float[Array, " P"], scaling: RopeScaling) -> Float[Array, " P"]:
    """Returns slow frequencies divided by the factor, fast ones as they are."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share_kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (share_kept + (1 - share_kept) / scaling.factor)


def rotate(x: Float[Array, "B T N H"], rotary: Rotary) -> Float[Array, "B T N H"]:
    """Turns each pair (x[i], x[i + H/2]) by its place's angle, in fp32."""
    cosine, sine = (table[:, None, :] for table in rotary)  # (T, 1, H/2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
