"""A memory report as a profile that `pprof`, Speedscope and their kin read.

The format is pprof's `profile.proto`. Each buffer is one sample of its bytes; its
"call stack" is its module path, with the value (and its source line) as the leaf and
its category at the root, so that a flame graph shows who holds the memory.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

from remat._report._buffer import Buffer
from remat._report._proto import message_class

if TYPE_CHECKING:
    from remat._report._report import MemoryReport

_SCHEMA = """
Profile: *sample_type=1 ValueType, *sample=2 Sample, *location=4 Location,
  *function=5 Function, *string_table=6 string, *comment=13 int64,
  default_sample_type=14 int64
ValueType: type=1 int64, unit=2 int64
Sample: *location_id=1 uint64, *value=2 int64, *label=3 Label
Label: key=1 int64, str=2 int64, num=3 int64, num_unit=4 int64
Location: id=1 uint64, *line=4 Line
Line: function_id=1 uint64, line=2 int64
Function: id=1 uint64, name=2 int64, system_name=3 int64, filename=4 int64
"""

Profile: Any = message_class(_SCHEMA, "remat.pprof", "Profile")


def pprof_of(report: MemoryReport) -> bytes:
    """The buffers of all memory spaces as a gzipped `profile.proto`.

    Args:
        report: With its buffers.

    Returns:
        The file's bytes; equal reports give equal bytes.
    """
    return _Writer().write(report)


class _Writer:
    """Builds one profile: strings, functions and locations are numbered once."""

    def __init__(self) -> None:
        self._profile = Profile()
        self._strings: dict[str, int] = {}
        self._locations: dict[tuple[str, str, int], int] = {}
        self._string("")

    def write(self, report: MemoryReport) -> bytes:
        profile = self._profile
        for kind, unit in (("buffers", "count"), ("inuse_space", "bytes")):
            kind, unit = self._string(kind), self._string(unit)
            profile.sample_type.add(type=kind, unit=unit)
        profile.default_sample_type = self._string("inuse_space")
        about = f"peak of {report.module} on {report.target}, {report.peak_bytes} bytes"
        profile.comment.append(self._string(about))
        for buffer in report.buffers:
            self._sample(buffer)
        profile.string_table.extend(self._strings)
        return gzip.compress(profile.SerializeToString(deterministic=True), mtime=0)

    def _sample(self, buffer: Buffer) -> None:
        sample = self._profile.sample.add(value=[1, buffer.bytes])
        file, _, line = (buffer.source or "").rpartition(":")
        leaf = buffer.label or buffer.primitive or buffer.instruction
        number = int(line) if line.isdigit() else 0
        frames = [(leaf, file, number)]
        modules = (buffer.module_path or "").split("/")
        frames += [(part, "", 0) for part in reversed(modules) if part]
        frames.append((buffer.category, "", 0))
        sample.location_id.extend(self._location(*frame) for frame in frames)
        labels = {
            "memory_space": buffer.memory_space,
            "phase": buffer.phase,
            "dtype": buffer.dtype,
            "shape": "x".join(map(str, buffer.shape)),
            "instruction": buffer.instruction,
        }
        for key, text in labels.items():
            if text:
                sample.label.add(key=self._string(key), str=self._string(text))

    def _location(self, name: str, file: str, line: int) -> int:
        key = (name, file, line)
        if key not in self._locations:
            id = len(self._locations) + 1
            self._locations[key] = id
            text = self._string(name)
            self._profile.function.add(
                id=id, name=text, system_name=text, filename=self._string(file)
            )
            location = self._profile.location.add(id=id)
            location.line.add(function_id=id, line=line)
        return self._locations[key]

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))
