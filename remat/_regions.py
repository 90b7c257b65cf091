"""Find the regions of a function, and give them another policy from outside.

A region is a piece of program under `jax.checkpoint`, however it got there (Flax's
`nn.remat` and `nnx.remat`, Equinox's `filter_checkpoint`, Haiku's `hk.remat`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat import _jax_compat as compat
from remat._assign import Assignment as Assignment
from remat._assign import MissingNamesWarning as MissingNamesWarning
from remat._assign import NoNamesFound as NoNamesFound
from remat._assign import RegionError as RegionError
from remat._assign import removes
from remat._fingerprint import fingerprint
from remat._nnx import recorded
from remat._rewrite import Edit, Site, rewrite_equations, survey_jaxpr
from remat.policies import Policy


class Region(Site):
    """A piece of program under `jax.checkpoint`, at one place in a function.

    A region that several calls reach is listed once for each; one inside a scan is
    listed once and its `times` says how often it runs.
    """

    __slots__ = ()

    @property
    def jaxpr(self) -> jec.Jaxpr:
        """The program of the region."""
        return compat.open_jaxpr(self.eqn.params["jaxpr"])

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy it has now; None recomputes everything."""
        return self.eqn.params["policy"]

    @property
    def prevent_cse(self) -> bool:
        """Whether any of its inputs is kept from common-subexpression elimination."""
        prevent = self.eqn.params["prevent_cse"]
        return prevent if isinstance(prevent, bool) else any(prevent)

    @property
    def n_equations(self) -> int:
        """Equations in it, those of nested programs included."""
        return _n_equations(self.jaxpr)

    @property
    def emitted_names(self) -> tuple[str, ...]:
        """The `checkpoint_name`s emitted in it, in order of first appearance."""
        return tuple(dict.fromkeys(_names(self.jaxpr)))

    @property
    def fingerprint(self) -> str:
        """Equal for regions of equal program, in every version of JAX."""
        return fingerprint(self.jaxpr)


def _n_equations(jaxpr: jec.Jaxpr) -> int:
    inside = (sub for eqn in jaxpr.eqns for sub in compat.subjaxprs(eqn.params))
    return len(jaxpr.eqns) + sum(_n_equations(compat.open_jaxpr(j)) for j in inside)


def _names(jaxpr: jec.Jaxpr) -> list[str]:
    names = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is compat.name_p:
            names.append(eqn.params["name"])
        for sub in compat.subjaxprs(eqn.params):
            names.extend(_names(compat.open_jaxpr(sub)))
    return names


def is_region(eqn: jec.JaxprEqn) -> bool:
    """Whether an equation is a region."""
    return eqn.primitive.name in compat.REGION_PRIMITIVES


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
        The regions in program order, an outer one before those inside it.

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
        return survey_jaxpr(recording.closed, is_region, Region).sites


def rewrite_regions(
    fn: Callable[..., Any],
    edit: Edit,
    *,
    variant: Callable[[Region], Hashable] = lambda region: None,
    check: Callable[[Sequence[Region]], None] = lambda regions: None,
) -> Callable[..., Any]:
    """The function with every region edited; `with_policy` is one user of it.

    Args:
        fn: Any function that JAX can trace.
        edit: Called as `edit(region, eqn)`, inner regions first. `eqn` is the
            region's equation with the regions inside it already edited; `region`
            describes it as traced. Returns the equation to put there (`eqn` itself
            keeps it), or None to remove the region and put its body in its place.
        variant: What, besides the program, the answer depends on (for example
            `lambda region: region.path`). Regions reached through one jaxpr that is
            called several times are edited once when their variants are equal.
        check: Called with all regions of a call before any edit; raises to refuse.
    """
    return rewrite_equations(
        fn,
        select=is_region,
        edit=edit,
        variant=variant,
        check=check,
        make_site=Region,
    )


def with_policy(
    fn: Callable[..., Any],
    policy: Policy | str | Callable[..., Any] | Mapping[str, Any],
) -> Callable[..., Any]:
    """The same function, with the policy of every region inside it replaced.

    Values and gradients stay as they are; what is kept for the backward pass changes.
    Apply it to the loss, before `jax.grad`:
    `jax.grad(remat.with_policy(loss, "save_dots"))`.

    Args:
        fn: Any function that JAX can trace, with regions in it: inside scan, cond,
            while, jit, shard_map and other regions too.
        policy: A `remat.policies.Policy`, the name of one, a callable as
            `jax.checkpoint(policy=)` takes, or a mapping from region pattern (as
            `fnmatch`, on `Region.path`) to those, the first match counting. "nothing"
            recomputes everything, "none" removes the regions.

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
    assignment = Assignment.of(policy)

    def edit(region: Region, eqn: jec.JaxprEqn) -> jec.JaxprEqn | None:
        chosen = assignment.policy_of(region)
        if chosen is None:
            return eqn
        if removes(chosen):
            return None
        return _with_params(eqn, policy=chosen)

    return rewrite_regions(
        fn, edit, variant=assignment.policy_of, check=assignment.check
    )


def _with_params(eqn: jec.JaxprEqn, **params: Any) -> jec.JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})
