"""What a policy decides on, and what it can decide."""

import collections
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.core import ShapedArray

READ_SLICE = "remat_read_slice"
"""Name of the primitive by which one layer reads its part of stacked arrays. Its
result is a copy of what is there anyway: no policy keeps it."""


class Decision(enum.IntEnum):
    """What becomes of a value between the forward and the backward pass.

    The order is the precedence that `|` (the higher wins) and `&` (the lower
    wins) use: on the device beats on the host beats recomputed.
    """

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One result of one equation in a region, as a policy sees it.

    JAX asks a policy about a primitive, the avals it takes and its parameters;
    the other fields are known only where the region's jaxpr was looked at first
    (`remat.with_policy` and `remat.remat` do), and are empty elsewhere.

    Example:
        >>> from remat import policies
        >>> value = policies.Value(primitive="name", name="mlpwo")
        >>> policies.save_names("mlpwo").decide(value).name
        'SAVE'
    """

    primitive: str
    """Name of the primitive that makes the value, such as `"dot_general"`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the equation."""
    in_avals: tuple[Any, ...] = ()
    """Abstract values of the operands."""
    out_avals: tuple[Any, ...] | None = None
    """Abstract value of this result."""
    name: str | None = None
    """Checkpoint name this equation gives (`checkpoint_name`)."""
    aliases: tuple[str, ...] = ()
    """Checkpoint names that later equations give to this very value."""
    module_path: str | None = None
    """Flax module path of the equation, such as `"attention/query"`."""
    layer: int | None = None
    """Index of the layer the region belongs to."""
    n_layers: int | None = None
    """How many layers the stack has."""
    region_path: str | None = None
    """Path of the region."""
    ordinal: int | None = None
    """Index among the region's values of the same kind (`kind_of`)."""
    reads_input: bool | None = None
    """Whether the equation reads an input of the region, such as a weight, as it is
    or in another dtype or layout."""
    jax_primitive: Any = field(default=None, repr=False, compare=False)
    """The primitive itself, for policies that are JAX callables."""

    @property
    def bytes(self) -> int | None:
        """Bytes of the value; None where its type is not known."""
        if self.out_avals is None:
            return None
        arrays = [aval for aval in self.out_avals if isinstance(aval, ShapedArray)]
        return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in arrays)

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        """Every checkpoint name the value goes by."""
        return self.aliases if self.name is None else (self.name, *self.aliases)

    @classmethod
    def asked_by_jax(cls, primitive: Any, in_avals: tuple, params: Mapping) -> "Value":
        """The value in JAX's question `policy(primitive, *in_avals, **params)`."""
        return cls(
            primitive=primitive.name,
            params=params,
            in_avals=in_avals,
            name=params["name"] if primitive.name == "name" else None,
            jax_primitive=primitive,
        )


def has_batch_dims(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an equation is a matrix product with batch dimensions."""
    if primitive != "dot_general" or "dimension_numbers" not in params:
        return False
    _, (lhs_batch, rhs_batch) = params["dimension_numbers"]
    return bool(lhs_batch or rhs_batch)


def kind_of(primitive: str, params: Mapping[str, Any]) -> str:
    """The kind of a value, within which `Value.ordinal` counts.

    Values are of one kind when the same primitive makes them; matrix products with
    batch dimensions (attention scores, experts) are apart from those without
    (projections), so that "every second projection" can be said.

    Args:
        primitive: Name of the primitive that makes the value.
        params: Parameters of its equation.

    Returns:
        A word for the kind.
    """
    batched = has_batch_dims(primitive, params)
    return f"batched {primitive}" if batched else primitive


def numbered(values: Iterable[Value]) -> tuple[Value, ...]:
    """The values of one region with their `ordinal` filled in.

    Args:
        values: All values of a region, in the order of its equations.

    Returns:
        The same values, numbered from 0 within each kind (`kind_of`).

    Example:
        >>> from remat import policies
        >>> values = [policies.Value(primitive=p) for p in ("sin", "exp", "sin")]
        >>> [value.ordinal for value in policies.numbered(values)]
        [0, 0, 1]
    """
    seen: collections.Counter = collections.Counter()
    result = []
    for value in values:
        kind = kind_of(value.primitive, value.params)
        result.append(replace(value, ordinal=seen[kind]))
        seen[kind] += 1
    return tuple(result)
