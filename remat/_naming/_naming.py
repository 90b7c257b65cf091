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
    jaxpr: jec.Jaxpr, decisions: Mapping[str, Decision], *, turn: int = 0
) -> tuple[jec.Jaxpr, "KeepMarked"]:
    """Mark what is kept of a region, and nothing else.

    Args:
        jaxpr: The region's open jaxpr.
        decisions: Decision by id, as `name_region` (without a prefix) lists them.
            What is not listed is recomputed.
        turn: As `next_turn` says.

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
        return _mark(decision, value.label, turn)

    return NameWalk(jaxpr, name, show=True).run(), KeepMarked(turn)


def bind(
    policy: "Decides",
    jaxpr: jec.Jaxpr,
    *,
    region_path: str | None = None,
    layer: int | None = None,
    n_layers: int | None = None,
    turn: int = 0,
) -> tuple[jec.Jaxpr, "KeepMarked"]:
    """Apply a policy that needs to know more of a value than JAX tells.

    Args:
        policy: Asked once about each value of the region, with every field known.
        jaxpr: The region's open jaxpr.
        region_path: The region's path, for rules that read it or a module's.
        layer: Which layer of a stack the region is.
        n_layers: How many layers the stack has.
        turn: As `next_turn` says.

    Returns:
        What takes the place of the region's jaxpr and of its policy, as from `keep`.
        Decisions stand in the names, so bound policies of one turn are equal.
    """
    decide = _decider(policy, jaxpr, region_path, layer, n_layers)

    def name(value: NamedValue) -> str | None:
        return _mark(decide(value), value.label, turn)

    return NameWalk(jaxpr, name, show=True).run(), KeepMarked(turn)


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

    Those of one turn are equal, hashable and picklable: what differs stands in the
    region.
    """

    turn: int = 0
    """Which marks count: a region that is marked again keeps the older ones too, since
    those in derivative rules cannot be taken out."""

    def __call__(self, primitive: Any, *in_avals: Any, **params: Any) -> Any:
        """JAX's question: True to save, False to recompute, or where to offload."""
        name = params["name"] if primitive is compat.name_p else ""
        if not name.startswith(MARKS):
            return False
        _, _, turn = name.partition(_TURN)
        if turn != (str(self.turn) if self.turn else ""):
            return False
        if name.startswith(_OFFLOAD):
            return Offloadable(src="device", dst="pinned_host")
        return True


_SAVE, _OFFLOAD = MARKS = ("remat.save:", "remat.offload:")
_TURN = "@"


def next_turn(policy: object) -> int:
    """The turn of marks in a region that has a policy, so that older ones do not count.

    Args:
        policy: What the region has now.
    """
    return policy.turn + 1 if isinstance(policy, KeepMarked) else 0


def _mark(decision: Decision, label: Label, turn: int) -> str | None:
    if decision is Decision.RECOMPUTE:
        return None
    mark = _SAVE if decision is Decision.SAVE else _OFFLOAD
    return f"{mark}{label.id}{_TURN}{turn}" if turn else mark + label.id


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
