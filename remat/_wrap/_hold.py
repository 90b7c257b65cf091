"""Carry what JAX cannot trace through it, as part of the tree's structure.

`jax.checkpoint` traces every leaf of its arguments, so a flag becomes a tracer and
a string an error. Here such a leaf becomes a `Static`: a pytree node without
leaves, which JAX keeps in the tree's structure and compares when it looks for a
region that it has traced before.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.core import Tracer

from remat._regions._flatten import is_traceable

ArgsAndKwargs = tuple[tuple[Any, ...], dict[str, Any]]


class StaticArgumentError(TypeError):
    """An argument that must be a Python value is traced, or cannot be compared."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Static:
    """A Python value that stays one while the arrays around it are traced."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], "Static"]:
        return (), self

    @classmethod
    def tree_unflatten(cls, static: "Static", _: Sequence[Any]) -> "Static":
        return static

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        kind = type(self.value)
        if kind in (float, complex):  # 0.0 == -0.0, yet they are not the same number
            return kind, repr(self.value)
        if not _is_hashable(self.value):  # may change in place: equal to nothing else
            return kind, id(self)
        return kind, self.value


def hold(tree: Any, keep: Callable[[Any], bool] = lambda leaf: False) -> Any:
    """`tree` with each leaf that JAX would not trace as it is made `Static`.

    Args:
        tree: Any pytree.
        keep: Tells which objects to leave alone, as leaves (Flax modules, which
            Flax's own lifting must see).
    """

    def hold_leaf(leaf: Any) -> Any:
        return leaf if keep(leaf) or is_traceable(leaf) else Static(leaf)

    return jax.tree.map(
        hold_leaf, tree, is_leaf=lambda x: keep(x) or isinstance(x, Static)
    )


def release(tree: Any, keep: Callable[[Any], bool] = lambda leaf: False) -> Any:
    """The inverse of `hold`."""

    def is_held(x: Any) -> bool:
        return isinstance(x, Static)

    return jax.tree.map(
        lambda leaf: leaf.value if is_held(leaf) else leaf,
        tree,
        is_leaf=lambda x: is_held(x) or keep(x),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Which arguments of a function are static, by name."""

    fn: Callable[..., Any]
    """The function whose signature gives positional arguments their names."""
    label: str
    """What errors call the function, with its module."""
    static: tuple[str, ...]
    """Names of the arguments held static whole, whatever is in them."""

    def hold(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keep: Callable[[Any], bool] = lambda leaf: False,
    ) -> ArgsAndKwargs:
        """The call's arguments with the static ones, and untraceable leaves, held.

        Raises:
            StaticArgumentError: An argument named static is traced, or has no hash.
        """
        names = positional_names(self.fn, len(args))

        def hold_one(name: str, value: Any) -> Any:
            if name not in self.static or isinstance(value, Static):
                return hold(value, keep)
            self._check(name, value)
            return Static(value)

        held_args = tuple(hold_one(n, v) for n, v in zip(names, args, strict=True))
        return held_args, {name: hold_one(name, v) for name, v in kwargs.items()}

    def _check(self, name: str, value: Any) -> None:
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        if any(isinstance(x, Tracer) for x in arrays):
            raise StaticArgumentError(
                f"{self.label}: argument {name!r} is static, and was given a traced "
                f"value ({jax.typeof(arrays[0])}). Pass a Python value; where "
                "jax.jit, scan or vmap encloses the call, make the argument static "
                f"there too, e.g. jax.jit(..., static_argnames={name!r})."
            )
        if not _is_hashable(value):
            raise StaticArgumentError(
                f"{self.label}: argument {name!r} is static, so it must be hashable, "
                f"and was given {_describe(value)}. Pass a tuple for a list, a frozen "
                "dataclass for a dict; an array cannot be static."
            )

    def reraise(
        self, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> NoReturn:
        """Raise again what tracing raised for want of some argument's value.

        Raises:
            StaticArgumentError: Names the traced scalars among the arguments, one
                of which it must be; `error` itself where there are none.
        """
        names = positional_names(self.fn, len(args))
        named = [*zip(names, args, strict=True), *kwargs.items()]
        scalars = [f"{name!r} ({jax.typeof(v)})" for name, v in named if _is_scalar(v)]
        if not scalars:
            raise error
        raise StaticArgumentError(
            f"{self.label}: the body needs a Python value where it has a traced one. "
            f"Traced scalars among its arguments: {', '.join(scalars)}. Pass the one "
            "that is a flag or a size as a Python value (where jax.jit encloses the "
            "call, make it static there); static_argnames=(...) then guards it."
        ) from error


def positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional arguments of `fn`.

    Those that `*args` takes all have its name; where there is no signature, or more
    arguments than it has, names are empty.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [""] * count
    names = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [parameter.name] * max(0, count - len(names))
        elif parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameter.name)
    return (names + [""] * count)[:count]


def accepts_name(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` can be given an argument called `name`."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return name in parameters or takes_any


def argument_names(fn: Callable[..., Any]) -> Collection[str]:
    """The names in the signature of `fn`, where it has one."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _is_scalar(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.ndim == 0


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
