"""Which methods of a Flax module become regions."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any


def public_methods(cls: type, module: type) -> dict[str, Callable[..., Any]]:
    """The methods by which a module is called, and `__call__`.

    Args:
        cls: The module's class.
        module: Flax's class of all modules; what it defines, such as `setup`, `train`
            and `eval`, is left out.
    """
    defined = {
        name: value
        for base in reversed(cls.__mro__)
        if base not in module.__mro__
        for name, value in vars(base).items()
    }
    own = {name for base in module.__mro__ for name in vars(base)} - {"__call__"}
    return {
        name: fn
        for name, fn in defined.items()
        if isinstance(fn, types.FunctionType)
        and (name == "__call__" or not name.startswith("_"))
        and name not in own
    }


def needs_names(methods: Collection[str]) -> dict[str, bool]:
    """Whether a policy's names must appear in each method.

    A helper method may well emit none of the names that `__call__` does.
    """
    return {name: name == "__call__" or len(methods) == 1 for name in methods}
