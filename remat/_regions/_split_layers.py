"""Different layers, different treatment: split the scans that run them.

A region in the body of a scan is one program for all layers. Here the scan becomes
several, each of layers that are treated alike, and their regions are told apart by a
`Part` that stands in place of their policy until a rewrite gives them one.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._regions._enclose import ENTERED
from remat._regions._layer_scans import runs_layers
from remat._regions._nnx import recorded
from remat._regions._region import Region, is_region
from remat._regions._rewrite import Memo
from remat._regions._sites import Survey, survey_jaxpr


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Part:
    """Stands for the policy of some layers of a scan, until they get one."""

    label: Hashable
    """What tells these layers from others."""

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Answer JAX's question about one equation, as no policy would."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """The layers that a region in the body of a scan stands for."""

    region: Region
    n_layers: int
    """Steps of the layer scans around it: how often they run it."""
    loop: tuple[int, ...]
    """Equal for the regions in one loop body, and for them only."""


Labels = Mapping[int, Sequence[Hashable]]
"""From the index of a region to a label for each of its layers, as they run."""


def split_layers(
    fn: Callable[..., Any], label: Callable[[Sequence[Layers]], Labels]
) -> Callable[..., Any]:
    """The same function, its layer scans split so that layers can be told apart.

    A scan becomes as few scans as run its labels in order: k layers and the rest, two;
    every second layer, one over pairs. Its xs are not copied. Where all layers have
    one label the scan stays.

    Args:
        fn: Any function that JAX can trace.
        label: From the regions in layer scans (those in one scan, in several nested
            ones, in jit, cond and shard_map) to labels; a region that is left out is
            not told apart. Several steps are alike where all labels in them are.

    Returns:
        A function of the same values and derivatives, in which the regions that were
        labelled have `Part(label)` for a policy: to be replaced, as by
        `rewrite_equations`, before it is differentiated.
    """
    memo = Memo()

    @functools.wraps(fn, updated=())
    def split(*args: Any, **kwargs: Any) -> Any:
        with recorded(fn, args, kwargs) as recording:
            survey = survey_jaxpr(recording.closed, is_region, Region)
            labels = label(list(_layers(survey)))
            if not labels:
                return recording.run(recording.closed)
            return recording.run(_Splitter(memo).rewrite(survey, labels, False))

    return split


def _layers(
    survey: Survey, n_layers: int = 1, loop: tuple[int, ...] = ()
) -> Iterator[Layers]:
    eqns = compat.open_jaxpr(survey.jaxpr).eqns
    for region in survey.at.values():
        if n_layers > 1 and region.reachable:
            yield Layers(region=region, n_layers=n_layers, loop=loop)
    for i, surveys in survey.inside.items():
        if not _is_entered(eqns[i]):
            continue
        n_inside = n_layers * (eqns[i].params["length"] if runs_layers(eqns[i]) else 1)
        for j, inner in enumerate(surveys):
            yield from _layers(inner, n_inside, (*loop, i, j))


def _is_entered(eqn: jec.JaxprEqn) -> bool:
    return eqn.primitive.name in ENTERED or is_region(eqn)


@dataclasses.dataclass(frozen=True, slots=True)
class _Splitter:
    memo: Memo

    def rewrite(self, survey: Survey, labels: Labels, vma: bool) -> compat.AnyJaxpr:
        """A surveyed jaxpr with its scans split."""
        sites = [site for site in survey.sites if site.index in labels]
        if not sites:
            return survey.jaxpr
        entries = self.memo.entries(survey.jaxpr)
        offset = survey.sites[0].index
        given = tuple((s.index - offset, tuple(labels[s.index])) for s in sites)
        key = (given, vma)
        if key not in entries:
            opened = compat.open_jaxpr(survey.jaxpr)
            eqns = [
                self._edited(survey, i, labels, vma) for i in range(len(opened.eqns))
            ]
            entries[key] = compat.with_open(survey.jaxpr, opened.replace(eqns=eqns))
        return entries[key]

    def _edited(
        self, survey: Survey, i: int, labels: Labels, vma: bool
    ) -> jec.JaxprEqn:
        eqn = compat.open_jaxpr(survey.jaxpr).eqns[i]
        inside = survey.inside.get(i, ())
        if inside and _is_entered(eqn):
            vma = eqn.params.get("check_vma", vma)
            if runs_layers(eqn):
                return self._split(eqn, inside[0], labels, vma)
            in_turn = iter(inside)
            params = compat.map_jaxprs(
                eqn.params, lambda _: self.rewrite(next(in_turn), labels, vma)
            )
            eqn = eqn.replace(params=params)
        if i in survey.at and survey.at[i].index in labels:
            (label,) = labels[survey.at[i].index]
            eqn = eqn.replace(params={**eqn.params, "policy": Part(label)})
        return eqn

    def _split(
        self, eqn: jec.JaxprEqn, body: Survey, labels: Labels, vma: bool
    ) -> jec.JaxprEqn:
        from remat._scan._split import split_equation  # it rewrites equations too

        length = eqn.params["length"]
        mine = {s.index: labels[s.index] for s in body.sites if s.index in labels}
        if not mine:
            return eqn
        steps: list[Hashable] = []
        bodies: dict[Hashable, compat.AnyJaxpr] = {}
        for step in range(length):
            own = {index: _share(all_, step, length) for index, all_ in mine.items()}
            kind = tuple((index, tuple(given)) for index, given in own.items())
            steps.append(kind)
            if kind not in bodies:
                bodies[kind] = self.rewrite(body, own, vma)
        if len(bodies) == 1:
            (only,) = bodies.values()
            return eqn.replace(params={**eqn.params, "jaxpr": only})
        with compat.at_place_of(eqn, check_vma=vma):
            return split_equation(eqn, steps, bodies)


def _share(labels: Sequence[Hashable], step: int, n_steps: int) -> Sequence[Hashable]:
    """The labels that belong to one step of a loop."""
    n = len(labels) // n_steps
    assert n * n_steps == len(labels), "one label for each layer"
    return labels[step * n : (step + 1) * n]
