"""Arrays that are zero but for one slice, as gradients of a slice are.

What adds such an array to another adds the slice alone, in place: XLA makes no array of
zeros for it. Counted as a sum of whole arrays, the gradients of weights that each step
of a loop reads by index would seem to be added up once for each step.
"""

import math
from typing import Any

from remat._jax_compat import is_literal, open_jaxpr, subjaxprs

_LOOPS = frozenset({"scan", "while", "cond"})


class Filled:
    """How many elements of a jaxpr's values can be other than zero, each jaxpr once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, dict[Any, int]]] = {}

    def of(self, jaxpr: Any) -> dict[Any, int]:
        """By variable, for those of which that is known; the others are full."""
        if id(jaxpr) not in self._done:
            found: dict[Any, int] = {}
            for eqn in jaxpr.eqns:
                found.update(self._results(eqn, found))
            self._done[id(jaxpr)] = (jaxpr, found)
        return self._done[id(jaxpr)][1]

    def _results(self, eqn: Any, known: dict[Any, int]) -> dict[Any, int]:
        name = eqn.primitive.name
        if name == "broadcast_in_dim":
            return {eqn.outvars[0]: 0} if _is_zero(eqn.invars[0]) else {}
        if name == "dynamic_update_slice":
            array, update = eqn.invars[:2]
            if is_literal(array) or known.get(array) != 0:
                return {}
            return {eqn.outvars[0]: _size(update)}
        programs = [] if name in _LOOPS else [*subjaxprs(eqn.params)]
        if len(programs) != 1:
            return {}
        inner = open_jaxpr(programs[0])
        filled = self.of(inner)
        if len(inner.outvars) != len(eqn.outvars):
            return {}
        return {
            var: filled[result]
            for var, result in zip(eqn.outvars, inner.outvars, strict=True)
            if not is_literal(result) and result in filled
        }


def n_added(eqn: Any, filled: dict[Any, int]) -> int:
    """Elements that a sum of two arrays adds."""
    return min(
        _size(atom) if is_literal(atom) else filled.get(atom, _size(atom))
        for atom in eqn.invars
    )


def _is_zero(atom: Any) -> bool:
    return is_literal(atom) and getattr(atom.val, "size", 1) == 1 and atom.val == 0


def _size(atom: Any) -> int:
    return math.prod(int(d) for d in getattr(atom.aval, "shape", ()))
