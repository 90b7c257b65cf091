"""Turn a call of any function into a jaxpr over its arrays, and back.

A call has leaves that JAX can trace (arrays) and others that it cannot (bools,
strings, functions, dtypes, Python numbers): those are held static, on the way in
and on the way out, so that the function sees exactly what it was given.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from remat import _jax_compat as compat
from remat._regions._effects import naming_callbacks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One call of a function, as a program over its array leaves."""

    closed: compat.ClosedJaxpr
    """The program."""
    inputs: tuple[Any, ...]
    """The call's array leaves, in the order of the program's inputs."""
    finish: Callable[[Sequence[Any]], Any]
    """From the program's outputs to what the function returned."""

    def run(self, closed: compat.ClosedJaxpr) -> Any:
        """What the call returns when `closed` stands in for its program."""
        with naming_callbacks(lambda: closed):
            outputs = compat.evaluate(closed, self.inputs)
        return self.finish(outputs)


_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def record(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Recording:
    """Trace `fn(*args, **kwargs)` over the array leaves of its arguments.

    Args:
        fn: Any function that JAX can trace.
        args: Positional arguments: pytrees of arrays, `jax.ShapeDtypeStruct`s and
            anything else.
        kwargs: Keyword arguments, likewise.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [is_traceable(leaf) for leaf in leaves]
    returned: list[Split] = []

    def flat_fn(*arrays: Any) -> list[Any]:
        inner_args, inner_kwargs = treedef.unflatten(_merge(leaves, is_array, arrays))
        rest, results = Split.of(fn(*inner_args, **inner_kwargs))
        returned.append(rest)
        return results

    inputs = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes)
    try:
        closed, _ = compat.trace(flat_fn, *inputs)
    except _NEEDS_A_VALUE as error:
        error.add_note(
            "The whole function is traced here, as by jax.jit: its control flow cannot "
            "depend on the values of arrays. Flags and sizes that are Python values "
            "stay what they are."
        )
        raise
    return Recording(closed=closed, inputs=inputs, finish=returned[-1].join)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A pytree without the arrays in it."""

    leaves: list[Any]
    """The leaves, None for each array: a tracer must not outlive its trace."""
    is_array: list[bool]
    treedef: Any

    @staticmethod
    def of(tree: Any) -> "tuple[Split, list[Any]]":
        """A pytree taken apart into all the rest and the arrays in it."""
        leaves, treedef = jax.tree.flatten(tree)
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        arrays = [x for x, yes in zip(leaves, is_array, strict=True) if yes]
        rest = [None if isinstance(x, jax.Array) else x for x in leaves]
        return Split(rest, is_array, treedef), arrays

    def join(self, arrays: Sequence[Any]) -> Any:
        """The pytree with other arrays."""
        return self.treedef.unflatten(_merge(self.leaves, self.is_array, arrays))


def is_traceable(leaf: object) -> bool:
    """Whether an argument's leaf becomes an input of the traced program.

    Numbers (Python's and NumPy's scalars) do not: the function then sees the number
    it was given, which keeps its weak type and may be a size or a flag.
    """
    if isinstance(leaf, bool | int | float | complex | np.generic):
        return False
    return isinstance(leaf, jax.ShapeDtypeStruct) or jec.valid_jaxtype(leaf)


def _merge(
    leaves: Sequence[Any], is_array: Sequence[bool], arrays: Sequence[Any]
) -> list[Any]:
    """`leaves`, with the arrays among them replaced in turn."""
    fill = iter(arrays)
    return [
        next(fill) if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True)
    ]
