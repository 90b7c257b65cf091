"""Regions of Linen modules: classes, instances, methods and functions of them.

Flax's own lifting does the work (`flax.linen.transforms.lift_transform` finds the
scopes that a call uses, `flax.core.lift.pack` turns their variables and rngs into
arguments). What differs from `flax.linen.remat`: the class keeps its name, from
which Flax makes the names of modules and so of parameters; every public method is
a region; and arguments are held, see `_hold`. Checked on flax 0.12.8 and 0.12.12.

Imported only where flax.linen is loaded already.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen as nn
from flax.core import lift
from flax.errors import TransformedMethodReturnValueError
from flax.linen.transforms import lift_transform

from remat._wrap._hold import Arguments, hold, release
from remat._wrap._methods import needs_names, public_methods
from remat._wrap._wrap import TRACE_ERRORS, Rule, check_names


def wrap(target: Any, rule: Rule, static: tuple[str, ...]) -> Any:
    """A Linen class or instance whose public methods are regions."""
    if isinstance(target, type):
        return wrap_class(target, rule, static)
    return _with_class(target, wrap_class(type(target), rule, static))


def wrap_class(
    cls: type[nn.Module], rule: Rule, static: tuple[str, ...]
) -> type[nn.Module]:
    """A subclass of `cls`, of the same name, whose public methods are regions.

    Inside a region the module is a `cls`, so a method called by another is part of
    the caller's region and does not make one of its own.
    """
    methods = _methods(cls)
    check_names(static, list(methods.values()), cls.__name__)
    strict = needs_names(methods)
    lifting = {name: {"rule": rule, "strict": strict[name]} for name in methods}
    wrapped: Any = lift_transform(_region_of_scopes, cls, methods=lifting)
    for name, fn in methods.items():
        setattr(wrapped, name, _method(cls, fn, vars(wrapped)[name], static))
    wrapped.__name__, wrapped.__qualname__ = cls.__name__, cls.__qualname__
    wrapped.__module__, wrapped.__doc__ = cls.__module__, cls.__doc__
    return wrapped


def wrap_method(fn: Callable[..., Any], rule: Rule, static: tuple[str, ...]) -> Any:
    """A method, in the definition of its class, as a region."""
    lifted = lift_transform(_region_of_scopes, fn, rule=rule)
    return _method(None, fn, lifted, static)


def call(
    fn: Callable[..., Any], rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of a bound module and held arguments as a region."""
    return lift_transform(_region_of_scopes, fn, rule=rule)(*args, **kwargs)


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The public methods; not those marked `nowrap`, nor functions that fields hold."""
    fields = {field.name for field in dataclasses.fields(cls)}
    return {
        name: fn
        for name, fn in public_methods(cls, nn.Module).items()
        if name not in fields and not hasattr(fn, "nowrap")
    }


def _method(
    cls: type | None,
    fn: Callable[..., Any],
    lifted: Callable[..., Any],
    static: tuple[str, ...],
) -> Callable[..., Any]:
    """The method that a user calls: holds the arguments and calls the lifted one."""

    @functools.wraps(fn)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:  # Flax refuses it, or it needs no variables
            return fn(self, *args, **kwargs)
        arguments = Arguments(fn, _label(cls or type(self), fn, self), static)
        (_, *held_args), held_kwargs = arguments.hold((self, *args), kwargs, _lifts)
        before = self._state.export()
        try:
            return lifted(self, *held_args, **held_kwargs)
        except TransformedMethodReturnValueError:  # a getter of a submodule
            self._state.reimport(before)
            return fn(self, *args, **kwargs)
        except TRACE_ERRORS as error:
            arguments.reraise(error, (self, *args), kwargs)

    return method


def _region_of_scopes(
    fn: Callable[..., Any], rule: Rule, strict: bool = True
) -> Callable[..., Any]:
    """Lift a region over Flax scopes, as `flax.core.lift.checkpoint` does."""

    def lifted(
        scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, args: Any, kwargs: Any
    ) -> Any:
        def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            scope = scope_fn(variables, rngs)
            out = fn(scope, *release(args), **release(kwargs))
            return hold(out), repack_fn(scope)

        pure.__name__ = getattr(fn, "__name__", "pure")
        out, variables_out = rule.region(pure, strict)(variables, rngs, args, kwargs)
        return release(out), variables_out

    packed = lift.pack(lifted, (True,), (True,), (True,), name="remat")
    return lambda scopes, *args, **kwargs: packed(scopes, args, kwargs)


def _with_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """The same module, of another class with the same fields.

    A module that a compact method has just made is registered in its parent, and
    its name is taken: there the new one takes its place. Any other is made anew.
    """
    parent, name = module.parent, module.name
    siblings = parent._state.children if isinstance(parent, nn.Module) else {}
    if name is not None and siblings.get(name) is module:
        twin = object.__new__(cls)
        vars(twin).update(vars(module))
        siblings[name] = twin
        return twin
    fields = [f.name for f in dataclasses.fields(module) if f.init]
    return cls(**{name: getattr(module, name) for name in fields})


def _lifts(value: Any) -> bool:
    """Whether Flax must see an argument whole: it lifts its scope too."""
    return isinstance(value, nn.Variable) or (
        isinstance(value, nn.Module) and value.scope is not None
    )


def _label(cls: type, fn: Callable[..., Any], module: nn.Module) -> str:
    path = "/".join(module.path)
    return f"{cls.__name__}.{fn.__name__}" + (f" (module {path!r})" if path else "")
