"""Name every intermediate of a region by itself, so that a policy can keep any set.

`name_region` names them all, which shows what can be kept. `keep` and `bind` name only
what a table or a policy decides to keep, and give the policy that goes with it.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.extend.core as jec
from jax.ad_checkpoint import Offloadable

from remat import _jax_compat as compat
from remat._naming._labels import Label as Label
from remat._naming._labels import NamedValue
from remat._naming._paths import joined
from remat._naming._reads import reading_inputs
from remat._naming._settle import is_inexact
from remat._naming._walk import CUSTOM_RULES, Namer, NameWalk
from remat.policies import Decision, Value


class NamingError(ValueError):
    """A value was asked for that a region does not have."""


def name_region(
    jaxpr: jec.Jaxpr, prefix: str = ""
) -> tuple[jec.Jaxpr, dict[str, Label]]:
    """Give every intermediate value of a region a checkpoint name.

    Args:
        jaxpr: The region's open jaxpr (`Region.jaxpr`).
        prefix: Put in front of each id.

    Returns:
        The same program with names, and what each name stands for. What rules of
        custom derivatives make is listed too, unless the region stands inside a
        `shard_map`, where it cannot be differentiated by itself.
    """
    labels: dict[str, Label] = {}

    def name(value: NamedValue) -> str:
        labels[prefix + value.label.id] = value.label
        return prefix + value.label.id

    return _walk_with_rules(jaxpr, name), labels


def keep(
    jaxpr: jec.Jaxpr, decisions: Mapping[str, Decision]
) -> tuple[jec.Jaxpr, "KeepMarked"]:
    """Mark what is kept of a region, and nothing else.

    Args:
        jaxpr: The region's open jaxpr.
        decisions: Decision by id, as `name_region` (without a prefix) lists them.
            What is not listed is recomputed.

    Returns:
        The program with a name on each value that is saved or offloaded, its equation
        in a scope that compiled programs show (`Label.scope`), and the policy that
        goes with it.

    Raises:
        NamingError: An id stands for no value of the region.
    """
    _check_ids(decisions, name_region(jaxpr)[1])

    def name(value: NamedValue) -> str | None:
        decision = decisions.get(value.label.id, Decision.RECOMPUTE)
        return _MARKS[decision](value.label)

    return NameWalk(jaxpr, name, show=True).run(), KeepMarked()


def bind(
    policy: "Decides",
    jaxpr: jec.Jaxpr,
    *,
    region_path: str | None = None,
    layer: int | None = None,
    n_layers: int | None = None,
) -> tuple[jec.Jaxpr, "KeepMarked"]:
    """Apply a policy that needs to know more of a value than JAX tells.

    Args:
        policy: Asked once about each value of the region, with every field known.
        jaxpr: The region's open jaxpr.
        region_path: The region's path, for rules that read it or a module's.
        layer: Which layer of a stack the region is.
        n_layers: How many layers the stack has.

    Returns:
        What takes the place of the region's jaxpr and of its policy, as from `keep`.
        Decisions stand in the names, so every bound policy is the same object.
    """
    decide = _decider(policy, jaxpr, region_path, layer, n_layers)

    def name(value: NamedValue) -> str | None:
        return _MARKS[decide(value)](value.label)

    return NameWalk(jaxpr, name, show=True).run(), KeepMarked()


def decisions(
    policy: "Decides",
    jaxpr: jec.Jaxpr,
    *,
    region_path: str | None = None,
    layer: int | None = None,
    n_layers: int | None = None,
) -> dict[str, Decision]:
    """What a policy decides about each value of a region, by id.

    Args:
        policy: Asked once about each value.
        jaxpr: The region's open jaxpr.
        region_path: As for `bind`.
        layer: As for `bind`.
        n_layers: As for `bind`.

    Returns:
        A table for `keep`; what is recomputed is listed too.
    """
    decide = _decider(policy, jaxpr, region_path, layer, n_layers)
    table: dict[str, Decision] = {}

    def name(value: NamedValue) -> str:
        table[value.label.id] = decide(value)
        return value.label.id

    _walk_with_rules(jaxpr, name)
    return table


def values(jaxpr: jec.Jaxpr, *, region_path: str | None = None) -> list[Value]:
    """The values of a region as a policy sees them, those of its rules left out."""
    describe = _describer(jaxpr, region_path, None, None)
    found: list[Value] = []

    def name(value: NamedValue) -> None:
        found.append(describe(value))

    NameWalk(jaxpr, name).run()
    return found


class Decides(Protocol):
    """What `bind` needs of a policy."""

    def decide(self, value: Value) -> Decision:
        """What becomes of a value."""
        ...


@dataclasses.dataclass(frozen=True)
class KeepMarked:
    """The policy of a region whose names say what is kept (`keep`, `bind`).

    All are equal, hashable and picklable: what differs stands in the region.
    """

    def __call__(self, primitive: Any, *in_avals: Any, **params: Any) -> Any:
        """JAX's question: True to save, False to recompute, or where to offload."""
        name = params["name"] if primitive is compat.name_p else ""
        if name.startswith(_OFFLOAD):
            return Offloadable(src="device", dst="pinned_host")
        return name.startswith(_SAVE)


_SAVE, _OFFLOAD = MARKS = ("remat.save:", "remat.offload:")
_MARKS: dict[Decision, Callable[[Label], str | None]] = {
    Decision.SAVE: lambda label: _SAVE + label.id,
    Decision.OFFLOAD: lambda label: _OFFLOAD + label.id,
    Decision.RECOMPUTE: lambda label: None,
}


def _decider(
    policy: Decides,
    jaxpr: jec.Jaxpr,
    region_path: str | None,
    layer: int | None,
    n_layers: int | None,
) -> Callable[[NamedValue], Decision]:
    """Ask a policy about a region's values, with everything known that it may read."""
    describe = _describer(jaxpr, region_path, layer, n_layers)
    return lambda named: policy.decide(describe(named))


def _describer(
    jaxpr: jec.Jaxpr, region_path: str | None, layer: int | None, n_layers: int | None
) -> Callable[[NamedValue], Value]:
    """What policies see of a region's values."""
    reading = reading_inputs(jaxpr)

    def describe(named: NamedValue) -> Value:
        eqn, label = named.eqn, named.label
        return Value(
            primitive=label.primitive,
            params=eqn.params,
            in_avals=tuple(atom.aval for atom in eqn.invars),
            out_avals=(named.aval,),
            name=label.checkpoint_name if label.primitive == "name" else None,
            aliases=named.aliases,
            module_path=joined(region_path, label.module_path),
            layer=layer,
            n_layers=n_layers,
            region_path=region_path,
            ordinal=named.ordinal,
            reads_input=id(eqn) in reading,
            jax_primitive=eqn.primitive,
        )

    return describe


def _check_ids(wanted: Iterable[str], labels: Mapping[str, Label]) -> None:
    unknown = sorted(set(wanted) - set(labels))
    if not unknown:
        return
    first = unknown[0]
    near = difflib.get_close_matches(first, labels, n=3) or sorted(labels)[:3]
    raise NamingError(
        f"the region has no value {first!r}; it has {len(labels)} values, among them "
        f"{', '.join(map(repr, near))}. The ids of a region are the keys of "
        "name_region(jaxpr)[1]; they change when the model does"
    )


def _walk_with_rules(jaxpr: jec.Jaxpr, namer: Namer) -> jec.Jaxpr:
    """Name a region, and have the rules of custom derivatives ask for theirs now."""
    named = NameWalk(jaxpr, namer).run()
    if _holds_custom_rule(jaxpr):
        _differentiate(named)
    return named


def _holds_custom_rule(jaxpr: jec.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in CUSTOM_RULES
        or any(
            _holds_custom_rule(compat.open_jaxpr(s))
            for s in compat.subjaxprs(eqn.params)
        )
        for eqn in jaxpr.eqns
    )


def _differentiate(jaxpr: jec.Jaxpr) -> None:
    """Trace the derivative of a region, which has its rules name what they make."""
    avals = [var.aval for var in jaxpr.invars]
    varying = [i for i, aval in enumerate(avals) if is_inexact(aval)]

    def both(primals: list[Any], tangents: list[Any]) -> Any:
        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(varying, inputs, strict=True))
            flat = [given.get(i, primal) for i, primal in enumerate(primals)]
            return compat.evaluate(compat.ClosedJaxpr(jaxpr, ()), flat)

        return jax.jvp(function, [primals[i] for i in varying], tangents)

    try:
        compat.trace(both, avals, [avals[i].to_tangent_aval() for i in varying])
    except NameError as error:
        # A mesh axis that only the shard_map around the region binds.
        if "axis" not in str(error):
            raise
