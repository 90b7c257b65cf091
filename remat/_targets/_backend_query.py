"""Notice a model that asks which devices are here while it is traced for others.

Such a model takes the code written for the machine that compiles, where it should
take the code for the target: a reference attention in place of a TPU kernel, say.
JAX cannot know, so the question itself is watched for.
"""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax

from remat._targets._target import Target

_QUESTIONS = ("default_backend", "devices", "local_devices")

_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
_watchers = 0
_this_thread = threading.local()


class BackendQueryWarning(UserWarning):
    """A traced function asked for the devices that are here, and not for the target."""


@contextlib.contextmanager
def watch_backend_queries(target: Target) -> Iterator[None]:
    """Warn, naming the line, of each question about other devices than the target's.

    While it is entered, by any thread, `jax.default_backend`, `jax.devices` and
    `jax.local_devices` are wrapped; only this thread's questions are looked at, and
    all are answered as ever. JAX's own are not seen.

    Args:
        target: What the function is traced for.
    """
    before = getattr(_this_thread, "target", None)
    _install()
    _this_thread.target = target
    try:
        yield
    finally:
        _this_thread.target = before
        _uninstall()


def _install() -> None:
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers > 1:
            return
        for name in _QUESTIONS:
            _originals[name] = getattr(jax, name)
            setattr(jax, name, _watched(name, _originals[name]))


def _uninstall() -> None:
    global _watchers
    with _lock:
        _watchers -= 1
        if _watchers:
            return
        for name, original in _originals.items():
            setattr(jax, name, original)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        target: Target | None = getattr(_this_thread, "target", None)
        asked_for_one = bool(args or kwargs)
        if target is not None and not asked_for_one:
            heard = answer if isinstance(answer, str) else answer[0].platform
            if heard != target.kind:
                _warn(name, heard, target, sys._getframe(1))
        return answer

    return ask


def _warn(name: str, heard: str, target: Target, caller: FrameType) -> None:
    module = caller.f_globals.get("__name__", "")
    if (
        module.partition(".")[0] in ("jax", "jaxlib")
        or module == "remat._targets._plugins"
    ):
        return
    file, line = caller.f_code.co_filename, caller.f_lineno
    warnings.warn_explicit(
        f"{file}:{line} asks jax.{name}() and hears {heard!r} while it is traced for "
        f"{target.name} ({target.kind}), so it may choose code for the wrong platform. "
        "Choose by jax.lax.platform_dependent or by a setting of the model.",
        BackendQueryWarning,
        file,
        line,
        module,
        caller.f_globals.setdefault("__warningregistry__", {}),
    )
