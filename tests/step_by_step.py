"""Run a traced program with its scans as Python loops.

XLA takes most of a second for each nest of scans, and a sweep over lengths has
thousands. What differs between them is the nesting; the bodies of the innermost scans
are the same few. Here those are compiled, once each, and all around them is run
equation by equation.
"""

import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from remat import _jax_compat as compat
from remat._jaxprs._equations import single_equation

ARRANGING = {
    "concatenate": lambda eqn, *xs: [np.concatenate(xs, eqn.params["dimension"])],
    "reshape": lambda eqn, x: [np.reshape(x, eqn.params["new_sizes"])],
    "split": lambda eqn, x: np.split(
        x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"]
    ),
}
"""What only moves elements, and is of other shapes in each nest."""

QUICKLY = {"xla_backend_optimization_level": "0"}
"""Compiler options for programs that hardly run."""


class StepByStep:
    """Runs programs, and keeps what it compiled for the next."""

    def __init__(self):
        self._compiled = {}
        self._by_id = {}

    def run(self, closed, args):
        """The flat results of a closed jaxpr."""
        try:
            return self._run(closed, getattr(closed, "consts", ()), args)
        finally:
            self._by_id.clear()
            _holds_scan.cache_clear()

    def _run(self, jaxpr, consts, args):
        opened = compat.open_jaxpr(jaxpr)
        env = dict(zip(opened.constvars, consts, strict=True))
        env.update(zip(opened.invars, args, strict=True))
        for eqn in opened.eqns:
            values = [_read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, values), strict=True))
        return [_read(env, atom) for atom in opened.outvars]

    def _equation(self, eqn, values):
        if eqn.primitive.name in ARRANGING:
            return ARRANGING[eqn.primitive.name](eqn, *values)
        if not (_is_loop(eqn) or _calls_loop(eqn)):
            given = zip(eqn.invars, values, strict=True)
            operands = {v: x for v, x in given if not compat.is_literal(v)}
            alone = self._compiled_once(
                eqn, lambda: single_equation(eqn, list(operands))
            )
            return alone(*operands.values())
        if _is_loop(eqn):
            return self._scan(eqn, values)
        (inside,) = compat.subjaxprs(eqn.params)  # a call or a region
        return self._run(inside, getattr(inside, "consts", ()), values)

    def _scan(self, eqn, values):
        binders, body = compat.scan_binders(eqn), eqn.params["jaxpr"]
        consts, carry, xs = ([values[i] for i in part] for part in binders[:3])
        xs = [x if _is_key(x) else np.asarray(x) for x in xs]
        ys = []
        for i in _order(eqn):
            slices = [x[i] for x in xs]
            out = self._step(eqn, body, [*consts, *carry, *slices])
            carry = [out[i] for i in binders.carry_out]
            ys.append([out[i] for i in binders.ys])
        if eqn.params["reverse"]:
            ys.reverse()
        return [*carry, *map(_stack, zip(*ys, strict=True))]

    def _step(self, eqn, body, inputs):
        if _holds_scan(body):
            return self._run(body, getattr(body, "consts", ()), inputs)
        return self._compiled_once(eqn, lambda: body)(*inputs)

    def _compiled_once(self, eqn, program):
        """The compiled program of an equation, found by its text."""
        if id(eqn) not in self._by_id:
            closed = program()
            assert not getattr(closed, "consts", ()), "the text does not tell these"
            key = str(closed)
            if key not in self._compiled:
                fn = jec.jaxpr_as_fun(closed)
                self._compiled[key] = jax.jit(fn, compiler_options=QUICKLY)
            self._by_id[id(eqn)] = self._compiled[key], eqn  # none else gets this id
        return self._by_id[id(eqn)][0]


def _read(env, atom):
    return atom.val if compat.is_literal(atom) else env[atom]


def _order(eqn):
    steps = range(eqn.params["length"])
    return reversed(steps) if eqn.params["reverse"] else steps


@functools.cache
def _holds_scan(jaxpr):
    """Whether there is a scan that is to be run as a loop."""
    eqns = compat.open_jaxpr(jaxpr).eqns
    return any(_is_loop(eqn) or _calls_loop(eqn) for eqn in eqns)


def _is_loop(eqn):
    return eqn.primitive.name == "scan" and eqn.params["length"] > 0


def _calls_loop(eqn):
    return any(map(_holds_scan, compat.subjaxprs(eqn.params)))


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stack(slices):
    if _is_key(slices[0]):
        data = np.stack([jax.random.key_data(one) for one in slices])
        return jax.random.wrap_key_data(
            jnp.asarray(data), impl=jax.random.key_impl(slices[0])
        )
    return np.stack(slices)
