"""Python's garbage collector, kept from looking through what is being built."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No collection of cycles inside the block.

    A large module is a million objects without a cycle; each collection on the way
    visits them all, which takes half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
