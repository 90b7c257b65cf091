"""Remake what the README shows from what the library says.

Run as `python -m tests.benchmarks.readme`. Takes the table of
`remat compare gpt2 --target v5e`, the output of the example, the table of policies, and
the results that other benchmarks left in `results/`; writes the picture. Minutes on two
cores; with `--quick` only what needs no compile.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import optax

import remat
from remat._show.comparison import comparison_text
from remat._targets._target import quiet_environment
from tests.benchmarks import cpu_steps, policies

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "compare_gpt2_v5e.svg"
SHOWN_POLICIES = (
    *("none", "nothing", "everything", "save_dots", "save_dots_no_batch"),
    *("offload_dots", "offload_dots_no_batch", "minimal", "minimal_with_context"),
    *("save_qkv_proj", "save_out_proj", "save_dot_except_mlp"),
    *("save_dot_except_mlpwi", "qkv_proj_offloaded", "minimal_offloaded"),
)


def section(text: str, name: str, body: str) -> str:
    """The README with the part between `<!-- name -->` and `<!-- /... -->` replaced."""
    kind = name.split(":")[0]
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{kind} -->)"
    assert re.search(pattern, text, re.DOTALL), name
    return re.sub(pattern, lambda m: m[1] + body + m[2], text, flags=re.DOTALL)


def block(text: str, name: str) -> str:
    """The code that stands below `<!-- name -->`."""
    pattern = rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```"
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None, name
    return found[1]


def unpack(text: str, folder: Path) -> None:
    """Writes the files that the README shows into a folder."""
    for name in re.findall(r"<!-- file:(\S+) -->", text):
        (folder / name).write_text(block(text, f"file:{name}"))


def output_of(text: str) -> str:
    """What the example prints, run beside the README's files."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(text, Path(folder))
        return subprocess.run(
            [sys.executable, "-c", block(text, "example")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


def cpu_steps_table() -> str:
    """Step times on a CPU, from the file that `cpu_steps` wrote."""
    found = json.loads(cpu_steps.FILE.read_text())
    rows = found["rows"]
    lines = [
        "| | " + " | ".join(f"`{row['policy']}`" for row in rows) + " |",
        "|---|" + "---:|" * len(rows),
    ]
    for name, key in (("time", "time_ratio"), ("FLOPs, predicted", "flops_ratio")):
        lines.append(f"| {name} | " + " | ".join(f"{r[key]:.2f}" for r in rows) + " |")
    return "\n".join(lines) + "\n"


def quick(text: str) -> str:
    """The README with what needs no compile made again."""
    text = section(text, "table:policies", policy_table())
    if policies.FILE.exists():
        results = json.loads(policies.FILE.read_text())
        text = section(text, "table:benchmarks", policies.markdown(results))
    if cpu_steps.FILE.exists():
        text = section(text, "table:cpu-steps", cpu_steps_table())
    return text


def policy_table() -> str:
    """The first policies anyone meets, as Markdown."""
    lines = ["| policy | saves | moves to the host | when |", "|---|---|---|---|"]
    for name in SHOWN_POLICIES:
        about = remat.policies.get(name).description
        lines.append(f"| `{name}` | {about.saves} | {about.offloads} | {about.when} |")
    return "\n".join(lines) + "\n"


HIGHEST = 1.25
"""Step time against no remat beyond which a row is drawn at the top."""


def spread(places: list[int], apart: int, lowest: int) -> list[int]:
    """Ascending places moved as little as keeps them apart and above the lowest."""
    found = list(places)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + apart)
    for i in reversed(range(len(found))):
        limit = lowest if i == len(found) - 1 else found[i + 1] - apart
        found[i] = min(found[i], limit)
    return found


def picture(found: remat.Comparison) -> str:
    """Peak memory against step time as an SVG of its own, in light and dark."""
    times = {row.policy: row.estimated_step_s or 0.0 for row in found.rows}
    at: dict[tuple[int, int], list[str]] = {}
    most = 1.05 * max(found.budget_bytes, *(row.peak_bytes for row in found.rows))
    low = min(times.values()) / times["none"] - 0.03
    for row in found.rows:
        ratio = times[row.policy] / times["none"]
        height = (min(ratio, HIGHEST) - low) / (HIGHEST - low)
        spot = (round(60 + 700 * row.peak_bytes / most), round(350 - 300 * height))
        name = row.policy if ratio <= HIGHEST else f"{row.policy} ({ratio:.1f}×)"
        at.setdefault(spot, []).append(name)
    marks = []
    spots = sorted(at.items(), key=lambda item: item[0][1])
    lines = spread([y for (_, y), _ in spots], 14, 336)
    for ((x, y), names), line in zip(spots, lines, strict=True):
        best = found.best in names
        marks.append(
            f'<circle cx="{x}" cy="{y}" r="{7 if best else 4}" '
            f'class="{"best" if best else "row"}"/>'
            f'<line x1="{x}" y1="{y}" x2="{x + 12}" y2="{line}"/>'
            f'<text x="{x + 14}" y="{line + 4}">{html.escape(", ".join(names))}</text>'
        )
    limit = round(60 + 700 * found.budget_bytes / most)
    one = round(350 - 300 * (1 - low) / (HIGHEST - low))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 400" role="img">
<title>{html.escape(f"{found.model} on {found.target.name}")}</title>
<style>text{{font:11px sans-serif;fill:#444}}.row{{fill:#4c78a8}}.best{{fill:#e45756}}
line{{stroke:#999}}@media(prefers-color-scheme:dark){{text{{fill:#ccc}}}}</style>
<line x1="60" y1="350" x2="760" y2="350"/><line x1="60" y1="30" x2="60" y2="350"/>
<line x1="{limit}" y1="30" x2="{limit}" y2="350" stroke-dasharray="4"/>
<line x1="60" y1="{one}" x2="760" y2="{one}" stroke-dasharray="1 5"/>
<text x="{limit - 100}" y="24">{found.budget_bytes / 2**30:.2f} GiB usable</text>
<text x="300" y="380">peak device memory, 0 to {most / 2**30:.1f} GiB</text>
<text x="18" y="270" transform="rotate(-90 18 270)">step time against no remat</text>
<text x="36" y="{one + 4}">1.0</text>
{"".join(marks)}
</svg>
"""


def main() -> None:
    """Rewrites the README and its picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="compile nothing")
    text = quick(README.read_text())
    if parser.parse_args().quick:
        README.write_text(text)
        return
    quiet_environment()
    built = remat.models.build("gpt2")
    found = remat.compare(
        built.loss,
        *built.args,
        target="v5e",
        optimizer=optax.adamw(1e-3),
        model="gpt2",
        on_progress=print,
    )
    table = comparison_text(found).strip("\n")
    text = section(text, "table:gpt2-v5e", f"```text\n{table}\n```\n")
    code = block(text, "example")
    shown = output_of(text)
    body = f"```python\n{code}```\n<!-- output -->\n```text\n{shown}```\n"
    README.write_text(section(text, "example", body))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(found))


if __name__ == "__main__":
    main()
