"""What a region computes, as a short text: equal regions have equal fingerprints.

The text of a jaxpr differs between JAX versions; its primitives, shapes and edges do
not, so they are what counts. Calls are looked through, since what is a call and what
is not differs as well.
"""

import collections
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat

_PARAMETERS = ("dimension_numbers", "length", "reverse", "axes", "permutation")
"""Parameters that change what an equation costs and read the same in all versions."""


def fingerprint(jaxpr: jec.Jaxpr) -> str:
    """A digest of a jaxpr's primitives, shapes, edges and checkpoint names.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f, g = jax.make_jaxpr(jnp.sin)(1.0), jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
        >>> fingerprint(f.jaxpr) == fingerprint(g.jaxpr)
        True
    """
    text = "\n".join(_lines(jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def inventory(jaxpr: jec.Jaxpr) -> tuple[tuple[str, ...], dict[str, int]]:
    """What a fingerprint is of, for telling what changed: input types, and how many
    of each operation there are.
    """
    inputs = tuple(map(_type, [*jaxpr.constvars, *jaxpr.invars]))
    written = (line.partition(" = ")[2].split(" ", 1)[0] for line in _lines(jaxpr))
    return inputs, dict(collections.Counter(filter(None, written)))


def _lines(jaxpr: jec.Jaxpr) -> Iterator[str]:
    env: dict[Any, str] = {}
    numbers = itertools.count()
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    env.update((var, f"i{n}") for n, var in enumerate(inputs))
    yield "in " + " ".join(_type(var) for var in inputs)
    yield from _body(jaxpr, env, numbers)
    yield "out " + " ".join(_read(atom, env) for atom in jaxpr.outvars)


def _body(
    jaxpr: jec.Jaxpr, env: dict[Any, str], numbers: Iterator[int]
) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        operands = [_read(atom, env) for atom in eqn.invars]
        if eqn.primitive.name in compat.CALL_PRIMITIVES:
            called = compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))
            env.update(zip(called.invars, operands, strict=False))
            yield from _body(called, env, numbers)
            results = [_read(atom, env) for atom in called.outvars]
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        if eqn.primitive.name == "reshard":
            # Where a value lies is no part of what it is: NNX under a mesh, jax 0.10.
            env.update(zip(eqn.outvars, operands, strict=True))
            continue
        env.update((var, f"v{next(numbers)}") for var in eqn.outvars)
        types = " ".join(_type(var) for var in eqn.outvars)
        yield f"{types} = {_operation(eqn)} {' '.join(operands)}"
        for sub in compat.subjaxprs(eqn.params):
            yield from _lines(compat.open_jaxpr(sub))


def _operation(eqn: jec.JaxprEqn) -> str:
    name = eqn.primitive.name
    if name in compat.REGION_PRIMITIVES:
        return "checkpoint"
    if name == compat.name_p.name:
        return f"name={eqn.params['name']}"
    known = [f"{key}={eqn.params[key]}" for key in _PARAMETERS if key in eqn.params]
    return " ".join([name, *known])


def _type(var: Any) -> str:
    aval = var.aval
    if not hasattr(aval, "shape"):
        return type(aval).__name__
    return f"{getattr(aval, 'dtype', '?')}{list(aval.shape)}"


def _read(atom: Any, env: dict[Any, str]) -> str:
    return _type(atom) if compat.is_literal(atom) else env[atom]
