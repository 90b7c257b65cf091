"""Whether the regions of a function are those that a plan was made for."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from remat._plan._errors import PlanError
from remat._regions._fingerprint import inventory
from remat._regions._region import Region


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRecord:
    """What is remembered of a region's program, to say how it changed."""

    fingerprint: str
    n_equations: int
    inputs: tuple[str, ...]
    """Type of each input, as `"float32[8, 16]"`."""
    operations: Mapping[str, int]
    """How many equations of each primitive, calls looked through."""

    @staticmethod
    def of(region: Region) -> "ProgramRecord":
        """The record of a region."""
        inputs, operations = inventory(region.jaxpr)
        return ProgramRecord(
            fingerprint=region.fingerprint,
            n_equations=region.n_equations,
            inputs=inputs,
            operations=operations,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionRecord:
    """One outer region of a plan."""

    path: str
    """Its path in the program."""
    fingerprint: str
    """Digest of its program."""
    times: int
    """How often it runs in a step."""
    context: str
    """The loop around it."""
    choices: tuple[str, ...]
    """Name of the choice that all its layers take, or of each one's as they run; empty
    where it stays as it is."""
    note: str = ""
    """Why it stays as it is."""

    @property
    def runs(self) -> Mapping[str, int]:
        """How often it runs under each choice, in a step."""
        times = self.times // (len(self.choices) or 1)
        counts = collections.Counter(self.choices)
        return {name: times * n for name, n in counts.items()}


def check_regions(
    wanted: Sequence[RegionRecord],
    programs: Mapping[str, ProgramRecord],
    regions: Sequence[Region],
    layers: Mapping[int, int],
) -> list[Region]:
    """The outer regions of a function, in the order of a plan's.

    Args:
        wanted: The plan's regions.
        programs: What is known of their programs, by fingerprint.
        regions: All regions of the function.
        layers: How many layers those in scans that can be split stand for.

    Raises:
        PlanError: They differ; the message says which region, and how.
    """
    outer = [region for region in regions if region.depth == 0]
    if len(outer) != len(wanted):
        there = ", ".join(dict.fromkeys(region.path for region in outer)) or "none"
        raise PlanError(
            f"the plan is for {len(wanted)} regions, and the function has {len(outer)} "
            f"({there}); nothing was changed. Plan again for this model"
        )
    for n, (record, region) in enumerate(zip(wanted, outer, strict=True)):
        if record.fingerprint != region.fingerprint or record.times != region.times:
            raise PlanError(
                f"region {n} ({record.path}) is not the one that was planned: "
                f"{_difference(record, programs, region)}. Nothing was changed; plan "
                "again for this model"
            )
        n_wanted, n_layers = len(record.choices), layers.get(region.index, 1)
        if n_wanted > 1 and n_wanted != n_layers:
            raise PlanError(
                f"region {n} ({record.path}) was planned as {n_wanted} layers of a "
                f"scan, and now {n_layers} can be told apart. Nothing was changed; "
                "plan again for this model"
            )
    return outer


def _difference(
    record: RegionRecord, programs: Mapping[str, ProgramRecord], region: Region
) -> str:
    if record.fingerprint == region.fingerprint:
        return f"it ran {record.times} times and runs {region.times} times now"
    was, now = programs.get(record.fingerprint), ProgramRecord.of(region)
    changes = [] if record.path == region.path else [f"its path is now {region.path}"]
    if was is not None:
        changes += _changed_inputs(was.inputs, now.inputs)
        changes += _changed_counts(was.operations, now.operations)
    return "; ".join(changes[:6]) or "its equations are connected in another way"


def _changed_inputs(was: Sequence[str], now: Sequence[str]) -> list[str]:
    if len(was) != len(now):
        return [f"it had {len(was)} inputs and has {len(now)}"]
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b]
    return [f"input {i} was {a} and is {b}" for i, a, b in pairs[:2]]


def _changed_counts(was: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    counts: list[Any] = [
        (name, was.get(name, 0), now.get(name, 0)) for name in sorted({*was, *now})
    ]
    return [f"{name}: {a} before, {b} now" for name, a, b in counts if a != b]
