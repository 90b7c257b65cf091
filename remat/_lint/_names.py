"""Lint rules about checkpoint names."""

import difflib
from collections.abc import Iterable, Iterator, Sequence

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._finding import Finding
from remat._lint._program import Linted, Program
from remat._naming._naming import MARKS
from remat._regions._region import is_region
from remat._sizes import format_bytes
from remat.policies import Decision, Policy, everything, none

# --- over the program


def unemitted_names(program: Program) -> Iterator[Finding]:
    """Names that a policy spells out and no region emits."""
    for policy, regions in _by_policy(program):
        emitted = _emitted(regions)
        missing = sorted(policy.checkpoint_names - set(emitted))
        if not missing:
            continue
        near = [n for m in missing for n in difflib.get_close_matches(m, emitted, n=2)]
        meant = f" Did you mean {_listed(near)}?" if near else ""
        nothing = len(missing) == len(policy.checkpoint_names)
        yield Finding(
            code="unemitted-name",
            severity="error" if nothing else "warning",
            message=f"{policy!r} names {_listed(missing)}, which matched 0 values: no "
            f"region emits {'it' if len(missing) == 1 else 'them'}.{meant}",
            fix=f"The regions emit {_listed(emitted)}."
            if emitted
            else "Mark the value with jax.ad_checkpoint.checkpoint_name(x, name), or "
            "choose it by remat.policies.in_module(pattern).",
        )


def unmentioned_names(program: Program) -> Iterator[Finding]:
    """Names that regions emit and a policy by name does not speak of."""
    for policy, regions in _by_policy(program):
        emitted = _emitted(regions)
        others = [name for name in emitted if not policy.mentions(name)]
        if policy.checkpoint_names and others:
            yield Finding(
                code="unmentioned-name",
                severity="info",
                message=f"the regions emit {_listed(others)}, which {policy!r} does "
                "not mention: they are recomputed.",
                fix="Add what is worth keeping with | save_names(...).",
            )


def unnamed_regions(program: Program) -> Iterator[Finding]:
    """Regions without any of the names that others under the same policy have."""
    for policy, regions in _by_policy(program):
        wanted = policy.checkpoint_names
        counts = {id(r): len(wanted & set(r.region.emitted_names)) for r in regions}
        if not any(counts.values()):
            continue
        for linted in regions:
            if counts[id(linted)] == 0:
                most = max(counts.values())
                yield linted.finding(
                    "unnamed-region",
                    "warning",
                    f"it emits 0 of the names of {policy!r}, of which another region "
                    f"emits {most}: everything in it is recomputed.",
                    "Call checkpoint_name in this module too, or give it a policy of "
                    "its own: {pattern: policy}.",
                )


def names_outside_regions(program: Program) -> Iterator[Finding]:
    """Names emitted where no policy sees them, such as on a scan body's result."""
    inside = set(_emitted(program.outermost))
    policies = [p for p in {r.policy for r in program.outermost} if p]
    for name, source, in_scan in _outside(program.jaxpr, False):
        if name in inside or not any(p.mentions(name) for p in policies):
            continue
        place = " in a scan's body, after the region" if in_scan else ""
        yield Finding(
            code="name-outside-region",
            severity="error",
            message=f"the name {name!r} stands outside every region{place}, where no "
            "policy sees it: it keeps and moves 0 bytes.",
            fix="Give the name inside the region; the input of a layer is named in "
            "front, inside what is rematerialized.",
            source=source,
        )


def _outside(jaxpr: jec.Jaxpr, in_scan: bool) -> Iterator[tuple[str, str | None, bool]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is compat.name_p:
            yield eqn.params["name"], compat.source_line(eqn), in_scan
        elif not is_region(eqn):
            for sub in compat.subjaxprs(eqn.params):
                inner = in_scan or eqn.primitive.name == "scan"
                yield from _outside(compat.open_jaxpr(sub), inner)


# --- over one region


def names_on_outputs(linted: Linted) -> Iterator[Finding]:
    """Names on what the region returns, which its backward pass does not read."""
    flow = linted.flow
    for position, name in _kept_names(linted):
        (value,) = flow.equation(position).results
        if value in flow.needed or value not in flow.results:
            continue
        scanned = linted.region.context != "straight line"
        what = "the carry of the scan" if scanned else "returned by the region"
        verb = "offloads" if _offloads(linted, position) else "saves"
        yield linted.finding(
            "name-on-output",
            "error",
            f"{verb} 0 bytes for {name!r}: the value is {what}, and the region's "
            "backward pass does not read it.",
            "Name the region's input instead: x = checkpoint_name(x, name) first.",
            linted.source(position),
        )


def names_on_inputs(linted: Linted) -> Iterator[Finding]:
    """Names on the region's inputs, which are kept in any case."""
    flow = linted.flow
    for position, name in _kept_names(linted):
        if _offloads(linted, position):
            continue
        if flow.equation(position).operands[0] in flow.inputs:
            what = "carry of the scan" if _is_carried(linted) else "input of the region"
            yield linted.finding(
                "name-on-input",
                "info",
                f"{name!r} is the {what}: it is kept anyway, and saving it adds 0 "
                "bytes and spares nothing.",
                "Offload it (offload_names) to free its memory, or drop the name.",
                linted.source(position),
            )


def unnamed_twins(linted: Linted) -> Iterator[Finding]:
    """Names on a copy, where the backward pass reads the value itself."""
    flow = linted.flow
    for position, name in _kept_names(linted):
        (operand,) = flow.equation(position).operands
        maker = flow.makers.get(operand)
        if maker is None or maker not in flow.rerun:
            continue
        primitive = flow.equation(maker).eqn.primitive.name
        readers = [p for p in flow.readers[operand] if p in flow.forward]
        by = (
            "another equation reads the value without its name"
            if len(readers) > 1
            else f"the derivative of {primitive} reads its own result"
        )
        yield linted.finding(
            "unnamed-twin",
            "error",
            f"{name!r} is kept, and {primitive} runs again all the same: {by}, and "
            "the name is on a copy.",
            "Use the named value everywhere, and choose it by what makes it, which "
            f"with_policy settles: save(primitive({primitive!r})) or "
            "save(in_module(pattern)).",
            linted.source(position),
        )


def unread_names(linted: Linted) -> Iterator[Finding]:
    """Kept names that nothing in the backward pass reads."""
    flow = linted.flow
    for position, name in _kept_names(linted):
        (value,) = flow.equation(position).results
        (operand,) = flow.equation(position).operands
        if (
            value in flow.needed | flow.results
            or flow.makers.get(operand) in flow.rerun
        ):
            continue
        unused = value not in flow.readers
        why = "nothing uses it" if unused else "the backward pass needs no such value"
        size = format_bytes(flow.bytes(value))
        yield linted.finding(
            "unread-name",
            "warning" if unused else "info",
            f"{name!r} ({size}) keeps 0 bytes: {why}.",
            "checkpoint_name returns the named value: x = checkpoint_name(x, name)."
            if unused
            else "Name what a nonlinear operation reads, such as the input of the "
            "next activation.",
            linted.source(position),
        )


NAME_PROGRAM_RULES = (
    unemitted_names,
    unmentioned_names,
    unnamed_regions,
    names_outside_regions,
)
NAME_RULES = (names_on_outputs, names_on_inputs, unnamed_twins, unread_names)


def _kept_names(linted: Linted) -> Iterator[tuple[int, str]]:
    """The `checkpoint_name` equations that the policy keeps, with their names.

    None under a policy that keeps everything, where no name makes a difference.
    """
    if linted.policy in (none, everything):
        return
    for position in linted.flow.named("name"):
        name = linted.flow.equation(position).eqn.params["name"]
        if position in linted.flow.decisions and not name.startswith(MARKS):
            yield position, name


def _offloads(linted: Linted, position: int) -> bool:
    return linted.flow.decisions[position] is Decision.OFFLOAD


def _is_carried(linted: Linted) -> bool:
    return linted.region.context in ("scan", "unrolled scan")


def _by_policy(program: Program) -> Iterator[tuple[Policy, list[Linted]]]:
    regions = program.outermost
    for policy in dict.fromkeys(r.policy for r in regions if r.policy):
        yield policy, [r for r in regions if r.policy == policy]


def _emitted(regions: Iterable[Linted]) -> list[str]:
    names = (name for r in regions for name in r.region.emitted_names)
    return [n for n in dict.fromkeys(names) if not n.startswith(MARKS)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, dict.fromkeys(names))) or "no names"
