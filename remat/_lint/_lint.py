"""`remat.lint`: what a policy, on a program, would silently not do.

Each rule is a small function in one of the `_lint_*` modules, over one region as JAX
will treat it (`_lint_flow`) or over the program. Every distinct region is
differentiated once, so the time is that of tracing the gradient.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat._finding import Finding as Finding
from remat._lint._matmuls import MATMUL_RULES
from remat._lint._names import NAME_PROGRAM_RULES, NAME_RULES
from remat._lint._place import PLACE_PROGRAM_RULES, PLACE_RULES
from remat._lint._policy import POLICY_PROGRAM_RULES, POLICY_RULES
from remat._lint._program import Linted, Program, Traced
from remat._lint._reruns import RERUN_RULES
from remat._regions._make_regions import Wanted, made_first
from remat._targets._target import Target
from remat._targets._target import target as find_target

RegionRule = Callable[[Linted], Iterable[Finding]]
ProgramRule = Callable[[Program], Iterable[Finding]]

REGION_RULES: tuple[RegionRule, ...] = (
    *NAME_RULES,
    *POLICY_RULES,
    *MATMUL_RULES,
    *PLACE_RULES,
    *RERUN_RULES,
)
PROGRAM_RULES: tuple[ProgramRule, ...] = (
    *NAME_PROGRAM_RULES,
    *POLICY_PROGRAM_RULES,
    *PLACE_PROGRAM_RULES,
)


def lint(
    fn: Callable[..., Any],
    policy: Any,
    *args: Any,
    target: str | Target | None = None,
    regions: Wanted | None = None,
    **kwargs: Any,
) -> tuple[Finding, ...]:
    """Find what a policy would silently not do in a program, and how to mend it.

    Nothing is run, compiled or allocated.

    Args:
        fn: A loss, or any function with regions in it that JAX can differentiate.
        policy: What `remat.with_policy` takes; None looks at the policies that the
            program has itself.
        *args: What `fn` is called with: arrays, `jax.ShapeDtypeStruct`s, pytrees of
            them, and static values.
        target: Where it is to run, for what depends on that: a name, a `Target`, or
            None to leave that out.
        regions: Regions to make first, in code that has none: `"scan"`, a pattern of
            module paths such as `"Block_*"`, or a list of these, as
            `remat.with_regions` takes them.
        **kwargs: Keyword arguments of `fn`.

    Returns:
        The findings, errors first. Equal ones, of the layers of an unrolled model,
        are one.

    Raises:
        PolicyError: The policy is none.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss(w, x):
        ...     f = lambda w, x: jnp.tanh(checkpoint_name(x @ w, "mlp_in")) @ w
        ...     for _ in range(2):
        ...         x = jax.checkpoint(f)(w, x)
        ...     return x.sum()
        >>> typo = remat.policies.save_names("mlp_im")
        >>> [f.code for f in lint(loss, typo, jnp.eye(4), jnp.ones((2, 4)))]
        ['unemitted-name', 'unmentioned-name']
    """
    where = None if target is None else find_target(target)
    fn = made_first(fn, regions)
    return lint_program(Traced.of(fn, args, kwargs).under(policy, where))


def lint_program(program: Program) -> tuple[Finding, ...]:
    """The findings of a program that was traced already."""
    found = [f for rule in PROGRAM_RULES for f in rule(program)]
    for region in program.regions:
        found.extend(f for rule in REGION_RULES for f in rule(region))
    return tuple(sorted(_merged(found), key=lambda f: f.rank))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that differ only in the region they are of, as one."""
    alike: Mapping[Finding, list[str]] = collections.defaultdict(list)
    for finding in findings:
        alike[dataclasses.replace(finding, where="")].append(finding.where)
    return [
        dataclasses.replace(finding, where=_listed(list(dict.fromkeys(places))))
        for finding, places in alike.items()
    ]


def _listed(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
