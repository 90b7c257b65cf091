"""Remake what the README shows from what the library says.

Run as `python -m tests.benchmarks.readme`. Takes the table of
`remat compare gpt2 --target v5e`, the output of the example and the table of policies,
and writes the picture. Minutes on two cores.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from pathlib import Path

import optax

import remat
from remat._show.comparison import comparison_text
from remat._targets import quiet_environment

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


def example(text: str) -> str:
    """The example's code."""
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def output_of(code: str) -> str:
    """What a piece of code prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue()


def policy_table() -> str:
    """The first policies anyone meets, as Markdown."""
    lines = ["| policy | saves | moves to the host | when |", "|---|---|---|---|"]
    for name in SHOWN_POLICIES:
        about = remat.policies.get(name).description
        lines.append(f"| `{name}` | {about.saves} | {about.offloads} | {about.when} |")
    return "\n".join(lines) + "\n"


def picture(found: remat.Comparison) -> str:
    """Peak memory against step time as an SVG of its own, in light and dark."""
    rows = [row for row in found.rows if row.estimated_step_s]
    times = {row.policy: row.estimated_step_s or 0.0 for row in rows}
    points = [
        (row.peak_bytes / 2**30, min(times[row.policy] / times["none"], 1.8), row)
        for row in rows
    ]
    most = max(*(x for x, _, _ in points), found.budget_bytes / 2**30) * 1.05
    low, high = min(y for _, y, _ in points) - 0.05, max(y for _, y, _ in points) + 0.1
    at_x = lambda x: 60 + 700 * x / most  # noqa: E731
    at_y = lambda y: 350 - 310 * (y - low) / (high - low)  # noqa: E731
    marks = []
    for i, (x, y, row) in enumerate(sorted(points, key=lambda p: p[1])):
        chosen = row.policy == found.best
        marks.append(
            f'<circle cx="{at_x(x):.0f}" cy="{at_y(y):.0f}" r="{7 if chosen else 4}" '
            f'class="{"best" if chosen else "row"}"/>'
            f'<text x="{at_x(x) + 9:.0f}" y="{at_y(y) + (4 if i % 2 else -4):.0f}">'
            f"{html.escape(row.policy)}</text>"
        )
    limit = at_x(found.budget_bytes / 2**30)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 400" role="img">
<title>{html.escape(f"{found.model} on {found.target.name}")}</title>
<style>text{{font:11px sans-serif;fill:#444}}.row{{fill:#4c78a8}}.best{{fill:#e45756}}
line{{stroke:#999}}@media(prefers-color-scheme:dark){{text{{fill:#ccc}}}}</style>
<line x1="60" y1="350" x2="760" y2="350"/><line x1="60" y1="30" x2="60" y2="350"/>
<line x1="{limit:.0f}" y1="30" x2="{limit:.0f}" y2="350" stroke-dasharray="4"/>
<text x="{limit - 70:.0f}" y="24">{found.budget_bytes / 2**30:.2f} GiB usable</text>
<text x="330" y="385">peak device memory, GiB (0 to {most:.0f})</text>
<text x="18" y="260" transform="rotate(-90 18 260)">step time against no remat</text>
<text x="30" y="{at_y(1.0) + 4:.0f}">1.0</text>
{"".join(marks)}
</svg>
"""


def main() -> None:
    """Rewrites the README and its picture."""
    quiet_environment()
    text = README.read_text()
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
    text = section(text, "table:policies", policy_table())
    code = example(text)
    body = f"```python\n{code}```\n<!-- output -->\n```text\n{output_of(code)}```\n"
    README.write_text(section(text, "example", body))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(found))


if __name__ == "__main__":
    main()
