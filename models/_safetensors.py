"""Reads safetensors files: a length, a JSON header, and the tensors' bytes.

The format: https://github.com/huggingface/safetensors. Tensors are mapped, not read,
until asked for, and shards are opened when first used, so that a checkpoint larger
than memory can be read tensor by tensor. Files come from strangers: every length and
offset is checked before it is used.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from remat.models._errors import CheckpointError

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensors:
    """The tensors of a checkpoint, in one file or several."""

    directory: pathlib.Path
    """Where the files are."""
    files: Mapping[str, str]
    """Tensor name to file name."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in fp32.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or its file is broken.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.directory} has no tensor {name!r}")
        tensors = self._open(self.files[name])
        if name not in tensors:
            raise CheckpointError(
                f"{self.directory / self.files[name]} lacks the tensor {name!r} that "
                f"{INDEX} says is in it; download the checkpoint again"
            )
        return np.asarray(tensors[name]).astype(np.float32)

    @functools.cached_property
    def _opened(self) -> dict[str, Mapping[str, np.ndarray]]:
        return {}

    def _open(self, file: str) -> Mapping[str, np.ndarray]:
        if file not in self._opened:
            self._opened[file] = read_file(self.directory / file)
        return self._opened[file]


def open_tensors(directory: pathlib.Path) -> Tensors:
    """Finds a checkpoint's tensors, whole or in shards.

    Raises:
        CheckpointError: there are no safetensors, or the index is broken.
    """
    if (directory / INDEX).exists():
        files = read_json(directory / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(map(_is_name, files.values())):
            raise CheckpointError(f"{directory / INDEX} has no usable weight_map")
        return Tensors(directory=directory, files=files)
    if (directory / WHOLE).exists():
        names = read_file(directory / WHOLE)
        return Tensors(directory=directory, files=dict.fromkeys(names, WHOLE))
    raise CheckpointError(
        f"{directory} has neither {WHOLE} nor {INDEX}; save the model with "
        "`save_pretrained(directory)` of a recent transformers"
    )


def read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns every tensor of one file, mapped and unread.

    Raises:
        CheckpointError: the file is missing, cut short or no safetensors file.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or start > data.size:
        raise CheckpointError(
            f"{path} of {data.size} bytes is cut short or no safetensors file: "
            f"its header should end at byte {start}"
        )
    header = _parse(data[8:start].tobytes(), path)
    header.pop("__metadata__", None)
    return {
        name: _tensor(data[start:], entry, f"{name!r} in {path}")
        for name, entry in header.items()
    }


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns a JSON object from a file.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    try:
        return _parse(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _parse(text: bytes, path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path} holds no JSON where it should: {error}"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return value


def _tensor(data: np.ndarray, entry: Any, what: str) -> np.ndarray:
    try:
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
        first, last = entry["data_offsets"]
        n_bytes = math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot use the header of {what}: {entry!r}; dtypes are "
            f"{', '.join(DTYPES)}"
        ) from error
    if not 0 <= first <= last <= data.size or last - first != n_bytes:
        raise CheckpointError(
            f"{what} should hold {n_bytes} bytes, and the file has bytes {first} to "
            f"{last} of {data.size} for it; download the checkpoint again"
        )
    return data[first:last].view(dtype).reshape(shape)


def _is_name(file: Any) -> bool:
    return isinstance(file, str) and pathlib.PurePath(file).name == file
