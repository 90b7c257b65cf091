"""Turn a loss into the training step that is compiled, with the role of each array.

The step is what a run executes: `value_and_grad` of the loss, plus the optimizer's
update when one is given; then parameters and optimizer state are donated, as a real
step would. Only inexact arrays are differentiated, so that models which are pytrees
with other leaves (Equinox) or graphs (NNX) need no help.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from remat._report._roles import Roles


class StepError(ValueError):
    """A loss, its arguments or its optimizer from which no step can be built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A training step ready to be lowered."""

    fn: Callable[..., Any]
    """Function of `args`."""
    args: tuple[Any, ...]
    """Arrays, `ShapeDtypeStruct`s and static leaves, in the order `fn` takes them."""
    donate_argnums: tuple[int, ...]
    """Positions in `args` whose buffers the step may reuse."""
    roles: Roles | None
    """What each array argument and output is; None for a user's own step."""
    forward: Callable[..., Any]
    """The loss alone, as a function of `forward_args`."""
    forward_args: tuple[Any, ...]
    """What `forward` takes."""


def build_step(
    loss: Callable[..., Any],
    args: Sequence[Any],
    *,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    kwargs: dict[str, Any] | None = None,
) -> Step:
    """Builds the step that is compiled for a loss.

    Args:
        loss: `loss(*args, **kwargs) -> scalar`, or `(scalar, aux)` with `has_aux`.
        args: Arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
        optimizer: An optax `GradientTransformation`; its update is part of the step.
        step: `step(loss)` returns the whole step, which is called with `args`.
        has_aux: As in `jax.value_and_grad`.
        argnums: Which arguments are parameters, as in `jax.value_and_grad`.
        kwargs: Keyword arguments of the loss; their arrays count as batch.

    Returns:
        The step, its arguments and the role of each array.

    Raises:
        StepError: If `argnums` names no argument, nothing there can be differentiated,
            or `step` and `optimizer` are both given.
    """
    kwargs = dict(kwargs or {})
    if step is not None:
        return _own_step(loss, step, tuple(args), kwargs, optimizer)
    positions = _positions(argnums, len(args))
    pairs = [_split(args[i]) for i in positions]
    trainable = tuple(chosen for chosen, _ in pairs)
    if not jax.tree.leaves(trainable):
        raise StepError(
            f"argument {argnums} of the loss has no floating-point array to "
            "differentiate; set argnums to the position of the parameters"
        )
    others = (
        tuple(rest for _, rest in pairs),
        tuple(None if i in positions else arg for i, arg in enumerate(args)),
        kwargs,
    )

    def loss_of(trainable: Any, others: Any) -> Any:
        rests, batch, kwargs = others
        full = list(batch)
        for i, chosen, rest in zip(positions, trainable, rests, strict=True):
            full[i] = _merge(chosen, rest)
        return loss(*full, **kwargs)

    value_and_grad = jax.value_and_grad(loss_of, has_aux=has_aux)
    if optimizer is None:
        return _gradient_step(loss_of, value_and_grad, trainable, others, has_aux)
    return _optimizer_step(loss_of, value_and_grad, trainable, others, optimizer)


def _own_step(loss, step, args, kwargs, optimizer) -> Step:
    if optimizer is not None:
        raise StepError("step= builds the whole step: give it or optimizer=, not both")
    fn = step(loss)
    if not callable(fn):
        raise StepError(
            f"step= must return the step as a function of the loss's arguments, "
            f"but returned {type(fn).__name__}"
        )

    def own_step(args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def forward(args: Any, kwargs: Any) -> Any:
        return loss(*args, **kwargs)

    return Step(
        fn=own_step,
        args=(args, kwargs),
        donate_argnums=(),
        roles=None,
        forward=forward,
        forward_args=(args, kwargs),
    )


def _gradient_step(loss_of, value_and_grad, trainable, others, has_aux) -> Step:
    # XLA calls buffers by these arguments' names, and reports show them.
    def gradient_step(parameters: Any, batch: Any) -> Any:
        value, grads = value_and_grad(parameters, batch)
        # The aux goes last: how many arrays it holds is not known before tracing.
        return (value[0], grads, value[1]) if has_aux else (value, grads)

    return Step(
        fn=gradient_step,
        args=(trainable, others),
        donate_argnums=(),
        roles=Roles(
            arguments=_roles(parameters=trainable, batch=others),
            outputs=(("outputs", "loss"), *_roles(gradients=trainable)),
        ),
        forward=loss_of,
        forward_args=(trainable, others),
    )


def _optimizer_step(loss_of, value_and_grad, trainable, others, optimizer) -> Step:
    import optax

    opt_state = _laid_out_as(
        trainable,
        jax.eval_shape(optimizer.init, jax.tree.map(_shape, trainable)),
        optimizer,
    )

    def train_step(parameters: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(parameters, batch)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state, value

    return Step(
        fn=train_step,
        args=(trainable, opt_state, others),
        donate_argnums=(0, 1),
        roles=Roles(
            arguments=_roles(parameters=trainable, optimizer=opt_state, batch=others),
            outputs=_roles(parameters=trainable, optimizer=opt_state),
        ),
        forward=loss_of,
        forward_args=(trainable, others),
    )


def _laid_out_as(trainable: Any, opt_state: Any, optimizer: Any) -> Any:
    """The optimizer's state, each moment sharded as its parameter is."""
    if not any(_sharding(leaf) for leaf in jax.tree.leaves(trainable)):
        return opt_state
    import optax

    def as_its_parameter(moment: Any, parameter: Any) -> Any:
        if moment.shape != parameter.shape:  # factored moments are small
            return moment
        return jax.ShapeDtypeStruct(
            moment.shape, moment.dtype, sharding=_sharding(parameter)
        )

    return optax.tree_utils.tree_map_params(
        optimizer, as_its_parameter, opt_state, trainable
    )


def _sharding(leaf: Any) -> NamedSharding | None:
    """How a parameter is spread over several devices; None where it is not."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _positions(argnums: int | Sequence[int], n_args: int) -> tuple[int, ...]:
    given = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in given:
        if not -n_args <= i < n_args:
            raise StepError(f"argnums names argument {i}, but the loss has {n_args}")
    return tuple(i % n_args for i in given)


@dataclass(frozen=True, slots=True)
class _NnxRest:
    """What an NNX module holds besides its parameters."""

    graphdef: Any
    state: Any


jax.tree_util.register_pytree_node(
    _NnxRest, lambda r: ((r.graphdef, r.state), None), lambda _, c: _NnxRest(*c)
)


def _split(tree: Any) -> tuple[Any, Any]:
    """Splits an argument into what is trained and the rest."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):
        graphdef, params, rest = nnx.split(tree, nnx.Param, ...)
        return params, _NnxRest(graphdef, rest)
    chosen = jax.tree.map(lambda a: a if _is_inexact(a) else None, tree)
    rest = jax.tree.map(lambda a: None if _is_inexact(a) else a, tree)
    return chosen, rest


def _merge(chosen: Any, rest: Any) -> Any:
    if isinstance(rest, _NnxRest):
        nnx = sys.modules["flax.nnx"]
        # A copy, so that state changes stay inside the trace they happen in.
        return nnx.merge(rest.graphdef, chosen, rest.state, copy=True)
    return jax.tree.map(
        lambda a, b: b if a is None else a, chosen, rest, is_leaf=lambda a: a is None
    )


def _is_inexact(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf becomes an argument of the program; other leaves are static."""
    if isinstance(leaf, bool):
        return False
    return isinstance(leaf, int | float | complex | np.generic) or (
        hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    )


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, float | complex):
        leaf = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _roles(**trees: Any) -> tuple[tuple[str, str], ...]:
    """The (category, path) of every array in trees, in the order they are flattened."""
    name = {"optimizer": _optimizer_name, "batch": _batch_name}
    several = len(trees.get("parameters", trees.get("gradients", ()))) > 1
    return tuple(
        (category, name.get(category, _parameter_name)(path, several))
        for category, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if _is_array(leaf)
    )


def _parameter_name(path: Sequence[Any], several: bool) -> str:
    """Without the number of the argument, where one alone is differentiated."""
    return _joined(path if several else path[1:]) or "argument 0"


def _optimizer_name(path: Sequence[Any], several: bool) -> str:
    """`mu/layers/wi`: without places in optax's chain of transformations."""
    names = [key for key in path if not isinstance(key, jax.tree_util.SequenceKey)]
    first = path.index(names[0]) if names else 0
    below = path[first + 1 :]
    if below and isinstance(below[0], jax.tree_util.SequenceKey) and not several:
        below = below[1:]
    return _joined((*path[first : first + 1], *below))


def _batch_name(path: Sequence[Any], several: bool) -> str:
    """What is below the argument, which is told by its number where that is all."""
    del several
    if len(path) > 2:
        return _joined(path[2:])
    last = path[-1]
    is_position = isinstance(last, jax.tree_util.SequenceKey)
    return f"argument {last.idx}" if is_position else _joined(path[-1:])


def _joined(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")
