"""Build nested dataclasses from JSON data, and say what does not fit."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from remat._plan._errors import PlanError

T = TypeVar("T")


def read(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from what `dataclasses.asdict` and JSON made of it.

    Args:
        kind: The dataclass; its fields are dataclasses, tuples, mappings, plain values
            or unions of those with None.
        data: The JSON data.
        where: What it was read from, for errors.

    Raises:
        PlanError: A field is missing, unknown, or of another type.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where}: wanted an object, but found {_shown(data)}")
    hints = typing.get_type_hints(kind)
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(set(data) - {f.name for f in fields}):
        raise PlanError(f"{where}: unknown fields {', '.join(unknown)}")
    missing = [f.name for f in fields if f.name not in data and _is_required(f)]
    if missing:
        raise PlanError(f"{where}: missing fields {', '.join(missing)}")
    values = {
        name: _convert(hints[name], value, f"{where}, {name}")
        for name, value in data.items()
    }
    return kind(**values)


def _is_required(given: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return given.default is missing and given.default_factory is missing


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _convert(inner, value, where)
    if dataclasses.is_dataclass(hint):
        return read(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where}: wanted a list, but found {_shown(value)}")
        of = typing.get_args(hint)[0]
        return tuple(_convert(of, v, f"{where}[{i}]") for i, v in enumerate(value))
    wanted: Any = Mapping if origin is not None else hint
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    right = isinstance(value, wanted)
    if not right or (isinstance(value, bool) and wanted is not bool):
        name = getattr(wanted, "__name__", str(wanted))
        raise PlanError(f"{where}: wanted {name}, but found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
