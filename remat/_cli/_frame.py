"""The frame of every command: quiet compilers, clear errors, exit codes, options."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


@contextmanager
def command(target: str | None, debug: bool) -> Iterator[None]:
    """The frame of every command: quiet compilers, clear errors, exit codes."""
    if not debug:
        _silence()
    from remat._targets._target import quiet_environment

    try:
        if target is not None and target != "cpu":
            quiet_environment()
        yield
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.stderr.flush()
        # Compiles that run in threads cannot be stopped, and exiting would wait.
        from remat._compile._dump import remove_folders

        remove_folders()
        os._exit(130)
    except (ValueError, ImportError) as error:
        if debug:
            raise
        _fail(error, 2)
    except Exception as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (--debug shows the traceback)", 1)


def _fail(error: object, code: int) -> None:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(code)


def _silence() -> None:
    """Keeps what compilers write to file descriptor 2 off the terminal.

    libtpu and the CUDA plugin write before their own log levels apply. Python's stderr
    moves to a copy of the descriptor, so progress and errors still arrive.
    """
    try:
        kept = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
    except OSError:
        return
    sys.stderr = os.fdopen(kept, "w", buffering=1)
    # A compiler that ends the process shall not do so without a word.
    faulthandler.enable(sys.stderr, all_threads=False)
    for name in ("jax", "jax._src.xla_bridge", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def progress(debug: bool) -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    console = Console(file=sys.stderr)
    if debug or not console.is_terminal:
        yield lambda line: None
        return
    with console.status("starting") as status:
        yield lambda line: status.update(line)


def show(what: Any) -> None:
    from rich.console import Console

    console = Console(soft_wrap=False)
    if not console.is_terminal:
        # A pipe or a file has no width; a table cut to 80 columns helps nobody.
        console = Console(width=140)
    console.print(what(console.width) if callable(what) else what)


def load(
    model: str,
    batch: int | None,
    seq: int | None,
    mesh: str | None = None,
    target: str | None = None,
) -> Any:
    from remat._cli._load import load_model

    return load_model(model, batch=batch, seq=seq, mesh=mesh, target=target)


def batch_step(loaded: Any) -> int:
    """The step between batch sizes that the model's mesh can cut."""
    mesh = loaded.describe.get("mesh")
    if not isinstance(mesh, Mapping):  # one device, or a function's own mesh
        return 1
    return mesh.get("data", 1) * mesh.get("fsdp", 1)


def check_path(path: Path | None) -> None:
    from remat._files import check_writable

    if path is not None:
        check_writable(path)


def settings_of(
    loaded: Any, optimizer: bool, options: list[str] | None, regions: str | None = None
) -> dict[str, Any]:
    """Keyword arguments for compare, fit and plan: the model's own, then the flags."""
    settings = dict(loaded.options)
    if optimizer and "step" not in settings:
        import optax

        settings.setdefault("optimizer", optax.adamw(1e-3))
    elif not optimizer:
        settings["optimizer"] = None
    if regions is not None:
        settings["regions"] = [part.strip() for part in regions.split(",")]
    settings["compiler_options"] = {
        **settings.get("compiler_options", {}),
        **dict(_key_value(option) for option in options or ()),
    }
    return settings


def _key_value(text: str) -> tuple[str, str | bool | int | float]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--compiler-option takes KEY=VALUE, but was given {text!r}")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            continue
    return key, value


def split_policies(text: str | None) -> tuple[Any, ...] | None:
    """`none,save_names(query_proj,mlpwi)` as policies; commas in brackets stay."""
    if text is None:
        return None
    from remat.policies import parse

    parts = _split_outside_brackets(text)
    return tuple(p if p.endswith((".json", " + sqrt")) else parse(p) for p in parts)


def one_policy(text: str | None) -> Any:
    """One policy, as `--policies` takes them."""
    from remat.policies import parse

    return None if text is None else parse(text)


def is_dump(model: str) -> bool:
    """Whether MODEL is a path and not a preset's or function's name."""
    path = Path(model)
    return path.exists() or path.suffix == ".pb" or len(path.parts) > 1


def dumped(path: str, against: str | None, target: str | None) -> Any:
    from remat._explain._step import explain_dump

    return explain_dump(path, against=against, target=target)


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
