"""The walk that gives a region's intermediate values their ids and names.

An equation `v = p(...)` becomes `v_ = p(...); v = name[id](v_)`. Where the derivative
of `p` may read its own result, the name goes inside the rule instead
(`remat._naming._settle`). Names are given in calls, in the bodies of `scan` and the
branches of `cond` too, where JAX asks policies as well (0.10 - 0.12; it does not in
`while`).

An id is the module path inside the region, the primitive, and a number from the
second of a kind on: `attention.query:dot_general`, `mlp:add.2`. Values that only the
rule of a custom derivative makes hang on their equation:
`attention:custom_vjp_call>pallas_call`. Equal regions give equal ids, whatever layer
they belong to.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat import _jax_compat as compat
from remat._jaxprs._equations import in_scope
from remat._jaxprs._read_slice import is_read
from remat._naming._labels import Label, NamedValue
from remat._naming._op_name import modules
from remat._naming._settle import name_outputs, needs_settling, settle
from remat.policies import kind_of

_OPENED = compat.CALL_PRIMITIVES | compat.REGION_PRIMITIVES | {"xla_metadata_call"}
"""Calls, looked through: their results are named inside."""
_ENTERED = frozenset({"scan", "cond", "shard_map"})
"""Named inside, and their results named as well."""
CUSTOM_RULES = frozenset(
    {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
"""Functions with a derivative rule of their own."""

Namer = Callable[[NamedValue], str | None]
"""The checkpoint name a value gets; None leaves it alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where in the region a jaxpr stands."""

    scopes: tuple[str, ...] = ()
    times: int = 1


class NameWalk:
    """One pass over a region, giving out ids and names in program order."""

    def __init__(self, jaxpr: jec.Jaxpr, namer: Namer, show: bool = False):
        self.jaxpr = jaxpr
        self.namer = namer
        self.show = show
        self.root = _common_modules(jaxpr)
        self.counts: collections.Counter[str] = collections.Counter()
        self.ordinals: collections.Counter[str] = collections.Counter()

    def run(self) -> jec.Jaxpr:
        return self._walk(self.jaxpr, _Place(), [()] * len(self.jaxpr.outvars))

    def _walk(
        self, jaxpr: jec.Jaxpr, place: _Place, result_aliases: Sequence[tuple[str, ...]]
    ) -> jec.Jaxpr:
        aliases = _aliases(jaxpr, result_aliases)
        made_here: set[Any] = set()
        equations: list[jec.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            equations.extend(self._equation(eqn, place, aliases, made_here))
            made_here.update(eqn.outvars)
        unchanged = len(equations) == len(jaxpr.eqns) and all(
            new is old for new, old in zip(equations, jaxpr.eqns, strict=True)
        )
        return jaxpr if unchanged else jaxpr.replace(eqns=equations)

    def _equation(
        self,
        eqn: jec.JaxprEqn,
        place: _Place,
        aliases: Mapping[Any, tuple[str, ...]],
        made_here: set[Any],
    ) -> list[jec.JaxprEqn]:
        primitive = eqn.primitive.name
        if is_read(eqn):
            return [eqn]  # a copy of what is there anyway
        if eqn.primitive is compat.name_p and eqn.invars[0] in made_here:
            return [eqn]  # its operand has the id
        result_aliases = [aliases.get(var, ()) for var in eqn.outvars]
        if primitive in _OPENED:
            return [self._inside(eqn, place, result_aliases)]
        entered = primitive in _ENTERED
        inside = self._inside(eqn, place, [()] * len(eqn.outvars)) if entered else eqn
        base = self._base_id(eqn, place)
        values = [
            self._value(eqn, position, base, place, result_aliases[position])
            for position in range(len(eqn.outvars))
        ]
        names = [self.namer(value) if value else None for value in values]
        if not entered and primitive != "while" and needs_settling(eqn):
            return [self._settled(eqn, values, names, base, place)]
        return self._shown(name_outputs(inside, names), values, names)

    def _inside(
        self,
        eqn: jec.JaxprEqn,
        place: _Place,
        result_aliases: Sequence[tuple[str, ...]],
    ) -> jec.JaxprEqn:
        times = place.times * eqn.params.get("length", 1)
        inner = _Place(place.scopes + compat.scopes(eqn), times)
        params = compat.map_subjaxprs(
            eqn.params, lambda jaxpr: self._walk(jaxpr, inner, result_aliases)
        )
        same = all(params[key] is eqn.params[key] for key in params)
        return eqn if same else eqn.replace(params=params)

    def _settled(
        self,
        eqn: jec.JaxprEqn,
        values: Sequence[NamedValue | None],
        names: Sequence[str | None],
        base: str,
        place: _Place,
    ) -> jec.JaxprEqn:
        """The equation with names inside its rule; as it is, when it gets none."""
        custom = eqn.primitive.name in CUSTOM_RULES
        if not custom and not any(names):
            return eqn
        inner_place = _Place(place.scopes + compat.scopes(eqn), place.times)
        by_equation: dict[int, str] = {}
        counts: collections.Counter[str] = collections.Counter()

        def name_inner(inner: jec.JaxprEqn, position: int) -> str | None:
            if id(inner) not in by_equation:
                part = f"{base}>{inner.primitive.name}"
                by_equation[id(inner)] = _numbered(part, counts)
            value = self._value(
                inner, position, by_equation[id(inner)], inner_place, ()
            )
            return self.namer(value) if value else None

        settled = settle(eqn, names.__getitem__, name_inner if custom else None)
        shown = [v.label.scope for v, n in zip(values, names, strict=True) if v and n]
        return in_scope(settled, shown[0]) if self.show and shown else settled

    def _shown(
        self,
        equations: list[jec.JaxprEqn],
        values: Sequence[NamedValue | None],
        names: Sequence[str | None],
    ) -> list[jec.JaxprEqn]:
        """The named equation in the scope of the first value that is kept."""
        kept = [v.label.scope for v, n in zip(values, names, strict=True) if v and n]
        if not (self.show and kept):
            return equations
        return [in_scope(equations[0], kept[0]), *equations[1:]]

    def _base_id(self, eqn: jec.JaxprEqn, place: _Place) -> str:
        path = ".".join(_modules(place, eqn)[len(self.root) :])
        primitive = eqn.primitive.name
        return _numbered(f"{path}:{primitive}" if path else primitive, self.counts)

    def _value(
        self,
        eqn: jec.JaxprEqn,
        position: int,
        base: str,
        place: _Place,
        aliases: tuple[str, ...],
    ) -> NamedValue | None:
        var = eqn.outvars[position]
        if not is_nameable(var):
            return None
        if eqn.primitive is compat.name_p:
            aliases = (eqn.params["name"], *aliases)
        aval: Any = var.aval
        primitive = eqn.primitive.name
        kind = kind_of(primitive, eqn.params)
        ordinal = self.ordinals[kind]
        self.ordinals[kind] += 1
        label = Label(
            id=base if len(eqn.outvars) == 1 else f"{base}[{position}]",
            module_path="/".join(_modules(place, eqn)),
            primitive=primitive,
            checkpoint_name=aliases[0] if aliases else None,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            bytes=math.prod(aval.shape) * aval.dtype.itemsize,
            source=compat.source_line(eqn),
            times=place.times,
        )
        return NamedValue(
            label=label, eqn=eqn, aval=aval, aliases=aliases, ordinal=ordinal
        )


def is_nameable(var: Any) -> bool:
    """Whether a variable holds an array of numbers: no keys, references or tokens."""
    dtype: Any = getattr(var.aval, "dtype", None)
    if compat.is_dropped(var) or type(var.aval).__name__ != "ShapedArray":
        return False
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and (
        dtype != jax.dtypes.float0
    )


def _numbered(text: str, counts: collections.Counter[str]) -> str:
    counts[text] += 1
    return text if counts[text] == 1 else f"{text}.{counts[text]}"


def _modules(place: _Place, eqn: jec.JaxprEqn) -> list[str]:
    scopes = place.scopes + compat.scopes(eqn)
    return modules([part for scope in scopes for part in scope.split("/") if part])


def _common_modules(jaxpr: jec.Jaxpr) -> list[str]:
    """The modules that all equations of a region share: the one that it is."""
    paths = [_modules(_Place(), eqn) for eqn in jaxpr.eqns]
    shared = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)
    )
    return [parts[0] for parts in shared]


def _aliases(
    jaxpr: jec.Jaxpr, result_aliases: Sequence[tuple[str, ...]]
) -> dict[Any, tuple[str, ...]]:
    """The checkpoint names that later equations, or callers, give each variable."""
    aliases: dict[Any, tuple[str, ...]] = {}
    for atom, names in zip(jaxpr.outvars, result_aliases, strict=True):
        if names and not compat.is_literal(atom):
            aliases[atom] = (*aliases.get(atom, ()), *names)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is compat.name_p and not compat.is_literal(eqn.invars[0]):
            names = (eqn.params["name"], *aliases.get(eqn.outvars[0], ()))
            operand = eqn.invars[0]
            aliases[operand] = (*names, *aliases.get(operand, ()))
    return aliases
