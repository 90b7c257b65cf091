"""All of `jax.checkpoint_policies` under JAX's own names, with arguments checked."""

from collections.abc import Iterable
from typing import Any

from remat.policies._catalogue import (
    everything,
    nothing,
    offload_dots_no_batch,
    save_dots,
    save_dots_no_batch,
)
from remat.policies._checks import checked_host_memory, checked_source_memory
from remat.policies._factories import (
    save_and_offload_names,
    save_any_names_but,
    save_anything_except_names,
    save_names,
)
from remat.policies._policy import Policy, coerced
from remat.policies._registry import alias, maker, same

everything_saveable = same("everything_saveable", everything, "JAX")
nothing_saveable = same("nothing_saveable", nothing, "JAX")
dots_saveable = same("dots_saveable", save_dots, "JAX")
checkpoint_dots = same("checkpoint_dots", save_dots, "JAX")
dots_with_no_batch_dims_saveable = same(
    "dots_with_no_batch_dims_saveable", save_dots_no_batch, "JAX"
)
checkpoint_dots_with_no_batch_dims = same(
    "checkpoint_dots_with_no_batch_dims", save_dots_no_batch, "JAX"
)
save_only_these_names = alias("save_only_these_names", save_names)
save_any_names_but_these = alias("save_any_names_but_these", save_any_names_but)
save_anything_except_these_names = alias(
    "save_anything_except_these_names", save_anything_except_names
)


@maker
def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """JAX's `offload_dot_with_no_batch_dims`, with its arguments checked.

    Raises:
        PolicyError: If JAX moves nothing from or to these memory kinds.
    """
    checked_source_memory(offload_src)
    checked_host_memory(offload_dst)
    return offload_dots_no_batch


@maker
def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """JAX's `save_and_offload_only_these_names`, with its arguments checked.

    Raises:
        PolicyError: If a name stands in both, a string is given for a collection,
            or JAX moves nothing from or to these memory kinds.
    """
    checked_source_memory(offload_src)
    return save_and_offload_names(
        save=names_which_can_be_saved,
        offload=names_which_can_be_offloaded,
        to=offload_dst,
    )


@maker
def save_from_both_policies(policy_1: Any, policy_2: Any) -> Policy:
    """JAX's `save_from_both_policies`; with offload too: `policy_1 | policy_2`."""
    return coerced(policy_1) | policy_2
