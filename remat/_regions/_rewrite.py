"""Replace equations anywhere inside a function.

The mechanism under `with_policy`, the planner and the naming of intermediates:
trace the function to a jaxpr, survey it for the wanted equations (`Site`s), rebuild
the jaxprs that hold one, and evaluate the result in place of the function.

Two rules keep a rewritten program as small as the original:

- A jaxpr without a wanted equation keeps its identity.
- A jaxpr that is called many times is rewritten once (for equal
  decisions), so that 80 calls of one inner `jit` stay one function in the
  lowered program. Across calls of the rewritten function too, which lets JAX's own
  compilation caches hit.

Where the layers of a scan are to differ, the scan becomes as few scans as run its
decisions in order: k layers and the rest, two; every second layer, one over pairs. Its
xs are not copied.

The cost is linear in the number of equations, nested jaxprs counted once for each
place that holds a wanted equation.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._jaxprs._custom_jvp import is_custom_jvp, with_mapped_rule
from remat._jaxprs._equations import fresh_like, under_name_stack
from remat._regions._by_layer import ByLayer, of_step
from remat._regions._layer_scans import runs_layers
from remat._regions._nnx import recorded
from remat._regions._sites import Select, Site, Survey, survey_jaxpr

Result = jec.JaxprEqn | Sequence[jec.JaxprEqn] | None
"""What stands in an equation's place: an equation, several that together define the
same outputs, or None for the equation's body."""
Edit = Callable[[Any, jec.JaxprEqn, Any], Result]
"""From a site, its equation (sites inside it already edited) and the decision on it to
what stands there instead."""
Decide = Callable[[Sequence[Any], compat.AnyJaxpr], Sequence[Hashable]]
"""From all sites and the program they stand in to a decision on each; `ByLayer` where
the layers of a scan that holds the site are to differ."""


def rewrite_equations(
    fn: Callable[..., Any],
    *,
    select: Select,
    decide: Decide,
    edit: Edit,
    make_site: Callable[..., Any] = Site,
) -> Callable[..., Any]:
    """The function `fn` with every selected equation edited, wherever it stands.

    The result takes and returns what `fn` does, and can be differentiated, jitted,
    vmapped, scanned and rewritten again. Each call traces `fn` anew, as `jax.jit`
    does, so Python side effects happen on every call.

    Args:
        fn: Any function that JAX can trace.
        select: Which equations to edit. Those inside a `custom_vjp` are not asked
            about: that code does not run when it is differentiated.
        decide: Called at each call as `decide(sites, program)`, before any edit.
            Returns one hashable decision a site; raises to refuse.
        edit: Called as `edit(site, eqn, decision)`, inner sites first, with
            reachable sites only. It must depend on the equation and the decision
            alone: a jaxpr that is called from several places, or in several calls,
            with equal decisions inside is edited once. A body put in place by None
            must not have constants.
        make_site: The class of site to make.
    """
    memo = Memo()

    @functools.wraps(fn, updated=())  # a module's attributes are its own
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        with recorded(fn, args, kwargs) as recording:
            survey = survey_jaxpr(recording.closed, select, make_site)
            decisions = tuple(decide(survey.sites, recording.closed))
            rewriter = _Rewriter(select, edit, make_site, decisions, memo)
            return recording.run(rewriter.rewrite(survey))

    return rewritten


class Memo:
    """Rewritten jaxprs by original and by the decisions on the sites inside.

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
    select: Select
    edit: Edit
    make_site: Callable[..., Any]
    decisions: Sequence[Hashable]
    memo: Memo
    check_vma: bool = False
    """Of the `shard_map` around what is rewritten."""

    def rewrite(self, survey: Survey) -> compat.AnyJaxpr:
        """The surveyed jaxpr with its sites edited, open or closed as it was."""
        if not any(site.reachable for site in survey.sites):
            return survey.jaxpr
        entries = self.memo.entries(survey.jaxpr)
        key = self.key(survey)
        if key not in entries:
            new = self.rewrite_open(survey)
            entries[key] = compat.with_open(survey.jaxpr, new)
        return entries[key]

    def key(self, survey: Survey) -> Hashable:
        """What the rewritten form of a jaxpr depends on."""
        decisions = tuple(self.decisions[site.index] for site in survey.sites)
        return (decisions, self.check_vma) if self.differs(survey) else decisions

    def differs(self, survey: Survey) -> bool:
        """Whether layers inside are to differ."""
        return any(isinstance(self.decisions[s.index], ByLayer) for s in survey.sites)

    def rewrite_open(self, survey: Survey) -> jec.Jaxpr:
        jaxpr = compat.open_jaxpr(survey.jaxpr)
        equations: list[jec.JaxprEqn] = []
        replaced: dict[jec.Var, Any] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            eqn = substitute(eqn, replaced)
            if i in survey.inside:
                eqn = self.rewrite_inside(eqn, survey.inside[i])
            if i not in survey.at or not survey.at[i].reachable:
                equations.append(eqn)
                continue
            site = survey.at[i]
            edited = self.edit(site, eqn, self.decisions[site.index])
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

    def rewrite_inside(
        self, eqn: jec.JaxprEqn, surveys: Sequence[Survey]
    ) -> jec.JaxprEqn:
        if runs_layers(eqn) and self.differs(surveys[0]):
            return self.rewrite_layers(eqn, surveys[0])
        vma = eqn.params.get("check_vma", self.check_vma)
        rewriter = dataclasses.replace(self, check_vma=vma)
        in_turn = iter(surveys)
        params = compat.map_jaxprs(
            eqn.params, lambda _: rewriter.rewrite(next(in_turn))
        )
        if is_custom_jvp(eqn) and surveys[0].sites:
            rule = functools.partial(self.rewrite_rule, surveys[0])
            params = with_mapped_rule(params, rule)
        return eqn.replace(params=params)

    def rewrite_layers(self, eqn: jec.JaxprEqn, body: Survey) -> jec.JaxprEqn:
        """A scan of layers, split where they are to differ."""
        from remat._scan._split import split_equation  # it rewrites equations too

        length = eqn.params["length"]
        steps: list[Hashable] = []
        bodies: dict[Hashable, compat.AnyJaxpr] = {}
        for step in range(length):
            own = self.of_step(body, step, length)
            steps.append(own.key(body))
            if steps[-1] not in bodies:
                bodies[steps[-1]] = own.rewrite(body)
        if len(bodies) == 1:
            (only,) = bodies.values()
            return eqn.replace(params={**eqn.params, "jaxpr": only})
        with compat.at_place_of(eqn, check_vma=self.check_vma):
            return split_equation(eqn, steps, bodies)

    def of_step(self, body: Survey, step: int, n_steps: int) -> "_Rewriter":
        """What rewrites the body of a loop for one of its steps."""
        decisions = list(self.decisions)
        for site in body.sites:
            decisions[site.index] = of_step(decisions[site.index], step, n_steps)
        return dataclasses.replace(self, decisions=decisions)

    def rewrite_rule(self, primal: Survey, rule: jec.Jaxpr) -> jec.Jaxpr:
        """The derivative rule of a `custom_jvp`, its sites edited like the primal's.

        A rule that holds other sites than the function stays as it is.
        """
        survey = survey_jaxpr(
            rule,
            self.select,
            self.make_site,
            place=dataclasses.replace(primal.place, in_rule=True),
            first_index=primal.sites[0].index,
        )
        if len(survey.sites) != len(primal.sites):
            return rule
        return compat.open_jaxpr(self.rewrite(survey))


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
        outvars = [fresh_like(var) for var in inner.outvars]
        env.update(zip(inner.outvars, outvars, strict=True))
        source_info = under_name_stack(inner, eqn)
        equations.append(inner.replace(outvars=outvars, source_info=source_info))
    return equations, [read(atom, env) for atom in body.outvars]


def substitute(eqn: jec.JaxprEqn, env: dict[jec.Var, Any]) -> jec.JaxprEqn:
    """The equation with the operands that `env` knows replaced."""
    if not any(not compat.is_literal(atom) and atom in env for atom in eqn.invars):
        return eqn
    return eqn.replace(invars=[read(atom, env) for atom in eqn.invars])


def read(atom: Any, env: dict[jec.Var, Any]) -> Any:
    """What `env` has in place of an operand, or the operand."""
    return atom if compat.is_literal(atom) else env.get(atom, atom)
