"""Whether a region is being traced into a scan that stays a loop.

There XLA's common-subexpression pass cannot see the forward pass from the backward
one, so a region needs no barrier against it. Nothing in JAX's interface tells; the
frames of `jax.lax.scan` on the Python stack do (0.10 - 0.12). Where they are not
recognized the answer is no, which costs a barrier and is never wrong.
"""

import sys
import types
from collections.abc import Iterator

_KEEP_THEIR_TRACE = (
    "jax._src.ad_checkpoint",
    "jax._src.custom_derivatives",
    "jax._src.lax.control_flow",
    "jax._src.pjit",
    "jax._src.shard_map",
)
"""JAX's modules that trace a function once and use what came out elsewhere too."""

_MAKE_THEIR_BODY = ("flax", "remat")
"""Packages whose scans trace a body that was made for that one scan."""


def in_rolled_scan_body() -> bool:
    """Whether the caller is traced straight into the body of a rolled scan.

    True only where the trace can have no other use, so not for a body that a user
    gives `jax.lax.scan`: JAX keeps its trace, and uses it again when the same body
    is scanned with `unroll=`.
    """
    frames = _frames(sys._getframe(1))
    for frame in frames:
        function = frame.f_code.co_qualname
        if _module(frame) == "jax._src.lax.control_flow.loops":
            if function == "scan":
                return _stays_a_loop(frame) and _caller(frames) in _MAKE_THEIR_BODY
            if function.startswith("scan.<locals>"):
                continue
        if _module(frame).startswith(_KEEP_THEIR_TRACE):
            return False
    return False


def _stays_a_loop(scan: types.FrameType) -> bool:
    unroll, length = scan.f_locals.get("unroll"), scan.f_locals.get("length")
    # XLA takes a loop of one step apart.
    return unroll in (1, False) and isinstance(length, int) and length > 1


def _caller(frames: Iterator[types.FrameType]) -> str:
    """The package of the first frame that is not JAX's own."""
    packages = (_module(frame).partition(".")[0] for frame in frames)
    return next((package for package in packages if package != "jax"), "")


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "")
