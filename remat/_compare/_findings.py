"""What lint says of the policies that are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat._finding import Finding
from remat._lint._lint import lint_program
from remat._lint._program import Traced
from remat._targets._target import Target
from remat.policies import Policy


def findings_of(
    loss: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    policies: Mapping[str, Policy],
    target: Target,
) -> dict[str, tuple[Finding, ...]]:
    """The findings of each policy, of one trace of the loss.

    Args:
        loss: What is compared, with its regions.
        args: What it is called with.
        kwargs: Its keyword arguments.
        policies: By label.
        target: Where it is to run.

    Returns:
        The findings by label; policies without any are left out.
    """
    traced = Traced.of(loss, args, kwargs)
    found = {
        label: lint_program(traced.under(policy, target))
        for label, policy in policies.items()
    }
    return {label: findings for label, findings in found.items() if findings}
