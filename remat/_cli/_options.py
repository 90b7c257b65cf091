"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    typer.Option(
        "--policies", help="Names or plan files, by commas; default: fourteen."
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Sequence length.")]
MeshAxes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="Devices to spread a preset over: fsdp=16, or fsdp=4,tensor=2.",
    ),
]
RegionPatterns = Annotated[
    str | None,
    typer.Option(
        "--regions",
        metavar="scan|PATTERN,...",
        help="Regions to make first: the layers of a scan, or modules (`Block_*`).",
    ),
]
Optimizer = Annotated[
    bool,
    typer.Option(
        "--optimizer/--no-optimizer", help="Include an AdamW update in the step."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", help="Memory the step may use, as in 12GiB; default: all there is."
    ),
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
