"""The JSON Schema of the report's data, made from the dataclasses and their docstrings.

    python -m tests.report_schema

writes `remat/_report/report.schema.json`, which is installed with the library, and the
page `docs/report_schema.md`. A test holds both against the classes.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from remat._compile._compile import XlaStats
from remat._cost._cost import Cost
from remat._explain._fitting import Fitting
from remat._explain._proof import RegionProof
from remat._finding import Finding
from remat._report._buffer import CATEGORIES, PHASES, Buffer
from remat._report._diff import SCHEMA as DIFF_SCHEMA
from remat._report._diff import Change, ReportDiff
from remat._report._offloaded import Offload
from remat._report._recomputed import Expected, ExpectedRegion, Recomputed
from remat._report._report import SCHEMA, MemoryReport
from remat._report._timeline import TimelinePoint
from remat._scan._segmented import SegmentedScan

ROOT = Path(__file__).parent.parent
SCHEMA_FILE = ROOT / "remat" / "_report" / "report.schema.json"
PAGE = ROOT / "docs" / "report_schema.md"
CLASSES = (
    *(MemoryReport, Buffer, TimelinePoint, Recomputed, Cost, XlaStats),
    *(Finding, Expected, ExpectedRegion, Offload, SegmentedScan, RegionProof, Fitting),
    Change,
)
_JSON = {int: "integer", float: "number", str: "string", bool: "boolean"}
_VALUES = {
    ("Buffer", "category"): CATEGORIES,
    ("Buffer", "phase"): (*PHASES, None),
    ("Buffer", "memory_space"): ("device", "host", "on-chip"),
    ("MemoryReport", "estimate_source"): ("cycles", "roofline", "none"),
}


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `to_dict()` of a report or an explanation."""
    own = _object(MemoryReport)
    extra = {
        "schema": _described({"const": SCHEMA}, "Version of this form."),
        "fragmentation_bytes": _described(
            {"type": "integer"}, _first(MemoryReport.fragmentation_bytes.__doc__)
        ),
    }
    # What only an explanation has (`remat report --json`, `remat.explain`).
    optional = {
        "findings": _described(_list(Finding), "What is remarkable, worst first."),
        "expected": _described(
            _nullable(_ref(Expected)), "What the traced step asks for."
        ),
        "proof": _described(_list(RegionProof), "Recompute asked for and compiled."),
        "tried": _described(_list(Fitting), "Policies tried where it does not fit."),
        "diff": _described(_nullable({"$ref": "#/$defs/ReportDiff"}), "What changed."),
    }
    definitions = {one.__name__: _object(one) for one in CLASSES[1:]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "remat memory report",
        **own,
        "properties": {**extra, **own["properties"], **optional},
        "required": [*extra, *own["required"]],
        "$defs": {**definitions, "ReportDiff": _diff()},
    }


def page(made: dict[str, Any]) -> str:
    """The schema as a page to read."""
    lines = [
        "# The memory report as data",
        "",
        "`MemoryReport.to_dict()` / `.to_json()`, and `remat report --json`, have this",
        "form. Sizes are bytes of one device, times seconds; a figure that is not",
        "known is `null`. For machines: `remat/_report/report.schema.json`.",
        "Fields marked † are there only where the step was traced (`remat.explain`,",
        "`remat report` of a model) or held against another.",
    ]
    for name, one in {"Report": made, **made["$defs"]}.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| field | type | what it is |",
            "|---|---|---|",
        ]
        for field, what in one["properties"].items():
            mark = "" if field in one["required"] else " †"
            text = what["description"].replace("|", "\\|")
            lines.append(f"| `{field}`{mark} | {_type_text(what)} | {text} |")
    return "\n".join(lines) + "\n"


def _object(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, vars(inspect.getmodule(cls)))
    described = docstrings(cls)
    properties = {
        field.name: _described(
            _json_type(hints[field.name], _VALUES.get((cls.__name__, field.name))),
            described[field.name],
        )
        for field in dataclasses.fields(cls)
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def docstrings(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for here, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            found[ast.unparse(here.target)] = " ".join(str(after.value.value).split())
    return found


def _diff() -> dict[str, Any]:
    side = {
        name: _object(MemoryReport)["properties"][name]
        for name in (
            *("module", "target", "peak_bytes", "host_bytes"),
            *("flops", "recompute_flops"),
        )
    }
    change = _object(Change)
    total = _described({"type": "integer"}, _first(Change.change_bytes.__doc__))
    change["properties"]["change_bytes"] = total
    change["required"].append("change_bytes")
    figures = {
        name: _described(kind, _first(getattr(ReportDiff, name).__doc__))
        for name, kind in {
            "peak_change_bytes": {"type": "integer"},
            "host_change_bytes": {"type": "integer"},
            "recompute_change_flops": {"type": "integer"},
            "flops_change": {"type": "integer"},
            "estimated_change_s": {"type": ["number", "null"]},
        }.items()
    }
    by_category = {"type": "object", "additionalProperties": {"type": "integer"}}
    properties = {
        "schema": _described({"const": DIFF_SCHEMA}, "Version of this form."),
        "before": _described(_closed(side), "The first program."),
        "after": _described(_closed(side), "The second program."),
        **figures,
        "by_category": _described(by_category, _first(ReportDiff.by_category.__doc__)),
        "changes": _described(
            {"type": "array", "items": change}, docstrings(ReportDiff)["changes"]
        ),
    }
    return _closed(properties)


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json_type(hint: Any, values: tuple[Any, ...] | None) -> dict[str, Any]:
    if values:
        return {"enum": list(values)}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in args if one is not type(None))
        return _nullable(_json_type(inner, None))
    if origin is tuple:
        assert args[1:] == (...,)
        return {"type": "array", "items": _json_type(args[0], None)}
    if dataclasses.is_dataclass(hint):
        return _ref(hint)
    if hint is float:  # nan is written as null
        return {"type": ["number", "null"]}
    return {"type": _JSON[hint]}


def _ref(cls: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _list(cls: type) -> dict[str, Any]:
    return {"type": "array", "items": _ref(cls)}


def _nullable(kind: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind.get("type"), str):
        return {**kind, "type": [kind["type"], "null"]}
    return (
        kind if "null" in kind.get("type", ()) else {"anyOf": [kind, {"type": "null"}]}
    )


def _described(kind: dict[str, Any], text: str) -> dict[str, Any]:
    assert text
    return {**kind, "description": text}


def _first(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0]


def _type_text(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_type_text(one) for one in kind["anyOf"])
    if "enum" in kind:
        return ", ".join(json.dumps(value) for value in kind["enum"])
    if "const" in kind:
        return f"`{kind['const']}`"
    if kind["type"] == "array":
        return f"list of {_type_text(kind['items'])}"
    types_ = kind["type"]
    return " or ".join(types_) if isinstance(types_, list) else types_


def main() -> None:
    made = schema()
    SCHEMA_FILE.write_text(json.dumps(made, indent=1) + "\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(made))


if __name__ == "__main__":
    main()
