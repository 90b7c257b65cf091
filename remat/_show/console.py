"""Render what rich shows as plain text."""

from __future__ import annotations

from rich.console import Console, RenderableType


def as_text(shown: RenderableType, width: int = 100) -> str:
    """What a terminal without colors would show, without trailing blanks."""
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
