"""What goes wrong with regions, and how it is told."""

import difflib
from collections.abc import Iterable, Sequence


class RegionError(ValueError):
    """A function has no region that can be changed as asked."""


class NoNamesFound(RegionError):
    """None of the checkpoint names a policy spells out is emitted."""


class MissingNamesWarning(UserWarning):
    """Some of the checkpoint names a policy spells out are not emitted."""

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class UnmatchedRuleWarning(UserWarning):
    """A policy's rule by module, size or dtype fits no value."""


class CapturedModuleError(RegionError):
    """A function uses an NNX module that it captures and was not passed."""


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names as a text, no more than `most` of them."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def near(wanted: Iterable[str], known: Sequence[str]) -> str:
    """A question that proposes known names close to the wanted ones, if any are."""
    matches = [
        m for name in wanted for m in difflib.get_close_matches(name, known, n=2)
    ]
    return f" Did you mean {listed(dict.fromkeys(matches))}?" if matches else ""
