"""Compiled answers kept on disk, by program, target, versions and options.

One entry is one zip file, written to a temporary name and renamed, so that a reader
never sees half of it and two processes may write the same one. An entry that cannot be
read is as good as none. `REMAT_CACHE=0` turns the cache off, and `REMAT_CACHE_DIR`
moves it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from remat._compile._compile import OutOfMemory, Program, XlaStats
from remat._targets._target import Target

_LIMIT_BYTES = 2 * 2**30
_FORMAT = 1


def cache_dir() -> Path | None:
    """The folder of the cache, or None where it is turned off."""
    if os.environ.get("REMAT_CACHE", "1").lower() in ("0", "off", "false", "no"):
        return None
    if given := os.environ.get("REMAT_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat"


def load(key: str, target: Target) -> Program | None:
    """Reads a compiled answer back.

    Args:
        key: The program's hash together with what it was compiled for.
        target: The target it was compiled for.

    Returns:
        The program without its executable, or None if it is not in the cache.
    """
    folder = cache_dir()
    if folder is None:
        return None
    try:
        with zipfile.ZipFile(folder / f"{key}.zip") as entry:
            meta = json.loads(entry.read("meta.json"))
            members = set(entry.namelist())
            protos = {
                name: entry.read(name) if name in members else None
                for name in ("hlo_proto", "codegen_proto")
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None
    if meta.pop("format", None) != _FORMAT:
        return None
    stats, oom = meta.pop("stats"), meta.pop("oom")
    try:
        return Program(
            target=target,
            executable=None,
            stats=None if stats is None else XlaStats(**stats),
            oom=None if oom is None else OutOfMemory(**oom),
            **protos,
            **meta,
        )
    except TypeError:
        return None


def store(key: str, program: Program) -> None:
    """Writes a compiled answer; a folder that cannot be written is left alone."""
    folder = cache_dir()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{key}.zip", program)
        _prune(folder)
    except OSError:
        return


def _write(path: Path, program: Program) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as entry:
                entry.writestr("meta.json", json.dumps(_meta(program)))
                for member in ("hlo_proto", "codegen_proto"):
                    if (proto := getattr(program, member)) is not None:
                        entry.writestr(member, proto)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _meta(program: Program) -> dict[str, Any]:
    left_out = {"target", "executable", "hlo_proto", "codegen_proto"}
    meta = {
        field.name: getattr(program, field.name)
        for field in dataclasses.fields(program)
        if field.name not in left_out
    }
    for part in ("stats", "oom"):
        if meta[part] is not None:
            meta[part] = dataclasses.asdict(meta[part])
    return {"format": _FORMAT, **meta}


def _prune(folder: Path) -> None:
    """Removes the entries used longest ago until the folder is within its limit."""
    entries = sorted(
        ((p, p.stat()) for p in folder.glob("*.zip")),
        key=lambda entry: entry[1].st_mtime,
    )
    total = sum(stat.st_size for _, stat in entries)
    for path, stat in entries:
        if total <= _LIMIT_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size
