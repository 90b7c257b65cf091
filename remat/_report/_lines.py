"""The user's lines that an HLO instruction comes from."""

from collections.abc import Iterator
from pathlib import PurePath

from remat._hlo._module import Instruction, Module

# Frames that are no code of the user's: installed libraries, and this one.
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    str(PurePath(__file__).parent.parent / "_"),
)


def source_of(module: Module, instruction: Instruction) -> str | None:
    """`file.py:12`: the innermost line of the user's own code, else the innermost."""
    metadata = instruction.message.metadata
    if lines := lines_of(module, metadata.stack_frame_id):
        return lines[0]
    if frames := list(_frames(module, metadata.stack_frame_id)):
        return frames[0][1]
    if metadata.source_file:
        return f"{PurePath(metadata.source_file).name}:{metadata.source_line}"
    return None


def lines_of(module: Module, frame_id: int) -> tuple[str, ...]:
    """The lines of the user's own code in a stack of calls, innermost first."""
    return tuple(
        line
        for file, line in _frames(module, frame_id)
        if not any(library in file for library in _LIBRARIES)
    )


def _frames(module: Module, frame_id: int) -> Iterator[tuple[str, str]]:
    """File and line of each frame, innermost first."""
    index = module.stack_frames
    for _ in range(len(index.stack_frames)):
        if not 0 < frame_id <= len(index.stack_frames):
            return
        frame = index.stack_frames[frame_id - 1]
        if not 0 < frame.file_location_id <= len(index.file_locations):
            return
        location = index.file_locations[frame.file_location_id - 1]
        if not 0 < location.file_name_id <= len(index.file_names):
            return
        file = index.file_names[location.file_name_id - 1]
        yield file, f"{PurePath(file).name}:{location.line}"
        frame_id = frame.parent_frame_id
