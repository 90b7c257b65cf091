"""Where wanted equations stand in a program.

`survey_jaxpr` walks a jaxpr and all jaxprs inside it, looking into a jaxpr only where
it holds a wanted equation (asked once for each distinct jaxpr).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax.extend.core as jec

from remat import _jax_compat as compat

Context = Literal["scan", "unrolled scan", "loop", "straight line"]
Select = Callable[[jec.JaxprEqn], bool]

CUSTOM_VJP = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives whose jaxpr is not what runs when they are differentiated."""


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
    in_rule: bool = dataclasses.field(default=False, repr=False)
    """Whether it stands in the derivative rule of a `custom_jvp` function."""
    eqn: jec.JaxprEqn = dataclasses.field(repr=False, compare=False)
    """The equation as traced."""

    @property
    def source(self) -> str | None:
        """The user's line that made it, as `"file.py:12"`, where known."""
        return compat.source_line(self.eqn)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What surrounds a jaxpr."""

    scopes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    times: int = 1
    context: Context = "straight line"
    depth: int = 0
    reachable: bool = True
    in_rule: bool = False


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
    place: Place
    """What surrounds the jaxpr."""


def survey_jaxpr(
    jaxpr: compat.AnyJaxpr,
    select: Select,
    make_site: Callable[..., Any] = Site,
    *,
    place: Place = Place(),
    first_index: int = 0,
) -> Survey:
    """Find the selected equations of a jaxpr and of all jaxprs inside it.

    Args:
        jaxpr: Open or closed.
        select: Which equations are wanted.
        make_site: The class of site to make.
        place: What surrounds the jaxpr.
        first_index: The index of the first site.
    """
    return _Surveyor(select, make_site, first_index).survey(jaxpr, place)


class _Surveyor:
    """One walk over a program: counts sites and remembers which jaxprs have none."""

    def __init__(
        self, select: Select, make_site: Callable[..., Any], first_index: int
    ) -> None:
        self.select = select
        self.make_site = make_site
        self.next_index = first_index
        self.holds: dict[int, bool] = {}

    def survey(self, jaxpr: compat.AnyJaxpr, place: Place) -> Survey:
        at: dict[int, Any] = {}
        inside: dict[int, tuple[Survey, ...]] = {}
        sites: list[Any] = []
        for i, eqn in enumerate(compat.open_jaxpr(jaxpr).eqns):
            if self.select(eqn):
                at[i] = self.site(eqn, place)
                sites.append(at[i])
            elif not self.holds_site(eqn):
                continue
            if eqn.primitive.name in CUSTOM_VJP:
                continue
            here = place_inside(place, eqn, is_site=i in at)
            inside[i] = tuple(
                self.survey(sub, here) for sub in compat.subjaxprs(eqn.params)
            )
            sites.extend(site for survey in inside[i] for site in survey.sites)
        return Survey(jaxpr, tuple(sites), at, inside, place)

    def site(self, eqn: jec.JaxprEqn, place: Place) -> Site:
        index, self.next_index = self.next_index, self.next_index + 1
        return self.make_site(
            path=path_of(place, eqn),
            index=index,
            times=place.times,
            context=place.context,
            depth=place.depth,
            reachable=place.reachable and not _is_differentiated(eqn),
            in_rule=place.in_rule,
            eqn=eqn,
        )

    def holds_site(self, eqn: jec.JaxprEqn) -> bool:
        if eqn.primitive.name in CUSTOM_VJP:
            return False
        return any(self._holds(sub) for sub in compat.subjaxprs(eqn.params))

    def _holds(self, jaxpr: compat.AnyJaxpr) -> bool:
        if id(jaxpr) not in self.holds:
            self.holds[id(jaxpr)] = any(
                self.select(eqn) or self.holds_site(eqn)
                for eqn in compat.open_jaxpr(jaxpr).eqns
            )
        return self.holds[id(jaxpr)]


def place_inside(place: Place, eqn: jec.JaxprEqn, *, is_site: bool = False) -> Place:
    """The place of the jaxprs in an equation's parameters."""
    is_named = is_site or eqn.primitive.name in ("jit", "pjit")
    place = dataclasses.replace(
        place,
        scopes=place.scopes + compat.scopes(eqn),
        functions=place.functions + (_function_names(eqn) if is_named else ()),
        depth=place.depth + is_site,
        reachable=place.reachable and not _is_differentiated(eqn),
    )
    if eqn.primitive.name == "while":
        return dataclasses.replace(place, context="loop")
    if eqn.primitive.name == "scan":
        length, unroll = eqn.params["length"], eqn.params["unroll"]
        # XLA removes loops of one step, so their body stands in the code around.
        context = place.context if length == 1 else _scan_context(unroll)
        return dataclasses.replace(place, times=place.times * length, context=context)
    return place


def _is_differentiated(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is a region that was split into forward and backward."""
    return bool(eqn.params.get("differentiated", False))


def _scan_context(unroll: int) -> Context:
    return "unrolled scan" if unroll > 1 else "scan"


# --- what a site is called


_MACHINERY = frozenset(
    "__call__ core_fn fun_checkpoint wrapper wrapped inner split_scan".split()
)
"""Names of functions that say nothing: what libraries wrap a body in."""


def path_of(place: Place, eqn: jec.JaxprEqn) -> str:
    """A readable path for an equation: scopes, else function names, else its line."""
    common = _common_scopes(eqn)
    scopes = place.scopes + compat.scopes(eqn) + common
    names = [_without_method(name) for name in scopes]
    if not scopes:
        names += filter(_says_something, place.functions)
    if not common:
        names += filter(_says_something, _function_names(eqn))
    path = "/".join(_without_repeats("/".join(names).split("/")))
    return path or compat.source_line(eqn) or eqn.primitive.name


def _without_method(scope: str) -> str:
    """`layers` for `layers.block`, as Linen writes a method of the module `layers`."""
    module, dot, method = scope.partition(".")
    is_method = method.isidentifier() or method.startswith("<")
    return module if dot and is_method else scope


def _says_something(function: str) -> bool:
    return not function.startswith("<") and function not in _MACHINERY


def _function_names(eqn: jec.JaxprEqn) -> tuple[str, ...]:
    """The name of the function that an equation's body was traced from, if known."""
    body = next(compat.subjaxprs(eqn.params), None)
    name = compat.function_name(body) if body is not None else None
    return (name,) if name else ()


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
