"""The training step of the reference models: AdamW on a loss."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule = 3e-4,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """Returns AdamW as language models are trained with it.

    Args:
        learning_rate: a number or an Optax schedule.
        weight_decay: pulls matrices towards 0; norms and biases are left alone.
        b1: decay of the gradient's mean.
        b2: decay of the gradient's square.
        clip_norm: greatest global gradient norm; None for no clipping.
    """
    adamw = optax.adamw(
        learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed
    )
    if clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)


def decayed(params: Any) -> Any:
    """Returns which parameters decay: all but biases and norm scales.

    By name and not by rank, since a bias stacked over scanned layers is a matrix.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays, params)


def train_step(
    loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Returns `step(params, opt_state, batch) -> (params, opt_state, loss)`.

    The step is not compiled: `jax.jit(step, donate_argnums=(0, 1))` does that.

    Args:
        loss: `loss(params, batch)`, a scalar.
        optimizer: an Optax optimizer, such as `make_optimizer()`.
    """

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step
