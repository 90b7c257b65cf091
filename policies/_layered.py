"""Different layers, different policies."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from remat.policies._checks import checked_count
from remat.policies._coerce import as_policy
from remat.policies._description import Description
from remat.policies._errors import PolicyError
from remat.policies._policy import Policy
from remat.policies._registry import maker
from remat.policies._rules import Rule
from remat.policies._selector import united
from remat.policies._value import Decision, Value


class Layered(Rule):
    """A rule that gives each layer of a stack a policy of its own."""

    __slots__ = ()

    def policies(self) -> tuple[Policy, ...]:
        """Every policy a layer can have."""
        raise NotImplementedError

    def policy_of(self, layer: int, n_layers: int | None) -> Policy:
        """The policy of one layer."""
        raise NotImplementedError

    def decide(self, value: Value) -> Decision:
        if value.layer is None:
            raise PolicyError(
                f"a policy by layer met a value of {value.region_path or 'a region'} "
                "that belongs to no stack of layers; give a policy to that region "
                "by its path: {'path': policy}"
            )
        return self.policy_of(value.layer, value.n_layers).decide(value)

    def needs(self, negated: bool = False) -> frozenset[str]:
        needs = (policy.rule.needs(negated) for policy in self.policies())
        return frozenset({"layer"}).union(*needs)

    def primitives(self) -> frozenset[str] | None:
        kept: frozenset[str] | None = frozenset()
        for policy in self.policies():
            kept = united(kept, policy.primitives)
        return kept

    def names(self) -> frozenset[str]:
        return frozenset().union(*(p.checkpoint_names for p in self.policies()))

    def mentions(self, name: str) -> bool:
        return any(policy.mentions(name) for policy in self.policies())

    def offloads(self) -> bool:
        return any(policy.offloads for policy in self.policies())

    def at_layer(self, layer: int, n_layers: int | None) -> Rule:
        return self.policy_of(layer, n_layers).rule.at_layer(layer, n_layers)


@dataclass(frozen=True, slots=True)
class ByLayer(Layered):
    """A policy for each layer, in order."""

    by_layer: tuple[Policy, ...]
    """The policies, the first layer's first."""

    def policies(self) -> tuple[Policy, ...]:
        return self.by_layer

    def policy_of(self, layer: int, n_layers: int | None) -> Policy:
        n_given = len(self.by_layer)
        if (n_layers is not None and n_layers != n_given) or layer >= n_given:
            raise PolicyError(
                f"layers([…]) has {n_given} policies, but the stack has "
                f"{n_layers or f'at least {layer + 1}'} layers; give one policy a layer"
            )
        return self.by_layer[layer]


@dataclass(frozen=True, slots=True)
class FirstLayers(Layered):
    """One policy for the first layers, another for the rest."""

    n: int
    first: Policy
    rest: Policy

    def policies(self) -> tuple[Policy, ...]:
        return (self.first, self.rest)

    def policy_of(self, layer: int, n_layers: int | None) -> Policy:
        del n_layers
        return self.first if layer < self.n else self.rest


@dataclass(frozen=True, slots=True)
class EveryNthLayer(Layered):
    """One policy for every n-th layer, another for the rest."""

    n: int
    start: int
    chosen: Policy
    rest: Policy

    def policies(self) -> tuple[Policy, ...]:
        return (self.chosen, self.rest)

    def policy_of(self, layer: int, n_layers: int | None) -> Policy:
        del n_layers
        return self.chosen if layer % self.n == self.start else self.rest


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LayerPolicy(Policy):
    """A policy that goes by layer."""

    def for_layer(self, layer: int, n_layers: int | None = None) -> Policy:
        """The policy of one layer, under its own name."""
        assert isinstance(self.rule, Layered)
        return self.rule.policy_of(layer, n_layers).for_layer(layer, n_layers)


@maker
def layers(by_layer: Iterable[Any]) -> Policy:
    """A policy for each layer of a stack, in order.

    Args:
        by_layer: Policies, registered names or JAX callables, one a layer.

    Returns:
        The policy. It needs binding: JAX does not tell which layer a region is.

    Raises:
        PolicyError: If there is none, or one is no policy.

    Example:
        >>> from remat import policies
        >>> policies.layers(["nothing"] * 2 + ["save_dots"])
        layers([nothing, nothing, save_dots])
    """
    if isinstance(by_layer, str | Policy):
        raise PolicyError(
            f"layers takes a list with one policy a layer, got {by_layer!r}; for the "
            "same policy in every layer, use that policy"
        )
    given = tuple(map(as_policy, by_layer))
    if not given:
        raise PolicyError("layers needs at least one policy, got none")
    listed = ", ".join(policy.code for policy in given)
    return _layered(ByLayer(given), f"layers([{listed}])", "as listed, layer by layer")


@maker
def first_layers(n: int, policy: Any = "nothing", rest: Any = "everything") -> Policy:
    """One policy for the first n layers of a stack, another for the rest.

    Args:
        n: How many layers take `policy`.
        policy: Policy of the first layers.
        rest: Policy of the others.

    Returns:
        The policy. It needs binding: JAX does not tell which layer a region is.

    Raises:
        PolicyError: If `n` is negative, or one is no policy.

    Example:
        >>> from remat import policies
        >>> policies.first_layers(4, "nothing", rest="save_dots").for_layer(4)
        save_dots
    """
    first, rest = as_policy(policy), as_policy(rest)
    checked_count("first_layers", "n", n, 0)
    return _layered(
        FirstLayers(n, first, rest),
        f"first_layers({n}, {first.code}, rest={rest.code})",
        f"in the first {n} layers as {first.name}, in the others as {rest.name}",
    )


@maker
def every_nth_layer(
    n: int, policy: Any = "nothing", rest: Any = "everything", start: int = 0
) -> Policy:
    """One policy for every n-th layer of a stack, another for the rest.

    Args:
        n: Distance from one such layer to the next.
        policy: Policy of those layers.
        rest: Policy of the others.
        start: Index of the first such layer.

    Returns:
        The policy. It needs binding: JAX does not tell which layer a region is.

    Raises:
        PolicyError: If `n` or `start` is out of range, or one is no policy.

    Example:
        >>> from remat import policies
        >>> policies.every_nth_layer(2, "nothing").for_layer(1)
        everything
    """
    chosen, rest = as_policy(policy), as_policy(rest)
    checked_count("every_nth_layer", "n", n, 1)
    checked_count("every_nth_layer", "start", start, 0)
    return _layered(
        EveryNthLayer(n, start % n, chosen, rest),
        f"every_nth_layer({n}, {chosen.code}, rest={rest.code}, start={start})",
        f"in one layer of {n} as {chosen.name}, in the others as {rest.name}",
    )


def _layered(rule: Layered, code: str, what: str) -> Policy:
    return LayerPolicy(
        rule=rule,
        name=code,
        code=code,
        description=Description(
            saves=what,
            offloads=what if rule.offloads() else "nothing",
            recomputes=what,
            when="memory is left over, but not enough for every layer",
        ),
    )
