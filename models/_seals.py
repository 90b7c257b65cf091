"""Seals of finished checkpoints: what each file held when the write was complete.

A damaged checkpoint must be known as such before Orbax opens it. Orbax reads all arrays
at once and gives up at the first that fails, with the other reads still under way: they
report to an event loop that is gone, and hold files that are about to be moved.
"""

import hashlib
import json
import pathlib

from remat.models._run_directory import write_whole

SEAL = "seal.json"


def seal(checkpoint: pathlib.Path) -> None:
    """Writes down the digest of every file of a finished checkpoint, once.

    Raises:
        TrainError: the seal cannot be written.
    """
    path = checkpoint / SEAL
    if not path.exists():
        write_whole(path, json.dumps(_digests(checkpoint), indent=1) + "\n")


def check_seal(checkpoint: pathlib.Path) -> None:
    """Holds a checkpoint's files to its seal; one killed before it has none.

    Raises:
        ValueError: a file is missing or is not what was written, or the seal itself.
    """
    path = checkpoint / SEAL
    if not path.exists():
        return
    found = _digests(checkpoint)
    for name, wanted in json.loads(path.read_text()).items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if found[name] != wanted:
            raise ValueError(f"{name} is not what was written")


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
    """Name to digest, of the files Orbax wrote."""
    digests = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.parent != checkpoint:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(checkpoint).as_posix()] = digest
    return digests
