"""Write files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class UnwritableError(ValueError):
    """A file that cannot be written."""


def check_writable(path: str | Path) -> None:
    """Raises before hours of work are spent if `path` cannot be written.

    Raises:
        UnwritableError: If its folder is missing or not writable, or it is a folder.
    """
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        raise UnwritableError(f"cannot write {path}: there is no folder {folder}")
    if path.is_dir():
        raise UnwritableError(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise UnwritableError(f"cannot write {path}: the folder {folder} is read-only")


def write_text(path: str | Path, text: str) -> None:
    """Writes text to a temporary name beside `path` and renames it into place."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes bytes to a temporary name beside `path` and renames it into place."""
    path = Path(path)
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
