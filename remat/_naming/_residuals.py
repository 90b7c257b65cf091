"""List what a function keeps for its backward pass, and why."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._naming._naming import MARKS
from remat._naming._op_name import modules
from remat._naming._settle import is_inexact
from remat._regions._flatten import record

_COPIES = frozenset({"name", "reduce_precision", "device_put", "copy", "copy_p"})
"""Equations that hand a value on: what made it stands before them."""
_CALLS = (
    compat.CALL_PRIMITIVES
    | compat.REGION_PRIMITIVES
    | {"custom_jvp_call", "custom_vjp_call", "eval_jaxpr"}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """A value that the forward pass keeps for the backward pass."""

    label: str
    """What it is, for a reader: `"attention/query: add"`, `"argument: params['w']"`."""
    is_argument: bool
    """Whether it is an argument of the function, which is in memory in any case."""
    module_path: str
    """Flax module path or named scopes of what made it; empty where there is none."""
    primitive: str | None
    """Primitive that made it; None for arguments and constants."""
    checkpoint_name: str | None
    """The name that the model's code gives it."""
    shape: tuple[int, ...]
    """Shape; of one step, where it was made in a scan."""
    dtype: str
    """Its dtype."""
    times: int
    """How many steps it is kept of."""
    bytes: int
    """Size of all steps together."""
    on_host: bool
    """Whether it is moved to host memory."""
    source: str | None
    """Line that made it, as `"file.py:12"`."""
    why: str
    """The first equation of the backward pass that reads it."""


def residuals(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Residual, ...]:
    """List what is kept for the backward pass of a function.

    Nothing is run or allocated. The policies of the regions in `fn` count, so
    `remat.residuals(remat.with_policy(loss, policy), *args)` shows what a policy keeps.

    Args:
        fn: Any function that JAX can differentiate in reverse.
        *args: What it is called with: arrays, `jax.ShapeDtypeStruct`s, pytrees of
            them, and static values.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        The kept values, largest first, each once; arguments that the backward pass
        reads are among them.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
        >>> [r.label for r in remat.residuals(lambda w: jnp.sin(x @ w).sum(), w)]
        ['constant', 'cos']
    """
    recording = record(fn, args, kwargs)
    forward, backward, n_kept = _passes(recording.closed, recording.inputs)
    jaxpr = compat.open_jaxpr(forward)
    kept = jaxpr.outvars[len(jaxpr.outvars) - n_kept :]
    readers = _first_readers(compat.open_jaxpr(backward), n_kept)
    names = _argument_names(args, kwargs, recording.inputs)
    found: dict[Any, Residual] = {}
    for position, atom in enumerate(kept):
        if compat.is_literal(atom) or atom in found:
            continue
        origin = _origin(jaxpr, atom)
        found[atom] = _residual(origin, atom, names, readers.get(position))
    return tuple(sorted(found.values(), key=lambda r: (-r.bytes, r.label)))


def _passes(closed: Any, inputs: Sequence[Any]) -> tuple[Any, Any, int]:
    """The forward pass with what it keeps as results; the backward pass from those."""
    varying = [i for i, v in enumerate(closed.in_avals) if is_inexact(v)]
    pullback: list[Any] = []

    def forward(*flat: Any) -> Any:
        def function(*given: Any) -> list[Any]:
            values = dict(zip(varying, given, strict=True))
            every = [values.get(i, x) for i, x in enumerate(flat)]
            return compat.evaluate(closed, every)

        results, vjp = jax.vjp(function, *(flat[i] for i in varying))
        leaves, treedef = jax.tree.flatten(vjp)
        pullback.append(treedef)
        return results, leaves

    def backward(leaves: Any, cotangents: Any) -> Any:
        return pullback[-1].unflatten(leaves)(cotangents)

    traced, (results, leaves) = compat.trace(forward, *inputs)
    cotangents = [_cotangent(x) for x in results]
    return traced, compat.trace(backward, leaves, cotangents)[0], len(leaves)


def _cotangent(result: Any) -> Any:
    if is_inexact(result):
        return jax.ShapeDtypeStruct(result.shape, result.dtype)
    return jax.ShapeDtypeStruct(result.shape, jax.dtypes.float0)


# --- where a kept value comes from


@dataclasses.dataclass(frozen=True, slots=True)
class _Origin:
    eqn: jec.JaxprEqn | None
    """The equation that made it; None for an argument or a constant."""
    argument: int | None = None
    """Position among the program's arguments."""
    scopes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    times: int = 1
    role: str | None = None
    """What it is in a scan, when nothing in the body made it."""


def _origin(jaxpr: jec.Jaxpr, var: Any) -> _Origin:
    """What made a variable, looked for through copies, calls and scan bodies."""
    if var in jaxpr.invars:
        return _Origin(None, argument=jaxpr.invars.index(var))
    eqn = next((e for e in jaxpr.eqns if var in e.outvars), None)
    if eqn is None:
        return _Origin(None)
    position = eqn.outvars.index(var)
    primitive = eqn.primitive.name
    if primitive in _COPIES and not compat.is_literal(eqn.invars[position]):
        return _through_copy(jaxpr, eqn, eqn.invars[position])
    if primitive in _CALLS:
        return _through_call(jaxpr, eqn, position)
    if primitive == "scan":
        return _through_scan(eqn, position)
    return _Origin(eqn, scopes=compat.scopes(eqn))


def _through_copy(jaxpr: jec.Jaxpr, eqn: jec.JaxprEqn, operand: Any) -> _Origin:
    origin = _origin(jaxpr, operand)
    if eqn.primitive is not compat.name_p:
        return origin
    if eqn.params["name"].startswith(MARKS):
        return origin
    return dataclasses.replace(origin, names=(eqn.params["name"], *origin.names))


def _through_call(jaxpr: jec.Jaxpr, eqn: jec.JaxprEqn, position: int) -> _Origin:
    body = compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))
    atom = body.outvars[position]
    if compat.is_literal(atom):
        return _Origin(eqn, scopes=compat.scopes(eqn))
    origin = _origin(body, atom)
    if origin.argument is not None:
        operand = eqn.invars[origin.argument]
        if compat.is_literal(operand):
            return _Origin(eqn, scopes=compat.scopes(eqn))
        outside = _origin(jaxpr, operand)
        return dataclasses.replace(outside, names=origin.names + outside.names)
    return dataclasses.replace(origin, scopes=compat.scopes(eqn) + origin.scopes)


def _through_scan(eqn: jec.JaxprEqn, position: int) -> _Origin:
    binders = compat.scan_binders(eqn)
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    atom = body.outvars[position]
    if position not in binders.ys or compat.is_literal(atom):
        return _Origin(eqn, scopes=compat.scopes(eqn), role="last carry of a scan")
    origin = _origin(body, atom)
    role = origin.role
    if origin.argument is not None:
        at = origin.argument
        role = "carry of a scan" if at in binders.init else "input of a scan"
    return dataclasses.replace(
        origin,
        eqn=origin.eqn or eqn,
        argument=None,
        scopes=compat.scopes(eqn) + origin.scopes,
        times=origin.times * eqn.params["length"],
        role=role,
    )


def _residual(
    origin: _Origin, atom: Any, names: Sequence[str], reader: str | None
) -> Residual:
    aval = atom.aval
    steps = _stacked(origin, tuple(aval.shape))
    path = "/".join(modules([p for scope in origin.scopes for p in scope.split("/")]))
    primitive = None if origin.eqn is None else origin.eqn.primitive.name
    if origin.argument is not None:
        label = f"argument: {names[origin.argument]}"
    elif origin.eqn is None:
        label = "constant"
    else:
        what = origin.role or primitive
        label = f"{path}: {what}" if path else f"{what}"
    itemsize = getattr(aval.dtype, "itemsize", 0)
    return Residual(
        label=label,
        is_argument=origin.argument is not None,
        module_path=path,
        primitive=None if origin.role else primitive,
        checkpoint_name=origin.names[-1] if origin.names else None,
        shape=tuple(aval.shape)[len(steps) :],
        dtype=str(aval.dtype),
        times=math.prod(steps),
        bytes=math.prod(aval.shape) * itemsize,
        on_host="host" in str(getattr(aval, "memory_space", "")).lower(),
        source=None if origin.eqn is None else compat.source_line(origin.eqn),
        why=f"read by {reader}" if reader else "read by nothing",
    )


def _stacked(origin: _Origin, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The leading dimensions that are the steps of the scans around it."""
    n = 0
    while math.prod(shape[:n]) < origin.times and n < len(shape):
        n += 1
    return shape[:n]


def _argument_names(
    args: Sequence[Any], kwargs: Any, inputs: Sequence[Any]
) -> list[str]:
    """How a reader would write each array argument: `args[0]['w']`."""
    by_id = {id(leaf): i for i, leaf in enumerate(inputs)}
    names = ["?"] * len(inputs)
    leaves, _ = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    for path, leaf in leaves:
        if id(leaf) in by_id and names[by_id[id(leaf)]] == "?":
            where = jax.tree_util.keystr(path[1:])
            kind = "args" if path[0] == jax.tree_util.SequenceKey(0) else "kwargs"
            names[by_id[id(leaf)]] = kind + where
    return names


# --- who reads it


def _first_readers(jaxpr: jec.Jaxpr, n_kept: int) -> dict[int, str]:
    readers: dict[int, str] = {}
    for position, var in enumerate(jaxpr.invars[:n_kept]):
        reader = next(_readers(jaxpr, var, ()), None)
        if reader:
            readers[position] = reader
    return readers


def _readers(jaxpr: jec.Jaxpr, var: Any, scopes: tuple[str, ...]) -> Iterator[str]:
    """The equations that read a variable, inside calls and loops too, in order."""
    for eqn in jaxpr.eqns:
        positions = [
            i for i, v in enumerate(eqn.invars) if not compat.is_literal(v) and v is var
        ]
        if not positions:
            continue
        inner_scopes = scopes + compat.scopes(eqn)
        if eqn.primitive.name in _CALLS or eqn.primitive.name == "scan":
            body = compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))
            for position in positions:
                yield from _readers(body, body.invars[position], inner_scopes)
        elif eqn.primitive.name in _COPIES:
            yield from _readers(jaxpr, eqn.outvars[0], scopes)
        else:
            yield _described(eqn, inner_scopes)


def _described(eqn: jec.JaxprEqn, scopes: tuple[str, ...]) -> str:
    parts = [part for scope in scopes for part in scope.split("/")]
    again = "the recomputed " if "rematted_computation" in parts else ""
    hidden = {"rematted_computation", "checkpoint"}
    path = "/".join(modules([part for part in parts if part not in hidden]))
    line = compat.source_line(eqn)
    at = f" at {path}" if path else ""
    return f"{again}{eqn.primitive.name}{at}" + (f" ({line})" if line else "")
