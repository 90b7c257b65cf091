"""Find the model a command names: a preset, or a function of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class LoadError(ValueError):
    """A MODEL argument that leads to no loss function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A loss with the arguments it is compiled with."""

    loss: Callable[..., Any]
    """`loss(*args)`."""
    args: tuple[Any, ...]
    """Arrays or shapes."""
    name: str
    """What to call it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for `compare`, `fit` and `plan` (`has_aux`, `argnums`, `optimizer`)."""
    describe: Mapping[str, Any] = field(default_factory=dict)
    """Facts to record: parameters, batch, sequence length."""


def load_model(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    mesh: str | Mapping[str, int] | None = None,
    target: str | None = None,
) -> Loaded:
    """Loads MODEL: a preset's name, or `package.module:function`.

    Args:
        name: A preset, or a function that returns `(loss_fn, args)` or those and a
            dict of options. It may take `batch`, `seq`, `mesh` and `target` as keyword
            arguments.
        batch: Batch size; None for the model's own.
        seq: Sequence length; None for the model's own.
        mesh: Devices to spread a preset over, as `remat.models.build` takes them.
        target: Whose devices these are.

    Returns:
        The loss and its arguments; nothing is allocated for a preset.

    Raises:
        LoadError: If there is no such module or function, or it returns other things.
        ValueError: If there is no such preset.
    """
    for option, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise LoadError(f"{option} must be at least 1, but is {value}")
    if ":" in name:
        sizes = {"batch": batch, "seq": seq}
        # Whose devices they are matters to a function that makes a mesh.
        of_mesh = {} if mesh is None else {"mesh": mesh, "target": target}
        return _own(name, {**sizes, **of_mesh})
    from remat import models

    built = models.build(name, batch=batch, seq=seq, mesh=mesh, target=target)
    return Loaded(
        loss=built.loss, args=tuple(built.args), name=name, describe=built.describe
    )


def _own(name: str, sizes: Mapping[str, Any]) -> Loaded:
    module_name, _, function_name = name.partition(":")
    make = _function(_module(module_name), module_name, function_name)
    given = {key: value for key, value in sizes.items() if value is not None}
    missing = [key for key in given if not _takes(make, key)]
    if missing:
        raise LoadError(
            f"{name} has no parameter {missing[0]!r}, so --{missing[0]} cannot be set; "
            f"write it as def {function_name}({missing[0]}=...)"
        )
    made = make(**given)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise LoadError(
            f"{name} must return (loss_fn, args) or (loss_fn, args, options), "
            f"but returned {_kind(made)}"
        )
    options = made[2] if len(made) == 3 else {}
    if not isinstance(made[1], tuple | list) or not isinstance(options, Mapping):
        raise LoadError(
            f"{name} must return args as a tuple and options as a dict, "
            f"but returned {_kind(made[1])} and {_kind(options)}"
        )
    return Loaded(
        loss=made[0],
        args=tuple(made[1]),
        name=name,
        options=dict(options),
        describe={key: given[key] for key in given if key != "target"},
    )


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise LoadError(
                f"no module {error.name!r}; run from the folder it is in, or set "
                "PYTHONPATH, or install its package"
            ) from error
        raise LoadError(f"importing {name} failed: {error}") from error
    except (ValueError, TypeError) as error:
        raise LoadError(f"{name!r} is not a module's name: {error}") from error


def _function(module: Any, module_name: str, name: str) -> Callable[..., Any]:
    found = vars(module).get(name)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(name, functions, n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise LoadError(f"module {module_name!r} has no function {name!r}{hint}")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(_kind(v) for v in value)})"
    return type(value).__name__
