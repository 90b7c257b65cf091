"""Which checkpoint names a program emits, where a policy can see them."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._custom_jvp import is_custom_jvp
from remat._regions._custom_rules import forward_program, identity, is_custom_rule


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """The checkpoint names that programs emit when they are differentiated."""

    names: tuple[str, ...]
    """Those in the programs, in order, then those in derivative rules."""
    is_complete: bool
    """Whether every derivative rule that was wanted could be read."""


def emitted(
    jaxprs: Iterable[jec.Jaxpr], *, wanted: Collection[str] | None = None
) -> Emitted:
    """The names that programs emit when they are differentiated.

    Args:
        jaxprs: The programs of regions.
        wanted: Stop looking once these are found; None looks everywhere. Derivative
            rules, which must be traced to be read, are read last.
    """
    names: dict[str, None] = {}
    rules: dict[object, jec.JaxprEqn] = {}
    for jaxpr in jaxprs:
        for eqn in _equations(jaxpr):
            if eqn.primitive is compat.name_p:
                names[eqn.params["name"]] = None
            elif is_custom_rule(eqn) and not _is_plain(eqn):
                rules.setdefault(identity(eqn), eqn)
    is_complete = True
    for eqn in rules.values():
        if wanted is not None and names.keys() >= set(wanted):
            break
        program = forward_program(eqn)
        # Where the rule cannot be read, the function's own program may tell.
        called = [program] if program else map(compat.open_jaxpr, _called(eqn))
        found = emitted(called, wanted=wanted)
        names |= dict.fromkeys(found.names)
        is_complete = is_complete and found.is_complete and program is not None
    return Emitted(tuple(names), is_complete)


def _equations(jaxpr: jec.Jaxpr) -> Iterator[jec.JaxprEqn]:
    """All equations of a program, except those that a derivative rule replaces."""
    for eqn in jaxpr.eqns:
        yield eqn
        if not is_custom_rule(eqn):
            for sub in _called(eqn):
                yield from _equations(compat.open_jaxpr(sub))


def _is_plain(eqn: jec.JaxprEqn) -> bool:
    """Whether a rule is one of JAX's own activation functions, which emit no name."""
    source = compat.function_source(next(_called(eqn)))
    return is_custom_jvp(eqn) and "/jax/_src/" in (source or "")


def _called(eqn: jec.JaxprEqn) -> Iterator[compat.AnyJaxpr]:
    return compat.subjaxprs(eqn.params)
