"""One thing that `remat.lint` found."""

import dataclasses
from typing import Literal

Severity = Literal["error", "warning", "info"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that does nothing, or not what it seems to, and how to mend it."""

    code: str
    """The rule, such as `"unemitted-name"`; stable."""
    message: str
    """What is so, with names and sizes."""
    fix: str
    """What to do about it."""
    severity: Severity
    """`"error"`: asked for and not done; `"warning"`: done, and likely unwanted;
    `"info"`: good to know."""
    where: str = ""
    """Path of the region, and of how many like it; empty for the whole program."""
    source: str | None = None
    """The line it is about, as `"file.py:12"`, where known."""

    @property
    def rank(self) -> int:
        """Position of the severity, the worst first."""
        return _ORDER.index(self.severity)

    def __str__(self) -> str:
        places = [place for place in (self.where, self.source) if place]
        at = f" {', '.join(places)}:" if places else ""
        return f"{self.severity} [{self.code}]{at} {self.message} {self.fix}"
