"""The only file that touches JAX's internals.

Everything here was checked on jax 0.10.2 and 0.12.0.1. Two differences shape it:

- 0.10 has `Jaxpr` (open) and `ClosedJaxpr` (with constants); in 0.12 they are one
  class, whose `.jaxpr` is itself.
- 0.12 can trace `jax.checkpoint` and `checkpoint_name` to other primitives, under
  the flag `jax_remat3`; programs are read with that flag off.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
from jax._src import config as _config  # remat3: 0.10.2 - 0.12.0.1
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.ad_checkpoint import name_p as name_p  # exported by JAX after 0.10.2
from jax._src.ad_checkpoint import remat_p as remat_p  # 0.10.2 - 0.12.0.1
from jax._src.lax import lax as _lax

# 0.12 keeps this name as another one for Jaxpr.
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jaxlib import xla_client as xla_client  # plugins by hand: 0.10.2 - 0.12.0.1

REGION_PRIMITIVES = frozenset({"checkpoint", "remat", "remat2"})
"""Names of the primitives that `jax.checkpoint` makes (`remat2`: 0.10 - 0.12)."""

CALL_PRIMITIVES = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Names of the primitives that only call their one jaxpr."""

AnyJaxpr = Any
"""A `Jaxpr` or a `ClosedJaxpr`, which are two classes in 0.10 and one in 0.12."""


def is_jaxpr(value: object) -> bool:
    """Whether `value` is a jaxpr, open or closed."""
    return isinstance(value, jec.Jaxpr | ClosedJaxpr)


def is_closed(value: object) -> bool:
    """Whether `value` is a jaxpr that carries its constants itself.

    In 0.12, where one class serves both, every jaxpr can carry its constants and
    the answer is True for each.
    """
    return isinstance(value, ClosedJaxpr)


def open_jaxpr(jaxpr: AnyJaxpr) -> jec.Jaxpr:
    """The open jaxpr inside a closed one; an open jaxpr as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def with_open(jaxpr: AnyJaxpr, new: jec.Jaxpr) -> AnyJaxpr:
    """`jaxpr` with its open part replaced; `jaxpr` itself when that is the same."""
    if open_jaxpr(jaxpr) is new:
        return jaxpr
    if is_closed(jaxpr) and not is_closed(new):
        return ClosedJaxpr(new, jaxpr.consts)  # 0.10: two classes
    return new


def subjaxprs(params: Mapping[str, Any]) -> Iterator[AnyJaxpr]:
    """The jaxprs in an equation's parameters, as they stand, in a fixed order."""
    for value in params.values():
        yield from _jaxprs_in(value)


def _jaxprs_in(value: Any) -> Iterator[AnyJaxpr]:
    if is_jaxpr(value):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs_in(item)


def map_jaxprs(
    params: Mapping[str, Any], fn: Callable[[AnyJaxpr], AnyJaxpr]
) -> dict[str, Any]:
    """Equation parameters with `fn` applied to each jaxpr as it stands.

    `fn` is called in the order of `subjaxprs`. Values without a jaxpr, and those
    that `fn` leaves alone, keep their identity: JAX caches compiled functions by it.
    """
    return {key: _map_value(value, fn) for key, value in params.items()}


def _map_value(value: Any, fn: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
    if is_jaxpr(value):
        return fn(value)
    if isinstance(value, tuple | list):
        items = [_map_value(item, fn) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # custom_linear_solve keeps its jaxprs in a named tuple.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def map_subjaxprs(
    params: Mapping[str, Any], fn: Callable[[jec.Jaxpr], jec.Jaxpr]
) -> dict[str, Any]:
    """Equation parameters with `fn` applied to each open jaxpr in them.

    Closed jaxprs stay closed over the same constants, tuples stay tuples.
    """
    return map_jaxprs(params, lambda jaxpr: with_open(jaxpr, fn(open_jaxpr(jaxpr))))


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a constant written in place."""
    return isinstance(atom, jec.Literal)


def is_dropped(var: Any) -> bool:
    """Whether an equation's output is used by nothing (printed as `_`)."""
    return isinstance(var, jec.DropVar)


def scopes(eqn: jec.JaxprEqn) -> tuple[str, ...]:
    """The `jax.named_scope` names around an equation, outermost first.

    Transformations on the name stack (`jvp`, `vmap`) are left out.
    """
    stack = eqn.source_info.name_stack.stack
    return tuple(frame.name for frame in stack if type(frame).__name__ == "Scope")


def scope_frames(eqn: jec.JaxprEqn) -> list[tuple[int, Any]]:
    """The `jax.named_scope`s around an equation, outermost first.

    Returns:
        For each its position on the name stack and its frame, which has a `name`.
        Entering a scope makes a new frame, so what has one frame object in common
        was traced in one call.
    """
    stack = enumerate(eqn.source_info.name_stack.stack)
    return [(i, frame) for i, frame in stack if type(frame).__name__ == "Scope"]


def function_name(jaxpr: AnyJaxpr) -> str | None:
    """The name of the Python function that was traced to `jaxpr`, where known."""
    info = getattr(jaxpr, "debug_info", None)
    return getattr(info, "func_name", None)


def function_source(jaxpr: AnyJaxpr) -> str | None:
    """The Python function that was traced to `jaxpr`, as `"name at file.py:12"`."""
    info = getattr(jaxpr, "debug_info", None)
    return getattr(info, "func_src_info", None)


def remat3_off() -> contextlib.AbstractContextManager[Any]:
    """A context in which `jax.checkpoint` traces to the ordinary equation."""
    return _config.remat3(False)


def trace(fn: Callable[..., Any], *flat_args: Any) -> tuple[ClosedJaxpr, Any]:
    """Trace `fn` to a closed jaxpr, with its regions as `checkpoint` equations.

    Args:
        fn: Takes and returns flat arrays (or pytrees of arrays).
        *flat_args: Arrays, tracers or `jax.ShapeDtypeStruct`s.

    Returns:
        The jaxpr, closed over what `fn` closes over, and the pytree of its
        outputs' shapes.
    """
    is_on = _config.remat3.value
    with remat3_off():
        try:
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*flat_args)
        except TypeError as error:
            if is_on:
                error.add_note(
                    "Programs are read with jax_remat3 off, where jax.checkpoint "
                    "ignores static_argnames; use static_argnums."
                )
            raise
    if _READS_REMAT3_WHEN_WRAPPING:
        closed = _with_ordinary_regions(closed, {})
    return closed, shapes


_READS_REMAT3_WHEN_WRAPPING = jax.__version_info__ < (0, 12)
"""Whether a function keeps the kind of region it was wrapped with (seen on 0.10.2)."""


def _with_ordinary_regions(jaxpr: AnyJaxpr, done: dict[int, AnyJaxpr]) -> AnyJaxpr:
    """A jaxpr with ordinary regions in place of those of `jax_remat3`."""
    if id(jaxpr) not in done:
        opened = open_jaxpr(jaxpr)
        eqns = [_with_ordinary_region(eqn, done) for eqn in opened.eqns]
        same = all(new is old for new, old in zip(eqns, opened.eqns, strict=True))
        new = opened if same else opened.replace(eqns=eqns)
        done[id(jaxpr)] = with_open(jaxpr, new)
    return done[id(jaxpr)]


def _with_ordinary_region(eqn: jec.JaxprEqn, done: dict[int, AnyJaxpr]) -> jec.JaxprEqn:
    primitive: Any = eqn.params.get("_prim")
    if type(primitive).__name__ == "RematTraced":
        body = _with_ordinary_regions(primitive.params["jaxpr"], done)
        params = dict(
            jaxpr=open_jaxpr(body),
            policy=primitive.params["policy"],
            prevent_cse=True,
            differentiated=False,
        )
        return eqn.replace(primitive=remat_p, params=params)
    params = map_jaxprs(eqn.params, lambda sub: _with_ordinary_regions(sub, done))
    if all(params[key] is eqn.params[key] for key in params):
        return eqn
    return eqn.replace(params=params)


def evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr on flat inputs, under whatever transformation is active."""
    return jec.jaxpr_as_fun(closed)(*inputs)


# --- for naming and planning: 0.10.2 - 0.12.0.1


class ScanBinders(NamedTuple):
    """Which operands and results of a `scan` equation are what, by position."""

    consts: tuple[int, ...]
    """Operands that every step reads."""
    init: tuple[int, ...]
    """Operands that the first step carries in."""
    xs: tuple[int, ...]
    """Operands that each step reads one slice of."""
    carry_out: tuple[int, ...]
    """Results that the last step carried out; in the order of `init`."""
    ys: tuple[int, ...]
    """Results that each step made one slice of."""


def scan_binders(eqn: jec.JaxprEqn) -> ScanBinders:
    """How a `scan` equation's operands and results (and its body's) are laid out."""
    params, n_in, n_out = eqn.params, len(eqn.invars), len(eqn.outvars)
    if "ft_in" in params:  # 0.12 keeps the layout as trees
        consts, init, xs = map(tuple, params["ft_in"].update(range(n_in)).unpack())
        carry_out, ys = map(tuple, params["ft_out"].update(range(n_out)).unpack())
        return ScanBinders(consts, init, xs, carry_out, ys)
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    first_xs = n_consts + n_carry
    return ScanBinders(
        consts=tuple(range(n_consts)),
        init=tuple(range(n_consts, first_xs)),
        xs=tuple(range(first_xs, n_in)),
        carry_out=tuple(range(n_carry)),
        ys=tuple(range(n_carry, n_out)),
    )


_OURS = "/remat/_"
_FRAMEWORKS = ("/flax/", "/haiku/", "/equinox/")


def source_line(eqn: jec.JaxprEqn) -> str | None:
    """`"file.py:12"`: the user's innermost line that made an equation.

    Frames of JAX and of this library are passed over, and those of the neural-network
    libraries unless no other is left.
    """
    frames = [
        frame
        for frame in _source_info_util.user_frames(eqn.source_info.traceback)
        if _OURS not in frame.file_name
    ]
    if not frames:
        return None
    own = (f for f in frames if not any(part in f.file_name for part in _FRAMEWORKS))
    frame = next(own, frames[0])
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}"


def made_here(eqn: jec.JaxprEqn) -> jec.JaxprEqn:
    """The equation as if the line that is running now had made it.

    What is traced in a trace of its own knows no line outside of that (0.12).
    """
    traceback = _source_info_util.current().traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile afresh in this thread: the persistent cache is neither read nor written.

    Turning the option off is not enough: whether the cache is used is decided once in
    a process, at its first compile (0.10.2 - 0.12.0.1), so the option would come too
    late, or turn the user's cache off for good.
    """
    from jax._src import compilation_cache  # 0.10.2 - 0.12.0.1

    original = compilation_cache.is_cache_used
    if not hasattr(original, "remat_original"):

        def is_cache_used(backend: Any) -> bool:
            return not getattr(_fresh, "on", False) and original(backend)

        is_cache_used.remat_original = original  # pyright: ignore
        compilation_cache.is_cache_used = is_cache_used
    before, _fresh.on = getattr(_fresh, "on", False), True
    try:
        yield
    finally:
        _fresh.on = before


_fresh = threading.local()


def lowered_platform(lowered: jax.stages.Lowered) -> str:
    """The platform that a lowered program would be compiled by: 0.10.2 - 0.12.0.1."""
    platform = lowered._lowering.compile_args["backend"].platform
    return "gpu" if platform == "cuda" else platform


# --- for tracing what takes an equation's place: 0.10.2 - 0.12.0.1


@contextlib.contextmanager
def at_place_of(eqn: jec.JaxprEqn, *, check_vma: bool) -> Iterator[None]:
    """Trace as where an equation was traced: with its mesh, and axes bound.

    Args:
        eqn: The equation.
        check_vma: As `jax.shard_map` around it was given; False without one.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
    with (
        eqn.ctx.manager,
        _core.extend_axis_env_nd(axes),
        _config._check_vma(check_vma),
    ):
        yield


def traced_as(eqn: jec.JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Trace as where an equation with programs in it was traced.

    Whether the `shard_map` around it checks what varies over its axes, the types tell.
    """
    inside = [var for sub in subjaxprs(eqn.params) for var in open_jaxpr(sub).invars]
    return at_place_of(eqn, check_vma=any(_varies(var.aval) for var in inside))


def n_shards(eqn: jec.JaxprEqn) -> int:
    """How many shards a `shard_map` equation runs its body for, side by side."""
    shape = eqn.params["mesh"].shape
    return math.prod(shape[axis] for axis in eqn.params["newly_manual_axes"])


def n_shards_around(eqn: jec.JaxprEqn) -> int:
    """How many shards the `shard_map`s that an equation stands in make."""
    mesh = eqn.ctx.cur_abstract_mesh
    return math.prod(mesh.shape[axis] for axis in mesh.manual_axes)


def _varies(aval: Any) -> bool:
    if hasattr(aval, "mat"):  # 0.12
        return bool(aval.mat.varying)
    return bool(getattr(aval, "vma", None))


def is_weak(atom: Any) -> bool:
    """Whether a variable's type is weak, as a Python number's is."""
    return getattr(atom.aval, "weak_type", False)


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """The array with its type weak, or not."""
    if getattr(jax.typeof(x), "weak_type", False) == weak_type:
        return x
    return _lax._convert_element_type(x, weak_type=weak_type)
