"""Regions of NNX modules: classes, instances and functions of them.

`flax.nnx`'s split and merge of inputs makes the modules among the arguments pytrees
outside the region and modules again inside it, and writes their state (rng counts,
batch statistics, sown values) back. Checked on flax 0.12.8 and 0.12.12.

Imported only where flax.nnx is loaded already.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from remat._wrap._hold import Arguments, hold, release
from remat._wrap._methods import needs_names, public_methods
from remat._wrap._wrap import TRACE_ERRORS, Rule, check_names

_TAG = "remat"

_inside: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "inside", default=frozenset()
)
"""Modules whose region is being traced: their own methods are part of it."""


def wrap(target: Any, rule: Rule, static: tuple[str, ...]) -> Any:
    """An NNX class or instance whose public methods are regions."""
    if isinstance(target, type):
        return wrap_class(target, rule, static)
    # Shares the module's variables and submodules: nothing is copied, and an
    # optimizer or checkpoint sees the same state through either.
    twin = object.__new__(wrap_class(type(target), rule, static))
    vars(twin).update(vars(target))
    return twin


def wrap_class(
    cls: type[nnx.Module], rule: Rule, static: tuple[str, ...]
) -> type[nnx.Module]:
    """A subclass of `cls`, of the same name, whose public methods are regions."""
    methods = public_methods(cls, nnx.Module)
    check_names(static, list(methods.values()), cls.__name__)
    strict = needs_names(methods)
    namespace = {
        name: _method(cls, fn, rule, static, strict[name])
        for name, fn in methods.items()
    }
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    make_class: Any = type(cls)
    return make_class(
        cls.__name__, (cls,), {**namespace, **kept, "__doc__": cls.__doc__}
    )


def call(
    fn: Callable[..., Any],
    rule: Rule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    strict: bool = True,
) -> Any:
    """Call a function of modules and held arguments as a region."""

    def pure(args: Any, kwargs: Any) -> Any:
        args, kwargs = release((args, kwargs), _is_node)
        with _within(args[0] if args else None):
            return hold(fn(*args, **kwargs), _is_node)

    region = rule.region(merge_inputs(pure, ctxtag=_TAG), strict)
    lifted = split_inputs(region, ctxtag=_TAG)
    return release(lifted(tuple(args), dict(kwargs)), _is_node)


def _method(
    cls: type,
    fn: Callable[..., Any],
    rule: Rule,
    static: tuple[str, ...],
    strict: bool,
) -> Callable[..., Any]:
    arguments = Arguments(fn, f"{cls.__name__}.{fn.__name__}", static)

    @functools.wraps(fn)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _inside.get():
            return fn(self, *args, **kwargs)
        held = arguments.hold((self, *args), kwargs, _is_node)
        try:
            return call(fn, rule, *held, strict)
        except TRACE_ERRORS as error:
            arguments.reraise(error, (self, *args), kwargs)

    return method


@contextlib.contextmanager
def _within(module: Any) -> Iterator[None]:
    token = _inside.set(_inside.get() | {id(module)})
    try:
        yield
    finally:
        _inside.reset(token)


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)
