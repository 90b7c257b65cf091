"""What `compare` takes for a policy: names, policies, plans, and scans cut as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat import policies as catalogue
from remat._plan._plan_file import Plan
from remat._regions._with_policy import with_policy
from remat._scan._segment_scans import segment_scans

DEFAULT_POLICIES = (
    "none",
    "save_dots",
    "save_dots_no_batch",
    "minimal",
    "minimal_with_context",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_qkv_proj",
    "save_out_proj",
    "nothing",
    "offload_dots",
    "offload_dots_no_batch",
    "qkv_proj_offloaded",
    "minimal_offloaded",
)
"""The rows of a comparison where nothing else is asked for."""

SEGMENTED = " + sqrt"
"""Ends a row's name whose scans are also cut by `remat.segment_scans`."""


def labelled_policies(
    policies: Sequence[Any] | Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Policies, plans and cut scans by their rows' labels.

    Raises:
        ValueError: There is none, or a name is not known.
    """
    if policies is None:
        policies = DEFAULT_POLICIES
    if isinstance(policies, str):
        policies = (policies,)
    if isinstance(policies, Mapping):
        given = list(policies.items())
    else:
        given = [(None, policy) for policy in policies]
    if not given:
        raise ValueError("policies is empty; name at least one, such as 'nothing'")
    labelled: dict[str, Any] = {}
    for label, policy in given:
        if isinstance(policy, str) and policy.endswith(".json"):
            label, policy = label or policy, Plan.load(policy)
        if isinstance(policy, Plan):
            labelled.setdefault(label or "plan", policy)
            continue
        if isinstance(policy, str) and policy.endswith(SEGMENTED):
            cut = Segmented(catalogue.as_policy(policy.removesuffix(SEGMENTED)))
            labelled.setdefault(label or policy, cut)
            continue
        resolved = catalogue.as_policy(policy)
        labelled.setdefault(label or resolved.name, resolved)
    return labelled


@dataclasses.dataclass(frozen=True, slots=True)
class Segmented:
    """A policy, and every scan of the loss cut into sqrt(N) segments."""

    policy: catalogue.Policy


def applied(loss: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """The loss under one of `labelled_policies`."""
    if isinstance(policy, Plan):
        return policy.apply(loss)
    if isinstance(policy, Segmented):
        return segment_scans(with_policy(loss, policy.policy))
    return with_policy(loss, policy)


def lintable(labelled: Mapping[str, Any]) -> dict[str, catalogue.Policy]:
    """The rows that are policies; a plan was linted when it was made."""
    return {
        label: one.policy if isinstance(one, Segmented) else one
        for label, one in labelled.items()
        if not isinstance(one, Plan)
    }
