"""Checkpoints of a training run: whole or not there at all, and checked when read.

Orbax writes each one into a temporary directory and renames it, so a kill leaves the
old ones. A digest of the arrays goes with them, and a seal of the files once they are
written: bytes that changed on disk are noticed and the checkpoint before is used.
"""

import hashlib
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from remat.models._errors import TrainError
from remat.models._seals import check_seal, seal

State = Any


class Checkpoints:
    """The last few states of a run, by step.

    Args:
        directory: where they are kept; made if it is not there.
        keep: how many; older ones are removed when a newer one is complete.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int):
        import orbax.checkpoint as ocp

        self._directory = directory
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            self._guard(self._manager.close, self._manager.latest_step())
        except TrainError:
            # Closing repeats a failed write's error: the first one says more.
            if error is None:
                raise

    def save(self, step: int, state: State) -> None:
        """Starts writing a state; training goes on meanwhile.

        Raises:
            TrainError: this or the write before it failed.
        """
        self.wait()
        # Copies: the next step's donation reuses the buffers while Orbax writes.
        host = jax.tree.map(np.array, state)
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(host),
            meta=self._ocp.args.JsonSave({"step": step, "digest": digest(host)}),
        )
        self._guard(lambda: self._manager.save(step, args=arguments), step)

    def wait(self) -> None:
        """Waits until everything is written, and seals it.

        Raises:
            TrainError: a write failed.
        """
        self._guard(self._manager.wait_until_finished, self._manager.latest_step())
        for step in self._manager.all_steps():
            seal(self._directory / str(step))

    def restore(
        self, like: State, say: Callable[[str], None]
    ) -> tuple[int, State] | None:
        """Returns the newest state that is whole, and its step; None if there is none.

        Args:
            like: the shapes of the state.
            say: told of each checkpoint that is not whole; those are moved aside.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return step, self._read(step, like)
            except Exception as error:
                # Whatever bytes a checkpoint holds, an older one may be whole.
                moved = self._move_aside(step)
                reason = str(error).splitlines()[0] if str(error) else repr(error)
                say(f"the checkpoint of step {step} is broken ({reason}): {moved}")
        return None

    def _read(self, step: int, like: State) -> State:
        check_seal(self._directory / str(step))
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.StandardRestore(like),
            meta=self._ocp.args.JsonRestore(),
        )
        found: Any = self._manager.restore(step, args=arguments)
        if found.meta["digest"] != digest(found.state):
            raise ValueError("its arrays are not those that were saved")
        return found.state

    def _move_aside(self, step: int) -> str:
        aside = self._directory.with_name("broken-checkpoints")
        aside.mkdir(exist_ok=True)
        n_before = sum(1 for _ in aside.iterdir())
        target = aside / f"{step}-{n_before}"
        (self._directory / str(step)).rename(target)
        self._manager.reload()
        return f"moved to {target}"

    def _guard(self, write: Callable[[], Any], step: int | None) -> None:
        try:
            write()
        except Exception as error:
            # Orbax and TensorStore raise several kinds for a full or read-only disk.
            raise TrainError(
                f"cannot write the checkpoint of step {step} into {self._directory}: "
                f"{error}; earlier ones are whole, and once there is room the same "
                "command goes on from the newest"
            ) from error


def digest(state: State) -> str:
    """Returns a hash of every array of a state, with its place, shape and dtype."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        place = f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}"
        total.update(place.encode())
        total.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
    return total.hexdigest()
