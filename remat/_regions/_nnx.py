"""Flax NNX modules in the arguments of a rewritten function.

An NNX module is mutable: a call changes its RNG counts, batch statistics and sown
values. A program over arrays cannot, so a call is recorded between two splits and
two merges (`nnx.update_context`), after which the caller's own modules hold what the
function left in its copies. A module that the function captures instead would be
frozen into the program, its changes lost: that is refused.

Flax is never imported here: where nobody has, nothing can be a module.
"""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat import _jax_compat as compat
from remat._regions._errors import CapturedModuleError
from remat._regions._flatten import Recording, is_traceable, record

_TAG = "remat"
_PASS_IT = (
    "Its state would be frozen into the rewritten program. Pass it as an argument: "
    "remat.with_policy(lambda model, x: model(x), policy)(model, x)."
)


@contextlib.contextmanager
def recorded(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Recording]:
    """Like `record`, with NNX modules allowed anywhere in the arguments.

    The recording is to be run inside this context: that writes the modules' new
    state back.

    Raises:
        CapturedModuleError: `fn` uses a module that it captures.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield record(fn, args, kwargs)
        return
    is_node = functools.partial(_is_node, nnx)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    others = [leaf for leaf in leaves if not is_node(leaf) and not is_traceable(leaf)]
    record_call = functools.partial(_record_checked, nnx, (fn, *others))
    if not any(map(is_node, leaves)):
        yield record_call(fn, args, kwargs)
        return
    with nnx.update_context(_TAG):
        pure_args = nnx.to_tree((tuple(args), dict(kwargs)), ctxtag=_TAG)

        def pure_fn(pure_args: Any) -> Any:
            args, kwargs = nnx.from_tree(pure_args, ctxtag=_TAG, is_inner=True)
            out = fn(*args, **kwargs)
            return nnx.to_tree((_only_nodes(nnx, (args, kwargs)), out), ctxtag=_TAG)

        recording = record_call(pure_fn, (pure_args,), {})

        def finish(outputs: Sequence[Any]) -> Any:
            pure_out = recording.finish(outputs)
            return nnx.from_tree(pure_out, ctxtag=_TAG, is_inner=False)[1]

        yield dataclasses.replace(recording, finish=finish)


def _record_checked(
    nnx: Any,
    objects: Sequence[Any],
    pure_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Recording:
    """`record(pure_fn, ...)`, refusing modules that are used by way of `objects`."""
    try:
        recording = record(pure_fn, args, kwargs)
    except _trace_context_error() as error:
        raise CapturedModuleError(
            f"The function changes an NNX module that it captures. {_PASS_IT}"
        ) from error
    used = {id(const) for const in _constants(recording.closed)}
    for module in _captured(objects, functools.partial(_is_node, nnx)) if used else ():
        state = module if isinstance(module, nnx.Variable) else nnx.state(module)
        if any(id(leaf) in used for leaf in jax.tree.leaves(state)):
            raise CapturedModuleError(
                f"The function captures an NNX module ({type(module).__name__}) and "
                f"reads it. {_PASS_IT}"
            )
    return recording


def _trace_context_error() -> type[Exception]:
    return sys.modules["flax.errors"].TraceContextError


def _is_node(nnx: Any, value: Any) -> bool:
    """Whether NNX updates a value in place (JAX's own references JAX handles)."""
    return nnx.graph.is_graph_node(value) and not nnx.variablelib.is_array_ref(value)


def _only_nodes(nnx: Any, tree: Any) -> Any:
    is_node = functools.partial(_is_node, nnx)
    return jax.tree.map(lambda x: x if is_node(x) else None, tree, is_leaf=is_node)


def _constants(jaxpr: compat.AnyJaxpr) -> Iterator[Any]:
    """The constants of a program and of the programs inside it."""
    if compat.is_closed(jaxpr):
        yield from jaxpr.consts
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        for sub in compat.subjaxprs(eqn.params):
            yield from _constants(sub)


def _captured(objects: Sequence[Any], is_node: Callable[[Any], bool]) -> Iterator[Any]:
    """The modules that functions and other objects reach.

    Looks at closures, defaults, bound methods, partial arguments, attributes of
    objects, and globals, through the functions that were defined in the same module.
    """
    seen: set[int] = set()
    pending = list(objects)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_node(value):
            yield value
        elif isinstance(value, types.FunctionType):
            pending.extend(_reached(value))
        elif isinstance(value, types.MethodType):
            pending.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            pending.extend((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, list | tuple | dict):
            pending.extend(jax.tree.leaves(value, is_leaf=is_node))
        elif not isinstance(value, types.ModuleType):
            pending.append(getattr(value, "__wrapped__", None))
            pending.extend(filter(is_node, getattr(value, "__dict__", {}).values()))


def _reached(fn: types.FunctionType) -> Iterator[Any]:
    yield getattr(fn, "__wrapped__", None)
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    for name in _names(fn.__code__):
        value = fn.__globals__.get(name)
        is_function = isinstance(value, types.FunctionType)
        if not (is_function or hasattr(value, "__wrapped__")):
            yield value
        elif value.__module__ == fn.__module__:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function and the functions inside it mention."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)
