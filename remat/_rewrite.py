"""Find equations anywhere inside a function and replace them.

The mechanism under `with_policy`, the planner and the naming of intermediates:
trace the function to a jaxpr, survey it for the wanted equations (`Site`s), rebuild
the jaxprs that hold one, and evaluate the result in place of the function.

Two rules keep a rewritten program as small as the original:

- A jaxpr without a wanted equation keeps its identity.
- A jaxpr that is called many times is rewritten once (per variant, see
  `rewrite_equations`), so that 80 calls of one inner `jit` stay one function in the
  lowered program. Across calls of the rewritten function too, which lets JAX's own
  compilation caches hit.

The cost is linear in the number of equations, nested jaxprs counted once for each
place that holds a wanted equation.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._nnx import recorded

Context = Literal["scan", "unrolled scan", "loop", "straight line"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One place in a program where a wanted equation stands."""

    path: str
    """Readable path: the module path or named scopes, else the function names."""
    index: int
    """Position among the program's sites, in program order, outer before inner."""
    times: int
    """How often it runs in one call: the lengths of the scans around it, multiplied.
    A `while` loop, whose length is unknown, counts as 1."""
    context: Context
    """The innermost loop around it: what XLA's common-subexpression pass can see."""
    depth: int
    """How many other sites it stands in."""
    reachable: bool
    """Whether a rewrite of the function can change it."""
    eqn: jec.JaxprEqn = dataclasses.field(repr=False, compare=False)
    """The equation as traced."""


Edit = Callable[[Any, jec.JaxprEqn], jec.JaxprEqn | Sequence[jec.JaxprEqn] | None]
"""From a site and its equation (sites inside it already edited) to what stands there
instead: an equation, several that together define the same outputs, or None to put
the equation's body in its place."""


def rewrite_equations(
    fn: Callable[..., Any],
    *,
    select: Callable[[jec.JaxprEqn], bool],
    edit: Edit,
    variant: Callable[[Any], Hashable] = lambda site: None,
    check: Callable[[Sequence[Any]], None] = lambda sites: None,
    make_site: Callable[..., Site] = Site,
) -> Callable[..., Any]:
    """The function `fn` with every selected equation edited, wherever it stands.

    The result takes and returns what `fn` does, and can be differentiated, jitted,
    vmapped, scanned and rewritten again. Each call traces `fn` anew, as `jax.jit`
    does, so Python side effects happen on every call.

    Args:
        fn: Any function that JAX can trace.
        select: Which equations to edit.
        edit: Called as `edit(site, eqn)` once for each distinct jaxpr and variant,
            inner sites first. A body put in place by None must not have constants.
        variant: What, besides the equation, `edit`'s answer depends on. Where a
            jaxpr is called from several places whose sites have equal variants, it
            is rewritten once and the first place's sites are the ones `edit` sees.
        check: Called with all sites of a call, before any edit; raises to refuse.
        make_site: The class of site to make.
    """
    memo = Memo()

    @functools.wraps(fn, updated=())  # a module's attributes are its own
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        with recorded(fn, args, kwargs) as recording:
            survey = survey_jaxpr(recording.closed, select, make_site)
            check(survey.sites)
            return recording.run(_Rewriter(edit, variant, memo).rewrite(survey))

    return rewritten


# --- where the sites are


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """A jaxpr, at one place in a program, with the sites in it."""

    jaxpr: compat.AnyJaxpr
    sites: tuple[Any, ...]
    """All sites inside, in program order."""
    at: dict[int, Any]
    """Position of an equation → its site."""
    inside: dict[int, tuple["Survey", ...]]
    """Position of an equation → a survey of each jaxpr in its parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """What surrounds a jaxpr."""

    scopes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    times: int = 1
    context: Context = "straight line"
    depth: int = 0
    reachable: bool = True


def survey_jaxpr(
    jaxpr: compat.AnyJaxpr,
    select: Callable[[jec.JaxprEqn], bool],
    make_site: Callable[..., Site] = Site,
) -> Survey:
    """Find the selected equations of a jaxpr and of all jaxprs inside it."""
    return _Surveyor(select, make_site).survey(jaxpr, _Place())


class _Surveyor:
    """One walk over a program: counts sites and remembers which jaxprs have none."""

    def __init__(
        self,
        select: Callable[[jec.JaxprEqn], bool],
        make_site: Callable[..., Site],
    ) -> None:
        self.select = select
        self.make_site = make_site
        self.n_sites = 0
        self.holds: dict[int, bool] = {}

    def survey(self, jaxpr: compat.AnyJaxpr, place: _Place) -> Survey:
        at: dict[int, Any] = {}
        inside: dict[int, tuple[Survey, ...]] = {}
        sites: list[Any] = []
        for i, eqn in enumerate(compat.open_jaxpr(jaxpr).eqns):
            here = _inside(place, eqn)
            if self.select(eqn):
                at[i] = self.site(eqn, place)
                sites.append(at[i])
                here = dataclasses.replace(here, depth=place.depth + 1)
            elif not self.holds_site(eqn):
                continue
            inside[i] = tuple(
                self.survey(sub, here) for sub in compat.subjaxprs(eqn.params)
            )
            sites.extend(site for survey in inside[i] for site in survey.sites)
        return Survey(jaxpr, tuple(sites), at, inside)

    def site(self, eqn: jec.JaxprEqn, place: _Place) -> Site:
        index, self.n_sites = self.n_sites, self.n_sites + 1
        return self.make_site(
            path=_path(place, eqn),
            index=index,
            times=place.times,
            context=place.context,
            depth=place.depth,
            reachable=place.reachable and not eqn.params.get("differentiated"),
            eqn=eqn,
        )

    def holds_site(self, eqn: jec.JaxprEqn) -> bool:
        return any(self._holds(sub) for sub in compat.subjaxprs(eqn.params))

    def _holds(self, jaxpr: compat.AnyJaxpr) -> bool:
        if id(jaxpr) not in self.holds:
            self.holds[id(jaxpr)] = any(
                self.select(eqn) or self.holds_site(eqn)
                for eqn in compat.open_jaxpr(jaxpr).eqns
            )
        return self.holds[id(jaxpr)]


def _inside(place: _Place, eqn: jec.JaxprEqn) -> _Place:
    """The place of the jaxprs in an equation's parameters."""
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    place = dataclasses.replace(
        place,
        scopes=place.scopes + compat.scopes(eqn),
        functions=place.functions + ((name,) if name else ()),
    )
    if eqn.primitive.name == "custom_vjp_call" or eqn.params.get("differentiated"):
        return dataclasses.replace(place, reachable=False)
    if eqn.primitive.name == "while":
        return dataclasses.replace(place, context="loop")
    if eqn.primitive.name == "scan":
        length, unroll = eqn.params["length"], eqn.params["unroll"]
        # XLA removes loops of one step, so their body stands in the code around.
        context = place.context if length == 1 else _scan_context(unroll)
        return dataclasses.replace(place, times=place.times * length, context=context)
    return place


def _scan_context(unroll: int) -> Context:
    return "unrolled scan" if unroll > 1 else "scan"


# --- what a site is called


_MACHINERY = frozenset(
    {"<lambda>", "__call__", "core_fn", "fun_checkpoint", "wrapper", "wrapped", "inner"}
)
"""Names of functions that say nothing: lambdas and what libraries wrap a body in."""


def _path(place: _Place, eqn: jec.JaxprEqn) -> str:
    scopes = place.scopes + compat.scopes(eqn) + _common_scopes(eqn)
    functions: tuple[str, ...] = ()
    if not _common_scopes(eqn):
        body = next(compat.subjaxprs(eqn.params), None)
        functions = (() if scopes else place.functions) + (
            (compat.function_name(body) or "",) if body is not None else ()
        )
    # Linen writes `layers.<lambda>` or `layers.method` for a module's method.
    names = [name.split(".")[0] if "<" in name else name for name in scopes]
    names += [name for name in functions if name and name not in _MACHINERY]
    parts = "/".join(names).split("/")
    return "/".join(_without_repeats(parts)) or _plain_name(eqn)


def _plain_name(eqn: jec.JaxprEqn) -> str:
    name: str = eqn.primitive.name
    return "checkpoint" if name in compat.REGION_PRIMITIVES else name


def _common_scopes(eqn: jec.JaxprEqn) -> tuple[str, ...]:
    """The scopes that all equations in the body share: the module it is made of."""
    common: tuple[str, ...] | None = None
    for sub in compat.subjaxprs(eqn.params):
        for inner in compat.open_jaxpr(sub).eqns:
            names = compat.scopes(inner)
            common = names if common is None else _common_prefix(common, names)
            if not common:
                return ()
    return common or ()


def _common_prefix(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if n is None else n]


def _without_repeats(parts: Iterable[str]) -> Iterator[str]:
    last = None
    for part in parts:
        if part and part != last:
            yield part
            last = part


# --- the rewriting


class Memo:
    """Rewritten jaxprs by original and by the variants of the sites inside.

    Entries live as long as the original jaxpr does.
    """

    def __init__(self) -> None:
        self._by_jaxpr: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]
        self._by_jaxpr = weakref.WeakKeyDictionary()

    def entries(self, jaxpr: compat.AnyJaxpr) -> dict[Hashable, Any]:
        """The rewritten forms of one jaxpr object."""
        return self._by_jaxpr.setdefault(jaxpr, {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Rewriter:
    edit: Edit
    variant: Callable[[Any], Hashable]
    memo: Memo

    def rewrite(self, survey: Survey) -> compat.AnyJaxpr:
        """The surveyed jaxpr with its sites edited, open or closed as it was."""
        if not any(site.reachable for site in survey.sites):
            return survey.jaxpr
        entries = self.memo.entries(survey.jaxpr)
        key = tuple(self.variant(site) for site in survey.sites)
        if key not in entries:
            new = self._rewrite_open(survey)
            entries[key] = compat.with_open(survey.jaxpr, new)
        return entries[key]

    def _rewrite_open(self, survey: Survey) -> jec.Jaxpr:
        jaxpr = compat.open_jaxpr(survey.jaxpr)
        equations: list[jec.JaxprEqn] = []
        replaced: dict[jec.Var, Any] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            eqn = substitute(eqn, replaced)
            if i in survey.inside:
                eqn = self._rewrite_inside(eqn, survey.inside[i])
            if i not in survey.at or not survey.at[i].reachable:
                equations.append(eqn)
                continue
            edited = self.edit(survey.at[i], eqn)
            if edited is None:
                body, results = inline(eqn)
                equations.extend(body)
                replaced.update(zip(eqn.outvars, results, strict=True))
            elif isinstance(edited, jec.JaxprEqn):
                equations.append(edited)
            else:
                equations.extend(edited)
        outvars = [read(atom, replaced) for atom in jaxpr.outvars]
        return jaxpr.replace(eqns=equations, outvars=outvars)

    def _rewrite_inside(
        self, eqn: jec.JaxprEqn, surveys: Sequence[Survey]
    ) -> jec.JaxprEqn:
        in_turn = iter(surveys)
        params = compat.map_jaxprs(eqn.params, lambda _: self.rewrite(next(in_turn)))
        return eqn.replace(params=params)


def inline(eqn: jec.JaxprEqn) -> tuple[list[jec.JaxprEqn], list[Any]]:
    """The body of an equation, to stand in its place.

    Args:
        eqn: An equation whose first jaxpr takes its operands and gives its outputs,
            without constants: a region or an open call.

    Returns:
        The body's equations on fresh variables (the same jaxpr may stand in several
        places), and the values that take the place of the equation's outputs.
    """
    body = compat.open_jaxpr(next(compat.subjaxprs(eqn.params)))
    env: dict[jec.Var, Any] = dict(zip(body.invars, eqn.invars, strict=True))
    equations = []
    for inner in body.eqns:
        inner = substitute(inner, env)
        outvars = [compat.fresh_like(var) for var in inner.outvars]
        env.update(zip(inner.outvars, outvars, strict=True))
        source_info = compat.under_name_stack(inner, eqn)
        equations.append(inner.replace(outvars=outvars, source_info=source_info))
    return equations, [read(atom, env) for atom in body.outvars]


def substitute(eqn: jec.JaxprEqn, env: dict[jec.Var, Any]) -> jec.JaxprEqn:
    """The equation with operands that `env` knows replaced."""
    if not any(not compat.is_literal(atom) and atom in env for atom in eqn.invars):
        return eqn
    return eqn.replace(invars=[read(atom, env) for atom in eqn.invars])


def read(atom: Any, env: dict[jec.Var, Any]) -> Any:
    """What `env` has in place of an operand, if anything."""
    return atom if compat.is_literal(atom) else env.get(atom, atom)
