"""The plan: what each region keeps, the figures that prove it, and its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat import policies
from remat._files import write_text
from remat._plan._apply import Table, Treatment, apply_treatments
from remat._plan._by_name import policy_by_name
from remat._plan._errors import PlanError
from remat._plan._match import ProgramRecord, RegionRecord, check_regions
from remat._plan._read import read
from remat._regions._make_regions import with_regions
from remat._regions._region import Region
from remat.policies import Decision

SCHEMA = "remat.plan/2"
_OLD_SCHEMA = "remat.plan/1"
"""Regions had one choice each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One value that a region keeps."""

    id: str
    """Its id in the region."""
    decision: str
    """"save" or "offload"."""
    bytes: int
    """Its size in one run of the region, by the model."""
    module_path: str
    """The module that makes it."""
    primitive: str
    """The primitive that makes it."""
    checkpoint_name: str | None
    """The name that the model gives it, if any."""
    shape: tuple[int, ...]
    dtype: str
    source: str | None
    """Line that made it."""
    spares_flops: int | None = None
    """Arithmetic that one run would also do twice if this alone were not kept; None
    where it was not asked."""
    spares_s: float | None = None
    """Its time by the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """What some regions keep."""

    name: str
    """"A", "B", ..."""
    removed: bool
    """Whether the regions are removed: nothing is recomputed."""
    kept: tuple[Kept, ...]
    """What is saved and offloaded, largest first; the rest is recomputed."""
    names_suffice: bool
    """Whether a policy by checkpoint names keeps exactly this."""
    bytes: int
    """Kept on the device by one run of one region, by the model."""
    host_bytes: int
    """Moved to the host."""
    recompute_flops: int
    """Arithmetic that one run does twice."""
    recompute_s: float
    """Its time by the model."""

    @property
    def table(self) -> Table:
        """Decisions by id."""
        return tuple(sorted((k.id, Decision[k.decision.upper()]) for k in self.kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One full compile of the closed loop."""

    label: str
    """"solved", or the named policy."""
    kept_bytes: int
    """Kept by all regions, by the model."""
    predicted_peak_bytes: int | None
    """Foreseen before it was compiled; None for the two ends."""
    peak_bytes: int
    """Compiled."""
    fits: bool
    """Whether that is within the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFigures:
    """How named policies would do, by the model."""

    policies: tuple[str, ...]
    """Those that keep the same."""
    predicted_peak_bytes: int
    """From the line through what was compiled."""
    host_bytes: int
    recompute_flops: int
    recompute_s: float
    """Time of what runs twice, by the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A policy for each region, chosen for a budget and proven by the compiler.

    Made by `remat.plan`; `apply` puts it to work. Figures are per device.
    """

    model: str
    """What it is for."""
    target: str
    """The device."""
    budget_bytes: int
    """What the peak may be."""
    peak_bytes: int
    """Compiled peak."""
    predicted_peak_bytes: int
    """What the loop foresaw for this choice before compiling it."""
    first_prediction_error: float | None
    """Of the first solved point: predicted over compiled peak, less 1."""
    least_peak_bytes: int
    """Compiled peak with nothing kept."""
    everything_peak_bytes: int | None
    """Compiled peak without regions; None where that does not compile."""
    host_bytes: int
    """Host memory in use, compiled."""
    recompute_flops: int
    """FLOPs of the step beyond those it has without remat."""
    forward_flops: int
    """FLOPs of the forward pass."""
    estimated_step_s: float | None
    """Roofline time of a step; None where the target's figures are unknown."""
    n_compiles: int
    """Full compiles that it took."""
    origin: str
    """"solved", or the named policy that won."""
    regions: tuple[RegionRecord, ...]
    """The outer regions, in program order."""
    choices: tuple[PlanChoice, ...]
    """What they keep."""
    programs: tuple[ProgramRecord, ...]
    """What their programs are."""
    named: tuple[NamedFigures, ...] = ()
    """The named policies beside it, cheapest first."""
    trials: tuple[Trial, ...] = ()
    """What was compiled."""
    limit_bytes: int | None = None
    """The compiler's memory limit that it needs (TPU); None for the device's own."""
    limited_peak_bytes: int | None = None
    """Peak when the compiler may use the budget only (TPU); None where not asked."""
    notes: tuple[str, ...] = ()
    """What else to know."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How the step was made: batch, optimizer, compiler options."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of what took part."""
    command: str = ""
    """What made it."""

    # --- use

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its regions keeping what the plan says.

        Args:
            fn: The loss that the plan was made for, or one with equal regions; before
                `jax.grad`.

        Returns:
            A function of the same values and gradients.

        Raises:
            PlanError: (when called) the regions are not those of the plan. The message
                says which one, and how it differs.
        """
        programs = {program.fingerprint: program for program in self.programs}
        treatments: dict[str, Treatment] = {c.name: _treatment(c) for c in self.choices}

        def treat(
            regions: Sequence[Region], layers: Mapping[int, int]
        ) -> dict[int, list[Treatment]]:
            outer = check_regions(self.regions, programs, regions, layers)
            chosen: dict[int, list[Treatment]] = {
                region.index: [treatments[name] for name in record.choices]
                for record, region in zip(self.regions, outer, strict=True)
                if record.choices
            }
            if any(choice.removed for choice in self.choices):
                for region in regions:
                    if region.depth and region.reachable:
                        chosen[region.index] = ["remove"]
            return chosen

        if regions := self.options.get("regions"):
            fn = with_regions(fn, regions)
        return apply_treatments(fn, treat)

    @property
    def policy(self) -> policies.Policy:
        """The plan as one policy, for `nn.remat(Block, policy=plan.policy)`.

        Raises:
            PlanError: The regions take different choices, or checkpoint names cannot
                say what they keep.
        """
        if len(self.choices) != 1 or any(not r.choices for r in self.regions):
            raise PlanError(
                f"the plan has {len(self.choices)} choices for {len(self.regions)} "
                "regions and their layers, and a policy is one; use plan.apply(loss)"
            )
        (choice,) = self.choices
        if choice.removed:
            return policies.get("everything")
        if not choice.names_suffice:
            raise PlanError(
                "the model's checkpoint names do not tell apart what the plan keeps "
                f"({_listed(choice.kept)}); use plan.apply(loss), which needs no "
                "names, or mark these values with jax.ad_checkpoint.checkpoint_name"
            )
        return policy_of(choice.kept)

    # --- data

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data: the content of its file, sealed."""
        data = {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(self)))}
        return {**data, "seal": seal_of(data)}

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the plan's file; a reader never sees half of it.

        Raises:
            PlanError: There is a file, and `overwrite` is not set.
        """
        if Path(path).exists() and not overwrite:
            raise PlanError(
                f"{path} exists; pass overwrite=True (--overwrite) to replace it, or "
                "name another file"
            )
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan's file.

        Raises:
            PlanError: It cannot be read, is no plan, is of a schema that this version
                does not know, or was changed since it was written.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read a plan from {path}: {error}") from error
        return Plan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, *, where: str = "the text") -> Plan:
        """As `load`, from text."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(f"{where} is no plan: not JSON ({error})") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in (SCHEMA, _OLD_SCHEMA):
            raise PlanError(
                f"{where} is no plan that this version reads: its schema is "
                f"{schema!r}, and wanted is {SCHEMA!r}"
            )
        if data.pop("seal", None) != seal_of(data):
            raise PlanError(
                f"{where} was changed since it was written: its figures would prove "
                "nothing. Plan again"
            )
        del data["schema"]
        if schema == _OLD_SCHEMA:
            _upgrade(data)
        return read(Plan, data, where)

    def to_html(self) -> str:
        """The plan as an HTML table."""
        from remat._show.plan import plan_html

        return plan_html(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        """The tables as a terminal shows them."""
        from remat._show.plan import plan_text

        return plan_text(self)


def policy_of(kept: Sequence[Kept]) -> policies.Policy:
    """The policy that keeps the values with these values' checkpoint names."""
    saved, offloaded = (
        [k.checkpoint_name or "" for k in kept if k.decision == decision]
        for decision in ("save", "offload")
    )
    return policy_by_name(saved, offloaded)


def _listed(kept: Sequence[Kept]) -> str:
    ids = [one.id for one in kept]
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def seal_of(data: Mapping[str, Any]) -> str:
    """A digest of a file's content, to notice that it was edited."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _upgrade(data: dict[str, Any]) -> None:
    """Turn what an older version wrote into what this one does."""
    regions = data.get("regions")
    for region in regions if isinstance(regions, list) else ():
        if isinstance(region, dict) and "choice" in region:
            choice = region.pop("choice")
            region["choices"] = [] if choice is None else [choice]


def _treatment(choice: PlanChoice) -> Treatment:
    return "remove" if choice.removed else choice.table
