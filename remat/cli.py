"""The `remat` command.

A command of its own may do what a library must not: set the environment that compiling
for an absent device needs, and keep the noise of compilers off the terminal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="remat",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help=(
        "Which activations to keep, and what each choice costs, from really compiled "
        "programs for a TPU or GPU that need not be here.\n\n"
        "    remat compare gpt2 --target v5e\n\n"
        "    remat fit gpt2 --target h100 --max batch\n\n"
        "    remat compare mypackage.train:make --target a100-80gb --budget 60GiB\n\n"
        "    remat report gpt2 --target v5e --policy save_dots --html report.html\n\n"
        "    remat plan gpt2 --target v5e --budget 12GiB -o plan.json\n\n"
        "    remat check plan.json\n\n"
        "    remat targets\n\n    remat policies save_dots"
    ),
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset such as gpt2, or package.module:function returning "
        "(loss_fn, args) or (loss_fn, args, options).",
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target", help="v5e, h100, ... (see `remat targets`); default: this device."
    ),
]
PolicyNames = Annotated[
    str | None,
    typer.Option("--policies", help="Comma-separated names; default: fourteen."),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Sequence length.")]
Optimizer = Annotated[
    bool,
    typer.Option(
        "--optimizer/--no-optimizer", help="Include an AdamW update in the step."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Memory the step may use, as in 12GiB."),
]
CompilerOptions = Annotated[
    list[str] | None,
    typer.Option("--compiler-option", metavar="KEY=VALUE", help="An XLA option."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON.")
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and the compilers' own output.")
]


@app.command()
def compare(
    model: Model,
    target: TargetName = None,
    policies: PolicyNames = None,
    batch: Batch = None,
    seq: Seq = None,
    budget: Budget = None,
    optimizer: Optimizer = True,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compile every row in full (TPU).")
    ] = False,
    compiler_option: CompilerOptions = None,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the table.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compile a training step under each policy and say which one to use."""
    with _command(target, debug):
        import remat
        from remat._show.comparison import comparison_table

        for path in (json, html):
            _check_writable(path)
        loaded = _load(model, batch, seq)
        settings = _settings(loaded, optimizer, compiler_option)
        with _progress(debug) as say:
            result = remat.compare(
                loaded.loss,
                *loaded.args,
                policies=_split_policies(policies),
                target=target,
                budget=budget,
                exact=exact,
                model=loaded.name,
                options=dict(loaded.describe),
                on_progress=say,
                **settings,
            )
        _print(lambda width: comparison_table(result, width))
        for path, write in ((json, result.to_json), (html, result.to_html)):
            if path is not None:
                write(path)
                _print(f"wrote {path}")


@app.command()
def fit(
    model: Model,
    largest: Annotated[
        str, typer.Option("--max", metavar="batch|seq", help="What to make largest.")
    ] = "batch",
    target: TargetName = None,
    policies: PolicyNames = None,
    batch: Batch = None,
    seq: Seq = None,
    budget: Budget = None,
    optimizer: Optimizer = True,
    compiler_option: CompilerOptions = None,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Find the largest batch or sequence that fits under each policy."""
    with _command(target, debug):
        import remat
        from remat._show.fit import fit_table

        _check_writable(json)
        sizes = {"batch": batch, "seq": seq}
        if largest not in sizes:
            raise ValueError(f"--max takes batch or seq, but was given {largest!r}")
        loaded = _load(model, batch, seq)
        settings = _settings(loaded, optimizer, compiler_option)

        def build(size: int) -> tuple[Any, tuple[Any, ...]]:
            built = _load(model, **{**sizes, largest: size})
            return built.loss, built.args

        start = sizes[largest] or loaded.describe.get(largest)
        with _progress(debug) as say:
            result = remat.fit(
                build,
                start=start or 1,
                multiple_of=1 if largest == "batch" else 128,
                policies=_split_policies(policies) or ("none", "save_dots", "nothing"),
                target=target,
                budget=budget,
                what=largest,
                model=loaded.name,
                options=dict(loaded.describe),
                on_progress=say,
                **settings,
            )
        _print(fit_table(result))
        if json is not None:
            result.to_json(json)
            _print(f"wrote {json}")


@app.command()
def plan(
    model: Model,
    target: TargetName = None,
    batch: Batch = None,
    seq: Seq = None,
    budget: Budget = None,
    headroom: Annotated[
        str, typer.Option("--headroom", help="Share of the budget to leave free.")
    ] = "0%",
    optimizer: Optimizer = True,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Whether values may move.")
    ] = True,
    compiler_option: CompilerOptions = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the plan."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE if it exists.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Choose what each layer keeps so that a step uses a memory budget well."""
    with _command(target, debug):
        import remat
        from remat._show.plan import plan_tables

        _check_writable(output)
        if output is not None and output.exists() and not overwrite:
            raise ValueError(f"{output} exists; pass --overwrite to replace it")
        loaded = _load(model, batch, seq)
        settings = _settings(loaded, optimizer, compiler_option)
        with _progress(debug) as say:
            result = remat.plan(
                loaded.loss,
                *loaded.args,
                budget=budget,
                target=target,
                allow_offload=offload,
                headroom=headroom,
                model=loaded.name,
                options=dict(loaded.describe),
                on_progress=say,
                **settings,
            )
        _print(plan_tables(result))
        if output is not None:
            result.save(output, overwrite=overwrite)
            _print(f"wrote {output}")


@app.command()
def check(
    plans: Annotated[
        list[Path] | None, typer.Argument(metavar="[PLAN]...", help="Plan files.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--all", metavar="DIR", help="Every plan in a folder."),
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", help="How far the peak may drift.")
    ] = "2%",
    debug: Debug = False,
) -> None:
    """Compile what plans are for again; exit 1 where a peak exceeds or drifts."""
    with _command("any", debug):
        import remat

        paths = [*(plans or ()), *(sorted(folder.glob("*.json")) if folder else ())]
        if not paths:
            raise ValueError(
                "no plan to check; name plan files, or a folder with --all"
            )
        checks = [remat.check_plan(path, tolerance=tolerance) for path in paths]
        for path, checked in zip(paths, checks, strict=True):
            _print(f"{path}: {checked}")
    if not all(checked.ok for checked in checks):
        raise typer.Exit(1)


@app.command()
def report(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PATH",
            help="A preset, package.module:function, a folder that XLA dumped to, or "
            "an .hlo.pb of any job.",
        ),
    ],
    target: TargetName = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="For every region; default: each its own."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Policy, or dump, to say what changed from."),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    optimizer: Optimizer = True,
    compiler_option: CompilerOptions = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")
    ] = None,
    pprof: Annotated[
        Path | None, typer.Option("--pprof", metavar="FILE", help="Write for pprof.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Say what fills the memory of a compiled step, and what its policy did."""
    with _command(target or "any", debug):
        from remat._show.explanation import explanation_view

        for path in (json, html, pprof):
            _check_writable(path)
        if _is_dump(model):
            found = _dumped(model, against, target)
        else:
            from remat._explain_step import explain

            loaded = _load(model, batch, seq)
            settings = _settings(loaded, optimizer, compiler_option)
            with _progress(debug) as say:
                found = explain(
                    loaded.loss,
                    *loaded.args,
                    policy=_one_policy(policy),
                    against=_one_policy(against),
                    target=target,
                    on_progress=say,
                    **settings,
                )
        _print(lambda width: explanation_view(found, width))
        for path in found.write(json=json, html=html, pprof=pprof):
            _print(f"wrote {path}")


@app.command()
def targets(debug: Debug = False) -> None:
    """List the devices that can be named, and which can be compiled for here."""
    with _command("any", debug):
        from remat._show.targets import targets_table

        _print(targets_table())


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="One policy, in full.")] = None,
    debug: Debug = False,
) -> None:
    """List the named policies, or show one in full."""
    with _command(None, debug):
        from remat._show.policies import policies_table, policy_page

        _print(policies_table() if name is None else policy_page(name))


def main() -> None:
    """Runs the command; unexpected failures are one line, with `--debug` in full."""
    app()


@contextmanager
def _command(target: str | None, debug: bool) -> Iterator[None]:
    """The frame of every command: quiet compilers, clear errors, exit codes."""
    if not debug:
        _silence()
    from remat._targets import quiet_environment

    try:
        if target is not None and target != "cpu":
            quiet_environment()
        yield
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.stderr.flush()
        # Compiles that run in threads cannot be stopped, and exiting would wait.
        from remat._dump import remove_folders

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
    for name in ("jax", "jax._src.xla_bridge", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _progress(debug: bool) -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    console = Console(file=sys.stderr)
    if debug or not console.is_terminal:
        yield lambda line: None
        return
    with console.status("starting") as status:
        yield lambda line: status.update(line)


def _print(what: Any) -> None:
    from rich.console import Console

    console = Console(soft_wrap=False)
    if not console.is_terminal:
        # A pipe or a file has no width; a table cut to 80 columns helps nobody.
        console = Console(width=140)
    console.print(what(console.width) if callable(what) else what)


def _load(model: str, batch: int | None, seq: int | None) -> Any:
    from remat._load import load_model

    return load_model(model, batch=batch, seq=seq)


def _check_writable(path: Path | None) -> None:
    from remat._files import check_writable

    if path is not None:
        check_writable(path)


def _settings(
    loaded: Any, optimizer: bool, options: list[str] | None
) -> dict[str, Any]:
    """Keyword arguments for compare, fit and plan: the model's own, then the flags."""
    settings = dict(loaded.options)
    if optimizer and "step" not in settings:
        import optax

        settings.setdefault("optimizer", optax.adamw(1e-3))
    elif not optimizer:
        settings["optimizer"] = None
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


def _split_policies(text: str | None) -> tuple[Any, ...] | None:
    """`none,save_names(query_proj,mlpwi)` as policies; commas in brackets stay."""
    if text is None:
        return None
    from remat.policies import parse

    parts = _split_outside_brackets(text)
    return tuple(p if p.endswith(".json") else parse(p) for p in parts)


def _one_policy(text: str | None) -> Any:
    """One policy, as `--policies` takes them."""
    from remat.policies import parse

    return None if text is None else parse(text)


def _is_dump(model: str) -> bool:
    """Whether MODEL is a path and not a preset's or function's name."""
    path = Path(model)
    return path.exists() or path.suffix == ".pb" or len(path.parts) > 1


def _dumped(path: str, against: str | None, target: str | None) -> Any:
    from remat._explain_step import explain_dump

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
