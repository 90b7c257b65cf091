"""Which checkpoint names a program emits, where a policy can see them."""

from collections.abc import Collection, Iterable, Iterator

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._custom_rules import forward_program, identity, is_custom_rule


def emitted_names(
    jaxprs: Iterable[jec.Jaxpr], *, wanted: Collection[str] | None = None
) -> tuple[str, ...]:
    """The names that programs emit when they are differentiated.

    Args:
        jaxprs: The programs of regions.
        wanted: Stop looking once these are found; None looks everywhere. Derivative
            rules, which must be traced to be read, are read last.

    Returns:
        The names: those in the programs in order, then those in derivative rules.
    """
    names: dict[str, None] = {}
    rules: dict[object, jec.JaxprEqn] = {}
    for jaxpr in jaxprs:
        for eqn in _equations(jaxpr):
            if eqn.primitive is compat.name_p:
                names[eqn.params["name"]] = None
            elif is_custom_rule(eqn) and not _is_plain(eqn):
                rules.setdefault(identity(eqn), eqn)
    for eqn in rules.values():
        if wanted is not None and names.keys() >= set(wanted):
            break
        names |= dict.fromkeys(emitted_names([forward_program(eqn)], wanted=wanted))
    return tuple(names)


def _equations(jaxpr: jec.Jaxpr) -> Iterator[jec.JaxprEqn]:
    """All equations of a program, except those that a derivative rule replaces."""
    for eqn in jaxpr.eqns:
        yield eqn
        if not is_custom_rule(eqn):
            for sub in compat.subjaxprs(eqn.params):
                yield from _equations(compat.open_jaxpr(sub))


def _is_plain(eqn: jec.JaxprEqn) -> bool:
    """Whether a rule is one of JAX's own activation functions, which emit no name."""
    source = compat.function_source(next(compat.subjaxprs(eqn.params)))
    return compat.is_custom_jvp(eqn) and "/jax/_src/" in (source or "")
