"""HiGHS without its stray lines.

`scipy.optimize.milp` is silent by default, but some versions of HiGHS print a line from
C for some programs, past Python's `sys.stdout` and past its own log settings. What a
command prints as JSON must not hold it.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import scipy.optimize

_STDOUT, _STDERR = 1, 2
_lock = threading.Lock()


def milp(*args: Any, **kwargs: Any) -> Any:
    """As `scipy.optimize.milp`; whatever C code prints goes to standard error."""
    with _stdout_to_stderr():
        return scipy.optimize.milp(*args, **kwargs)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    with _lock, contextlib.ExitStack() as after:
        try:
            kept = os.dup(_STDOUT)
            after.callback(os.close, kept)
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            os.dup2(_STDERR, _STDOUT)
        except (OSError, ValueError):  # closed, as under some servers
            yield
            return
        after.callback(os.dup2, kept, _STDOUT)
        yield
