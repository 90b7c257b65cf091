"""Find the regions of a function, and give them another policy from outside.

A region is a piece of program under `jax.checkpoint`, however it got there (Flax's
`nn.remat` and `nnx.remat`, Equinox's `filter_checkpoint`, Haiku's `hk.remat`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._naming._naming import KeepMarked, bind, next_turn
from remat._regions._assign import (
    Assignment,
    check_some_reachable,
    marked_outside,
    removes,
)
from remat._regions._barriers import needs_barriers, with_barrier
from remat._regions._custom_rules import hidden_sites
from remat._regions._errors import CapturedModuleError as CapturedModuleError
from remat._regions._errors import MissingNamesWarning as MissingNamesWarning
from remat._regions._errors import NoNamesFound as NoNamesFound
from remat._regions._errors import RegionError as RegionError
from remat._regions._errors import UnmatchedRuleWarning as UnmatchedRuleWarning
from remat._regions._make_regions import Wanted
from remat._regions._make_regions import with_regions as with_regions
from remat._regions._nnx import recorded
from remat._regions._region import Region as Region
from remat._regions._region import is_region as is_region
from remat._regions._region import without_region
from remat._regions._rewrite import Result, rewrite_equations
from remat._regions._sites import survey_jaxpr
from remat._regions._split_layers import split_layers
from remat.policies import Policy

if TYPE_CHECKING:
    from remat._plan._plan_file import Plan


def find_regions(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Region, ...]:
    """List the regions of a function, without running it.

    Args:
        fn: Any function that JAX can trace.
        *args: What it is called with: arrays, `jax.ShapeDtypeStruct`s, pytrees of
            them, and static values.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        The regions in program order, an outer one before those inside it; then those
        that only the rules of a `custom_vjp` reach, which a rewrite cannot change.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        >>> def loss(ws, x):
        ...     return jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0].sum()
        >>> ws, x = jnp.ones((6, 4, 4)), jnp.ones((2, 4))
        >>> [(r.times, r.context) for r in remat.find_regions(loss, ws, x)]
        [(6, 'scan')]
    """
    with recorded(fn, args, kwargs) as recording:
        return regions_of(recording.closed)


def regions_of(program: compat.AnyJaxpr) -> tuple[Region, ...]:
    """As `find_regions`, of what a function was traced to."""
    regions = survey_jaxpr(program, is_region, Region).sites
    return regions + hidden_sites(program, is_region, Region, first_index=len(regions))


def rewrite_regions(
    fn: Callable[..., Any], edit: Callable[[Region, jec.JaxprEqn], Result]
) -> Callable[..., Any]:
    """The function with every region edited.

    Args:
        fn: Any function that JAX can trace.
        edit: Called as `edit(region, eqn)` for each region that can be changed, inner
            ones first. `region` describes it as traced; in `eqn` the regions inside
            it are edited already. Returns the equation to put there (`eqn` itself
            keeps it), or None to remove the region and put its body in its place.
            A program that is called from several places is edited for each of them;
            where the answers are equal, say so with `rewrite_equations`.

    Raises:
        RegionError: (when called) no region can be changed.
    """

    def decide(regions: Sequence[Region], program: compat.AnyJaxpr) -> list[int]:
        check_some_reachable(regions or _hidden(program))
        return [region.index for region in regions]

    return rewrite_equations(
        fn,
        select=is_region,
        decide=decide,
        edit=lambda region, eqn, _: edit(region, eqn),
        make_site=Region,
    )


def with_policy(
    fn: Callable[..., Any],
    policy: Policy | str | Callable[..., Any] | Mapping[str, Any] | Plan,
    *,
    regions: Wanted | None = None,
) -> Callable[..., Any]:
    """The same function, with the policy of every region inside it replaced.

    Values and gradients stay as they are; what is kept for the backward pass changes.
    Apply it to the loss, before `jax.grad`:
    `jax.grad(remat.with_policy(loss, "save_dots"))`.

    Where a region runs decides its `prevent_cse`, whatever it was: off in a scan that
    stays a loop, on elsewhere, where XLA would undo the recomputation. Regions inside
    a region get the policy too; what the outermost keeps, all of them have.

    Args:
        fn: Any function that JAX can trace, with regions in it: inside scan, cond,
            while, jit, shard_map and other regions too.
        policy: A `remat.policies.Policy`, the name of one, a callable as
            `jax.checkpoint(policy=)` takes, or a mapping from region pattern (as
            `fnmatch`, on `Region.path`) to those, the first match counting. "nothing"
            recomputes everything, "none" removes the regions. A `remat.Plan` is
            applied as by its own `apply`.
        regions: Regions to make first, in code that has none: `"scan"` for the layers
            of a scan, a pattern of module paths such as `"Block_*"`, or a list of
            these, as `remat.with_regions` takes them.

    Returns:
        A function that takes and returns what `fn` does. It is traced at each call,
        as by `jax.jit`, so it can stand under any transformation.

    Raises:
        PolicyError: the policy is None or something else that is not a policy.
        RegionError: (when called) no region can be changed, a pattern matches no
            region, or the policy names only checkpoint names that no region emits.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)))
        >>> loss = lambda w, x: layer(layer(x, w), w).sum()
        >>> faster = remat.with_policy(loss, "save_dots")
        >>> bool(faster(jnp.eye(3), jnp.ones(3)) == loss(jnp.eye(3), jnp.ones(3)))
        True
    """
    if regions is not None:
        fn = with_regions(fn, regions)
    if _is_plan(policy):
        return policy.apply(fn)
    assignment = Assignment.of(policy)
    if assignment.is_by_layer:
        fn = split_layers(fn, assignment.by_layer)

    def decide(regions: Sequence[Region], program: compat.AnyJaxpr) -> list[_Decision]:
        chosen = assignment.policies_of(regions or _hidden(program))
        turn = max((next_turn(region.policy) for region in regions), default=0)
        barriers, marked = needs_barriers(regions), marked_outside(regions, chosen)
        given = zip(regions, chosen, barriers, marked, strict=True)
        return [_decision(*one, turn) for one in given]

    return rewrite_equations(
        fn, select=is_region, decide=decide, edit=_set_policy, make_site=Region
    )


def _is_plan(policy: Any) -> TypeGuard[Plan]:
    from remat._plan._plan_file import Plan  # it stands on this module

    return isinstance(policy, Plan)


@dataclasses.dataclass(frozen=True, slots=True)
class _Decision:
    """What becomes of a region."""

    policy: Policy | None
    """The policy it gets; None leaves it as it is."""
    region_path: str | None
    """Its path, where the policy reads it."""
    barrier: bool
    """Whether it needs one where it runs."""
    marked: bool
    """Whether a region around it marks what both keep."""
    turn: int
    """Of the marks."""


def _decision(
    region: Region, policy: Policy | None, barrier: bool, marked: bool, turn: int
) -> _Decision:
    needs = policy.needs if policy is not None else frozenset()
    reads_path = needs & {"region_path", "module_path"}
    path = region.path if reads_path else None
    return _Decision(policy, path, barrier, marked, turn)


def _set_policy(
    region: Region, eqn: jec.JaxprEqn, decision: _Decision
) -> jec.JaxprEqn | None:
    policy = decision.policy
    if policy is None:
        return eqn
    if removes(policy):
        return without_region(eqn)
    params = with_barrier(eqn, decision.barrier)
    if not policy.needs_binding:
        return eqn.replace(params={**params, "policy": policy})
    if decision.marked:
        return eqn.replace(params={**params, "policy": KeepMarked(decision.turn)})
    if region.in_rule:
        raise RegionError(
            f"{policy!r} must see every value of a region, and the region "
            f"{region.path!r} stands in a custom_jvp function, of which the derivative "
            "rule runs instead. Give that region a policy that JAX can apply by "
            "itself, such as 'save_dots'."
        )
    jaxpr, bound = bind(
        policy,
        eqn.params["jaxpr"],
        region_path=decision.region_path,
        turn=decision.turn,
    )
    return eqn.replace(params={**params, "jaxpr": jaxpr, "policy": bound})


def _hidden(program: compat.AnyJaxpr) -> tuple[Region, ...]:
    return hidden_sites(program, is_region, Region)
