"""Haliax' and Levanter's checkpointing of a scan over blocks.

From `ScanCheckpointPolicy` of `haliax/_src/scan.py`. Its `nested` is no policy but
another scan: `remat.scan(segments="sqrt")`.
"""

from collections.abc import Iterable
from typing import Literal

from remat.policies._by_name import named_matching
from remat.policies._catalogue import everything, nothing
from remat.policies._checks import checked_names_argument
from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._factories import (
    offload,
    save,
    save_and_offload_names,
)
from remat.policies._policy import Policy
from remat.policies._registry import entry, maker, same
from remat.policies._selector import Selector

_SOURCE = "Haliax, Levanter"
_CARRIES = named_matching(r"scan\(.*\)__carry|BlockSeq\[.*\]\.carry")
_INPUTS = named_matching(r"scan\(.*\)__input|BlockSeq\[.*\]\.outputs")

haliax_recompute = same("haliax_recompute", nothing, _SOURCE)
haliax_save_all = same("haliax_save_all", everything, _SOURCE)
haliax_offload = entry(
    "haliax_offload",
    offload(_CARRIES | _INPUTS),
    Description(
        saves="nothing",
        offloads="what each block takes: its carry and its other inputs",
        recomputes="everything inside a block",
        when="not even the blocks' inputs fit on the device",
        source=_SOURCE,
    ),
)
haliax_carries = entry(
    "haliax_carries",
    save(_CARRIES),
    Description(
        saves="the carry that each block takes",
        recomputes="everything inside a block",
        when="the default of Haliax",
        source=_SOURCE,
    ),
)

Place = bool | Literal["offload"]


@maker
def haliax_scan(
    *,
    save_carries: Place = True,
    save_inputs: Place = False,
    save_block_internals: bool | Iterable[str] = False,
    offload_block_internals: Iterable[str] = (),
) -> Policy:
    """Haliax' `ScanCheckpointPolicy`: carries, inputs and internals of each block.

    Args:
        save_carries: Save the carries, move them to the host (`"offload"`), or not.
        save_inputs: The same for a block's other inputs.
        save_block_internals: Save all else too, or the values of these names.
        offload_block_internals: Names of values to move to the host.

    Returns:
        The policy. With all internals saved but not the carries it needs binding.

    Raises:
        PolicyError: If an argument is none of these, or a name is to be both saved
            and offloaded.

    Example:
        >>> from remat import policies
        >>> policies.haliax_scan(save_carries="offload").offloads
        True
    """
    carries = _placed("save_carries", save_carries, _CARRIES)
    inputs = _placed("save_inputs", save_inputs, _INPUTS)
    offloaded = checked_names_argument(
        "offload_block_internals", offload_block_internals
    )
    if isinstance(save_block_internals, bool):
        named = save_and_offload_names(offload=offloaded)
        policy = carries | inputs | named
        if save_block_internals:
            policy = policy | _all_but(save_carries, save_inputs)
    else:
        names = checked_names_argument("save_block_internals", save_block_internals)
        policy = carries | inputs | save_and_offload_names(names, offloaded)
        save_block_internals = [*names]
    code = (
        f"haliax_scan(save_carries={save_carries!r}, save_inputs={save_inputs!r}, "
        f"save_block_internals={save_block_internals!r}, "
        f"offload_block_internals={[*offloaded]!r})"
    )
    return policy.renamed(code, code, policy.description)


def _placed(argument: str, place: Place, selector: Selector) -> Policy:
    if place is True:
        return save(selector)
    if place is False:
        return nothing
    if place == "offload":
        return offload(selector)
    raise PolicyError(f"{argument} is True, False or 'offload', got {place!r}")


def _all_but(save_carries: Place, save_inputs: Place) -> Policy:
    """Everything, but for carries and inputs that are not to be saved."""
    policy = everything
    if save_carries is not True:
        policy = policy - _CARRIES
    return policy if save_inputs is True else policy - _INPUTS
