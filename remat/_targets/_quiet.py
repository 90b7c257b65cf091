"""Keep the noise of plugins and compilers out of the user's sight."""

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

logger = logging.getLogger("remat")

_lock = threading.Lock()
_depth = 0
_saved_fd: int | None = None
_capture: IO[bytes] | None = None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Take what is written to file descriptor 2, and JAX's own plugin warnings, aside.

    C++ code writes to the descriptor itself, whatever `sys.stderr` is. What was taken
    is logged at debug level under "remat"; with that level on, nothing is taken.
    Safe to nest and to enter from several threads: the first in redirects, the last
    out restores.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth, _saved_fd, _capture
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        _bridge_logger().addFilter(_drop)
        try:
            _saved_fd = os.dup(2)
        except OSError:  # no descriptor 2 (a service): nobody to be quiet for
            return
        _capture = tempfile.TemporaryFile()
        _flush()
        os.dup2(_capture.fileno(), 2)


def _leave() -> None:
    global _depth, _saved_fd, _capture
    with _lock:
        _depth -= 1
        if _depth:
            return
        _bridge_logger().removeFilter(_drop)
        if _saved_fd is None or _capture is None:
            return
        _flush()
        os.dup2(_saved_fd, 2)
        os.close(_saved_fd)
        _capture.seek(0)
        taken = _capture.read().decode(errors="replace").strip()
        _capture.close()
        _saved_fd = _capture = None
    if taken:
        logger.debug("taken from standard error:\n%s", taken)


def _flush() -> None:
    with contextlib.suppress(Exception):  # a notebook's or a closed stream
        sys.stderr.flush()


def _bridge_logger() -> logging.Logger:
    # Reports a plugin that found no device, in a traceback: every time, on a machine
    # that has a plugin for compiling only.
    return logging.getLogger("jax._src.xla_bridge")


def _drop(record: logging.LogRecord) -> bool:
    logger.debug("jax: %s", record.getMessage())
    return False
