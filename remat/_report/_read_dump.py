"""Read the report of a program that another job compiled, from XLA's dump of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from remat._compile._dump import has_buffer_assignment
from remat._hlo import HloError, Module, parse
from remat._hlo._pause_gc import paused_gc
from remat._hlo._spaces import guess_kind
from remat._report._build import report_from_hlo
from remat._report._report import MemoryReport
from remat._targets._target import Target, TargetError, targets
from remat._targets._target import target as find_target

_PATTERNS = ("*.hlo.pb", "*.hlo_proto.pb")


def report_from_dump(
    path: str | Path, *, target: Target | str | None = None
) -> MemoryReport:
    """Reports what a compiled program uses, from the files that XLA left of it.

    Any job's will do, of JAX, PyTorch/XLA or TensorFlow: set
    `XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_proto"` and run it.

    Args:
        path: The folder of the dump, or one `*after_optimizations.hlo.pb` in it. Of a
            folder's programs the largest is reported.
        target: The device the program was compiled for; may be left out for the CPU.

    Returns:
        The report.

    Raises:
        HloError: There is no such file, it cannot be read, or it has no buffer
            assignment.
        TargetError: The target is not known, is missing, or is of another kind than
            the program.
    """
    file, others = _find(Path(path))
    with paused_gc():
        module = parse(file.read_bytes())
        report = report_from_hlo(module, _device(module, target, file))
    if not others:
        return report
    note = f"{others} more programs in {path}; this is the largest: {file.name}"
    return dataclasses.replace(report, notes=(*report.notes, note))


def _find(path: Path) -> tuple[Path, int]:
    """The file to read, and how many others could be."""
    if not path.exists():
        raise HloError(f"no such file or folder: {path}")
    if path.is_file():
        return path, 0
    files = {file for pattern in _PATTERNS for file in path.rglob(pattern)}
    found = [file for file in files if has_buffer_assignment(file.read_bytes())]
    # XLA writes some programs twice; the second file says the same at more length.
    found = [f for f in found if "buffer_assign" not in f.name] or found
    if not found:
        raise HloError(
            f"{path} has {len(files)} *.hlo.pb files and none with a buffer "
            "assignment: dump with XLA_FLAGS=--xla_dump_to=DIR "
            "--xla_dump_hlo_as_proto, with JAX's compilation cache off"
        )
    largest = max(found, key=lambda file: (file.stat().st_size, file.name))
    return largest, len(found) - 1


def _device(module: Module, name: Target | str | None, file: Path) -> Target:
    """The target asked for, checked against the program."""
    kind = guess_kind(module)
    if name is None:
        if kind == "cpu":
            return find_target("cpu")
        raise TargetError(
            f"{file.name} was compiled for a {kind.upper()}; say for which: --target "
            f"{' | '.join(_names(kind))}"
        )
    device = find_target(name)
    # Too small a program tells nothing of its platform, and is taken for a CPU's.
    if kind not in ("cpu", device.kind):
        raise TargetError(
            f"{file.name} was compiled for a {kind.upper()}, but target {device.name} "
            f"is a {device.kind.upper()}; choose one of {', '.join(_names(kind))}"
        )
    return device


def _names(kind: str) -> list[str]:
    return [device.name for device in targets() if device.kind == kind]
