"""Different layers, different treatment: split the scans that run them.

A region in the body of a scan is one program for all layers. Here the scan becomes
several, each of layers that are treated alike, and their regions are told apart by a
`Part` that stands in place of their policy until a rewrite gives them one.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._regions._by_layer import by_layer
from remat._regions._enclose import ENTERED
from remat._regions._layer_scans import runs_layers
from remat._regions._region import Region, is_region
from remat._regions._rewrite import rewrite_equations
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

    def decide(regions: Sequence[Region], program: compat.AnyJaxpr) -> list[Hashable]:
        labels = label(layers_of(program))
        return [
            by_layer([Part(one) for one in labels[region.index]])
            if region.index in labels
            else None
            for region in regions
        ]

    return rewrite_equations(
        fn, select=is_region, decide=decide, edit=_put, make_site=Region
    )


def layers_of(program: compat.AnyJaxpr) -> list[Layers]:
    """The regions of a program that stand in layer scans which can be split."""
    return list(_layers(survey_jaxpr(program, is_region, Region)))


def _put(region: Region, eqn: jec.JaxprEqn, part: Part | None) -> jec.JaxprEqn:
    del region
    return eqn if part is None else eqn.replace(params={**eqn.params, "policy": part})


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
