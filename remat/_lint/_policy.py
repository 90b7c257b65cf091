"""Lint rules about what a policy keeps."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from remat._finding import Finding
from remat._lint._flow import MATMUL_LIKE
from remat._lint._program import Linted, Program
from remat._naming._naming import name_region
from remat._sizes import format_bytes, format_flop
from remat.policies import (
    Policy,
    PolicyError,
    as_policy,
    everything,
    none,
    nothing,
)

_SEEN_BY_REMAT3 = frozenset({"dot_general", "conv_general_dilated", "name"})
_FREE = frozenset(
    "broadcast_in_dim convert_element_type iota reshape squeeze transpose name slice "
    "copy copy_p stop_gradient reduce_precision".split()
)


def offload_without_host(program: Program) -> Iterator[Finding]:
    """Offload where host and device memory are one."""
    offloads = program.policy is not None and program.policy.offloads
    if offloads and program.target is not None and program.target.kind == "cpu":
        yield Finding(
            code="offload-without-host",
            severity="error",
            message=f"{program.policy!r} offloads, and on {program.target.name} host "
            "and device memory are one: nothing is moved, and nothing saved.",
            fix="Look at offloading on a TPU or GPU target, such as target='v5e'.",
        )


def saves_nothing(linted: Linted) -> Iterator[Finding]:
    """A policy that keeps nothing of use."""
    flow, policy = linted.flow, linted.policy
    if policy in (None, nothing) or flow.stored() or not flow.rerun:
        return
    if policy.keeps_by_name_only:
        return  # the rules about names say why
    why, fix = _why_nothing(linted, policy)
    yield linted.finding(
        "saves-nothing",
        "warning",
        f"{policy!r} keeps nothing that the backward pass reads, as 'nothing' does."
        + why,
        fix + "remat.residuals(fn, *args) lists what can be kept.",
    )


def _why_nothing(linted: Linted, policy: Policy) -> tuple[str, str]:
    """Why a policy keeps nothing of use, where that is plain, and what to write."""
    flow = linted.flow
    if not flow.decisions and "module_path" in policy.needs:
        return _no_module_fits(linted)
    matmuls = [p for p in flow.rerun if linted.primitive(p) in MATMUL_LIKE]
    batched = [p for p in matmuls if is_batched(flow.equation(p).eqn)]
    why = f" It matched 0 of {len(matmuls)} matrix products" if matmuls else ""
    if matmuls and len(batched) == len(matmuls):
        why += f" (all {len(matmuls)} have batch dims)"
    fix = (
        "For experts, and other products with batch dims, there is "
        "'save_dots_with_weights'; "
        if batched
        else ""
    )
    return why + "." if why else "", fix


def _no_module_fits(linted: Linted) -> tuple[str, str]:
    """What to write where a policy chooses by module and matched no value."""
    labels = name_region(linted.region.jaxpr)[1].values()
    paths = sorted({label.module_path for label in labels} - {""})
    if not paths:
        return (
            " It chooses by module, and no value of the region shows one.",
            "Only Linen modules and jax.named_scope show in a program: put the parts "
            "of an NNX, Equinox or plain JAX model in named scopes; ",
        )
    shown = ", ".join(map(repr, paths[:8]))
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return (
        f" It chooses by module and matched no value. Inside the region, values are "
        f"made in: {shown}{more}.",
        "Write a pattern that fits one of these, or choose regions by their paths, "
        "{pattern: policy}; ",
    )


def saves_everything(linted: Linted) -> Iterator[Finding]:
    """A policy under which the region recomputes nothing."""
    flow, policy = linted.flow, linted.policy
    again = [p for p in flow.rerun & flow.forward if not _is_free(linted, p)]
    if again or not flow.required or policy in (None, nothing, everything, none):
        return
    if not flow.stored():
        return
    yield linted.finding(
        "saves-everything",
        "warning",
        f"{policy!r} keeps all that the backward pass reads "
        f"({format_bytes(sum(flow.stored().values()))}): the region saves no memory.",
        "Leave the region out, or choose a policy that recomputes something.",
    )


def misused_policy(linted: Linted) -> Iterator[Finding]:
    """A callable of the program's own that does not do what it was made for."""
    if not linted.as_written or not linted.region.policy:
        return
    try:
        as_policy(linted.region.policy)
    except PolicyError as error:
        yield linted.finding(
            "misused-policy",
            "error",
            f"its policy: {error}.",
            "Give the region that policy, or another one by remat.with_policy.",
        )


def ignored_by_remat3(linted: Linted) -> Iterator[Finding]:
    """A callable of which jax_remat3 would not ask what it answers."""
    if not linted.as_written or not hasattr(jax.config, "jax_remat3"):
        return
    flow = linted.flow
    kept = {linted.primitive(p) for p in flow.decisions} - _SEEN_BY_REMAT3
    if kept and linted.policy != everything:
        yield linted.finding(
            "ignored-by-remat3",
            "warning",
            f"its policy keeps results of {', '.join(sorted(kept))}; with jax_remat3 "
            "on, JAX asks a policy only about matrix products, convolutions and "
            "names, and recomputes them.",
            "Make the region with remat.remat, or apply the policy by "
            "remat.with_policy: both work with the flag on and off.",
        )


def two_precisions(linted: Linted) -> Iterator[Finding]:
    """One value kept twice, in two floating-point types."""
    flow = linted.flow
    stored = flow.stored()
    for position in flow.named("convert_element_type"):
        equation = flow.equation(position)
        (result,) = equation.results
        source = equation.operands[0] if equation.operands else None
        if result not in stored or (source not in stored and source not in flow.inputs):
            continue
        types = [_dtype(linted, source), _dtype(linted, result)]
        if all(jnp.issubdtype(t, jnp.inexact) for t in types) and types[0] != types[1]:
            yield linted.finding(
                "two-precisions",
                "warning",
                f"a value is kept as {types[0]} and again as {types[1]} "
                f"({format_bytes(stored[result])}).",
                f"Exclude the casts: {_kept_by(linted)} - "
                "primitive('convert_element_type').",
                linted.source(position),
            )


def scores_dominate(linted: Linted) -> Iterator[Finding]:
    """Products of activations, such as attention scores, as most of what is kept."""
    flow = linted.flow
    stored = flow.stored()
    total = sum(stored.values())
    for position in flow.named("dot_general"):
        equation = flow.equation(position)
        n_bytes = sum(stored.get(value, 0) for value in equation.results)
        of_inputs = any(value in flow.inputs for value in equation.operands)
        if of_inputs or not is_batched(equation.eqn) or n_bytes <= total / 2:
            continue
        shape = list(flow.flow.values[equation.results[0]].aval.shape)
        yield linted.finding(
            "scores-dominate",
            "warning",
            f"one product of two activations, {shape}, is {format_bytes(n_bytes)} of "
            f"the {format_bytes(total)} kept ({n_bytes / total:.0%}): attention "
            "scores, most likely.",
            "'save_dots_no_batch' or 'save_dots_with_weights' leave it out.",
            linted.source(position),
        )


def partly_kept(linted: Linted) -> Iterator[Finding]:
    """Kernels of which one result is kept, and which run again for another."""
    flow = linted.flow
    kept = set(flow.stored())
    for position in sorted(flow.rerun):
        equation = flow.equation(position)
        if len(equation.results) < 2 or equation.moves:
            continue
        copies = {v: _named_copies(linted, v) for v in equation.results}
        stored = [v for v in equation.results if ({v} | copies[v]) & kept]
        missing = [v for v in equation.results if v in flow.needed and v not in stored]
        if not stored or not missing:
            continue
        n_bytes = sum(flow.bytes(v) for v in stored)
        shapes = ", ".join(_shape(linted, v) for v in missing)
        flops = flow.flops([position])
        yield linted.finding(
            "partly-kept",
            "warning",
            f"{format_bytes(n_bytes)} of {equation.eqn.primitive.name} are kept, and "
            f"it runs again for what is not: {shapes}"
            + (f" ({format_flop(flops)})." if flops else "."),
            "Keep its other results too: remat.policies.save(primitive("
            f"{equation.eqn.primitive.name!r})), or give them names as well.",
            linted.source(position),
        )


POLICY_PROGRAM_RULES = (offload_without_host,)
POLICY_RULES = (
    saves_nothing,
    saves_everything,
    misused_policy,
    ignored_by_remat3,
    two_precisions,
    scores_dominate,
    partly_kept,
)


def is_batched(eqn: Any) -> bool:
    """Whether an equation is a matrix product with batch dimensions."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (left, right) = eqn.params["dimension_numbers"]
    return bool(left or right)


def _kept_by(linted: Linted) -> str:
    """A policy that keeps what is kept, to take something away from."""
    return "everything" if linted.is_removed else "policy"


def _named_copies(linted: Linted, value: int) -> set[int]:
    flow = linted.flow
    names = [p for p in flow.readers.get(value, ()) if linted.primitive(p) == "name"]
    return {v for p in names for v in flow.equation(p).results}


def _is_free(linted: Linted, position: int) -> bool:
    equation = linted.flow.equation(position)
    return equation.moves or equation.eqn.primitive.name in _FREE


def _dtype(linted: Linted, value: int) -> Any:
    return linted.flow.flow.values[value].aval.dtype


def _shape(linted: Linted, value: int) -> str:
    aval = linted.flow.flow.values[value].aval
    return f"{aval.dtype}{list(aval.shape)}"
