"""Have XLA leave what it compiled in a private folder, and read back what matters.

Checked with jax 0.10.2 and 0.12.0.1: a compile leaves dozens of files, of which one
`HloProto` holds module, schedule and buffer assignment. It is there also when the
compile failed afterwards.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BUFFER_ASSIGNMENT = 3  # field of HloProto


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A folder that XLA writes to while a program is compiled."""

    folder: Path

    @property
    def options(self) -> dict[str, bool | str]:
        """Compiler options that make XLA write to the folder."""
        return {"xla_dump_to": str(self.folder), "xla_dump_hlo_as_proto": True}

    def program(self) -> bytes | None:
        """The `HloProto` with module, schedule and buffers, if XLA came that far."""
        found = sorted(self.folder.glob("*after_optimizations*.hlo.pb"))
        protos = [
            path.read_bytes() for path in found if "buffer_assign" not in path.name
        ]
        protos = [proto for proto in protos if has_buffer_assignment(proto)]
        return max(protos, key=len, default=None)

    def after_codegen(self) -> bytes | None:
        """The `HloProto` with the TPU compiler's cycle estimates, if it has any."""
        found = self.folder.glob("*after_codegen*.hlo.pb")
        return max((path.read_bytes() for path in found), key=len, default=None)


_in_use: set[str] = set()


@contextlib.contextmanager
def dump() -> Iterator[Dump]:
    """A private folder for one compile; removed whatever happens."""
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        _in_use.add(folder)
        try:
            yield Dump(folder=Path(folder))
        finally:
            _in_use.discard(folder)


def remove_folders() -> None:
    """Remove the folders of compiles in other threads, for a process that ends now."""
    for folder in list(_in_use):
        shutil.rmtree(folder, ignore_errors=True)


def has_buffer_assignment(proto: bytes) -> bool:
    """Whether bytes look like an `HloProto` that has its buffer assignment."""
    try:
        return _has_field(proto, _BUFFER_ASSIGNMENT)
    except (IndexError, KeyError):  # cut off, or something else than a message
        return False


def _has_field(proto: bytes, number: int) -> bool:
    """Whether a message has the field at its top level, without parsing the rest."""
    position = 0
    while position < len(proto):
        tag, position = _varint(proto, position)
        if tag >> 3 == number:
            return True
        wire_type = tag & 7
        if wire_type == 0:
            _, position = _varint(proto, position)
        elif wire_type == 2:
            length, position = _varint(proto, position)
            position += length
        else:
            position += {1: 8, 5: 4}[wire_type]
    return False


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
