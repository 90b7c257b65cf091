"""The `remat` command.

A command of its own may do what a library must not: set the environment that compiling
for an absent device needs, and keep the noise of compilers off the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from remat._cli._examples import examples
from remat._cli._frame import (
    batch_step,
    check_path,
    command,
    dumped,
    is_dump,
    load,
    one_policy,
    progress,
    settings_of,
    show,
    split_policies,
)
from remat._cli._options import (
    Batch,
    Budget,
    CompilerOptions,
    Debug,
    JsonFile,
    MeshAxes,
    Model,
    Optimizer,
    PolicyNames,
    RegionPatterns,
    Seq,
    TargetName,
)
from remat._cli._train import train

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
        "    remat compare llama-3.1-8b --target v5e:4x4 --mesh fsdp=16\n\n"
        "    remat report gpt2 --target v5e --policy save_dots --html report.html\n\n"
        "    remat plan gpt2 --target v5e --budget 12GiB -o plan.json\n\n"
        "    remat check plan.json\n\n"
        "    remat targets\n\n    remat policies save_dots"
    ),
)


@app.command(epilog=examples("compare"))
def compare(
    model: Model,
    target: TargetName = None,
    policies: PolicyNames = None,
    batch: Batch = None,
    seq: Seq = None,
    mesh: MeshAxes = None,
    budget: Budget = None,
    regions: RegionPatterns = None,
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
    with command(target, debug):
        import remat
        from remat._show.comparison import comparison_table

        for path in (json, html):
            check_path(path)
        loaded = load(model, batch, seq, mesh, target)
        settings = settings_of(loaded, optimizer, compiler_option, regions)
        with progress(debug) as say:
            result = remat.compare(
                loaded.loss,
                *loaded.args,
                policies=split_policies(policies),
                target=target,
                budget=budget,
                exact=exact,
                model=loaded.name,
                options=dict(loaded.describe),
                on_progress=say,
                **settings,
            )
        show(lambda width: comparison_table(result, width))
        for path, write in ((json, result.to_json), (html, result.to_html)):
            if path is not None:
                write(path)
                show(f"wrote {path}")


@app.command(epilog=examples("fit"))
def fit(
    model: Model,
    largest: Annotated[
        str, typer.Option("--max", metavar="batch|seq", help="What to make largest.")
    ] = "batch",
    target: TargetName = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Names, by commas.")
    ] = "none,save_dots,nothing",
    batch: Batch = None,
    seq: Seq = None,
    mesh: MeshAxes = None,
    budget: Budget = None,
    regions: RegionPatterns = None,
    optimizer: Optimizer = True,
    compiler_option: CompilerOptions = None,
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Find the largest batch or sequence that fits under each policy."""
    with command(target, debug):
        import remat
        from remat._show.fit import fit_table

        check_path(json)
        sizes = {"batch": batch, "seq": seq}
        if largest not in sizes:
            raise ValueError(f"--max takes batch or seq, but was given {largest!r}")
        loaded = load(model, batch, seq, mesh, target)
        settings = settings_of(loaded, optimizer, compiler_option, regions)

        def build(size: int) -> tuple[Any, tuple[Any, ...]]:
            built = load(model, **{**sizes, largest: size}, mesh=mesh, target=target)
            return built.loss, built.args

        start = sizes[largest] or loaded.describe.get(largest)
        with progress(debug) as say:
            result = remat.fit(
                build,
                start=start or 1,
                multiple_of=batch_step(loaded) if largest == "batch" else 128,
                policies=split_policies(policies) or (),
                target=target,
                budget=budget,
                what=largest,
                model=loaded.name,
                options=dict(loaded.describe),
                on_progress=say,
                **settings,
            )
        show(fit_table(result))
        if json is not None:
            result.to_json(json)
            show(f"wrote {json}")


@app.command(epilog=examples("plan"))
def plan(
    model: Model,
    target: TargetName = None,
    batch: Batch = None,
    seq: Seq = None,
    mesh: MeshAxes = None,
    budget: Budget = None,
    headroom: Annotated[
        str, typer.Option("--headroom", help="Share of the budget to leave free.")
    ] = "0%",
    regions: RegionPatterns = None,
    optimizer: Optimizer = True,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload/--no-offload", help="Whether values may move to the host."
        ),
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
    with command(target, debug):
        import remat
        from remat._show.plan import plan_tables

        check_path(output)
        if output is not None and output.exists() and not overwrite:
            raise ValueError(f"{output} exists; pass --overwrite to replace it")
        loaded = load(model, batch, seq, mesh, target)
        settings = settings_of(loaded, optimizer, compiler_option, regions)
        with progress(debug) as say:
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
        show(plan_tables(result))
        if output is not None:
            result.save(output, overwrite=overwrite)
            show(f"wrote {output}")


@app.command(epilog=examples("check"))
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
    with command("any", debug):
        import remat

        paths = [*(plans or ()), *(sorted(folder.glob("*.json")) if folder else ())]
        if not paths:
            raise ValueError(
                "no plan to check; name plan files, or a folder with --all"
            )
        checks = [remat.check_plan(path, tolerance=tolerance) for path in paths]
        for path, checked in zip(paths, checks, strict=True):
            show(f"{path}: {checked}")
    if not all(checked.ok for checked in checks):
        raise typer.Exit(1)


@app.command(epilog=examples("report"))
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
    mesh: MeshAxes = None,
    regions: RegionPatterns = None,
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
    with command(target or "any", debug):
        from remat._show.explanation import explanation_view

        for path in (json, html, pprof):
            check_path(path)
        if is_dump(model):
            found = dumped(model, against, target)
        else:
            from remat._explain._step import explain

            loaded = load(model, batch, seq, mesh, target)
            settings = settings_of(loaded, optimizer, compiler_option, regions)
            with progress(debug) as say:
                found = explain(
                    loaded.loss,
                    *loaded.args,
                    policy=one_policy(policy),
                    against=one_policy(against),
                    target=target,
                    on_progress=say,
                    **settings,
                )
        show(lambda width: explanation_view(found, width))
        for path in found.write(json=json, html=html, pprof=pprof):
            show(f"wrote {path}")


app.command(epilog=examples("train"))(train)


@app.command(epilog=examples("targets"))
def targets(debug: Debug = False) -> None:
    """List the devices that can be named, and which can be compiled for here."""
    with command("any", debug):
        from remat._show.targets import targets_table

        show(targets_table())


@app.command(epilog=examples("policies"))
def policies(
    name: Annotated[str | None, typer.Argument(help="One policy, in full.")] = None,
    debug: Debug = False,
) -> None:
    """List the named policies, or show one in full."""
    with command(None, debug):
        from remat._show.policies import policies_table, policy_page

        show(policies_table() if name is None else policy_page(name))


def main() -> None:
    """Runs the command; unexpected failures are one line, with `--debug` in full."""
    app()
