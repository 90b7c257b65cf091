"""The directory of one training run: its lock, its settings and its metrics."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

from remat.models._errors import TrainError

SETTINGS = "run.json"
METRICS = "metrics.jsonl"
LOCK = "lock"
PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A directory that this process alone writes to."""

    path: pathlib.Path
    """Where it is."""

    @property
    def checkpoints(self) -> pathlib.Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def settings(self) -> dict[str, Any] | None:
        """Returns what the run was started with; None if it never was.

        Raises:
            TrainError: the file is not what a run writes.
        """
        path = self.path / SETTINGS
        if not path.exists():
            return None
        try:
            settings = json.loads(path.read_text())
        except ValueError as error:
            raise TrainError(
                f"{path} is no run's settings ({error}); train into a directory "
                "of its own"
            ) from error
        if not isinstance(settings, dict):
            raise TrainError(f"{path} should hold a JSON object")
        return settings

    def start(self, settings: Mapping[str, Any]) -> None:
        """Writes down what the run is started with."""
        write_whole(self.path / SETTINGS, json.dumps(settings, indent=1) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Drops what was logged after a step, and a line cut short."""
        path = self.path / METRICS
        if not path.exists():
            return
        rows = [row for row in read_rows(path) if row["step"] <= step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the metrics.

        Raises:
            TrainError: it cannot be written.
        """
        try:
            with (self.path / METRICS).open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise TrainError(
                f"cannot write {self.path / METRICS}: {error.strerror}; what was "
                "checkpointed is safe, and the same command goes on from there"
            ) from error


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a metrics file."""
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line cut short by a kill
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader, or a kill, finds the old one or the new one.

    Raises:
        TrainError: it cannot be written.
    """
    partial = path.with_suffix(f".{os.getpid()}{PARTIAL}")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrainError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def open_run(out: str | os.PathLike[str]) -> Iterator[RunDirectory]:
    """Opens a run's directory, made if it is not there, for this process alone.

    Raises:
        TrainError: it cannot be made, holds something else, or is in use.
    """
    path = pathlib.Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_strange(path)
        lock = (path / LOCK).open("a+")
    except OSError as error:
        raise TrainError(f"cannot train into {path}: {error.strerror}") from error
    with lock:
        _lock(lock, path)
        for left in path.glob(f"*{PARTIAL}"):  # by a run that was killed
            left.unlink()
        yield RunDirectory(path=path)


def _refuse_strange(path: pathlib.Path) -> None:
    names = sorted(f.name for f in path.iterdir() if f.suffix != PARTIAL)
    if (path / SETTINGS).exists() or names in ([], [LOCK]):
        return
    raise TrainError(
        f"{path} holds {names[0]!r} and no {SETTINGS}: it is no run's; train into a "
        "directory of its own"
    )


def _lock(file: IO[str], path: pathlib.Path) -> None:
    # The system frees the lock with the process, however that ends.
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TrainError(
            f"another run is training into {path}; wait for it, or train into "
            "another directory"
        ) from error
