"""A loss made ready to be planned: its regions, and what compiles its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat._compare._measure import Setup, n_devices
from remat._plan._errors import PlanError
from remat._plan._kinds import Kind, find_kinds
from remat._plan._meter import Meter
from remat._regions._nnx import recorded
from remat._regions._region import Region
from remat._regions._split_layers import layers_of
from remat._regions._with_policy import RegionError, regions_of
from remat._targets._target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A loss, ready to be planned for a target."""

    target: Target
    """The device."""
    regions: tuple[Region, ...]
    """All regions of the loss."""
    kinds: tuple[Kind, ...]
    """Those that can be planned, equal ones together."""
    left: Mapping[int, str]
    """Why some outer regions stay as they are, by index."""
    meter: Meter
    """What compiles candidates."""


def name_of(loss: Callable[..., Any]) -> str:
    """What to call a loss that has no better name: its own, without where it is."""
    name = getattr(loss, "__qualname__", type(loss).__name__)
    return name.rpartition("<locals>.")[2]


def open_loss(
    loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: Target | str | None,
    optimizer: Any,
    step: Callable[..., Any] | None,
    has_aux: bool,
    argnums: int | Sequence[int],
    compiler_options: Mapping[str, Any] | None,
    allow_offload: bool,
    say: Callable[[str], None],
) -> Opened:
    """Finds the regions of a loss and builds their graphs; arguments as for `plan`.

    Raises:
        PlanError: No region can be planned.
        RegionError: There is no region.
        TargetError: The target is unknown, or this machine cannot compile for it.
    """
    setup = Setup.of(
        target,
        args,
        kwargs,
        compiler_options=compiler_options,
        optimizer=optimizer,
        step=step,
        has_aux=has_aux,
        argnums=argnums,
    )
    device = setup.target
    say("reading the regions")
    with recorded(loss, args, kwargs) as recording:
        regions = regions_of(recording.closed)
        layers = layers_of(recording.closed)
    kinds, left = find_kinds(
        regions,
        layers,
        device,
        allow_offload=allow_offload,
        n_devices=n_devices((args, kwargs)),
    )
    if not kinds:
        raise _nothing_to_plan(left)
    return Opened(
        target=device,
        regions=regions,
        kinds=kinds,
        left=left,
        meter=Meter(loss, kinds, setup, say),
    )


def _nothing_to_plan(left: Mapping[int, str]) -> ValueError:
    if not left:
        return RegionError(
            "the loss has no region, so there is nothing to plan; wrap its layers with "
            "jax.checkpoint, flax.linen.remat, flax.nnx.remat or remat.remat"
        )
    why = "; ".join(dict.fromkeys(left.values()))
    return PlanError(f"none of the loss's {len(left)} regions can be planned: {why}")
