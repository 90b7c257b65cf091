"""What a policy decides on, and what it can decide."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """One result of one equation in a region, as a rule sees it.

    JAX asks a policy about a primitive, the avals it takes and its parameters;
    the other fields are known only where the region's jaxpr was looked at first
    (`remat.with_policy` and `remat.remat` do), and are None elsewhere.
    """

    primitive: str
    """Name of the primitive that makes the value, such as `"dot_general"`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the equation."""
    in_avals: tuple[Any, ...] = ()
    """Abstract values of the operands."""
    out_avals: tuple[Any, ...] | None = None
    """Abstract values of the results."""
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
    """Index among the region's values that the same primitive makes."""
    jax_primitive: Any = field(default=None, repr=False, compare=False)
    """The primitive itself, for rules that are JAX callables."""

    @property
    def bytes(self) -> int | None:
        """Bytes of the results together; None where they are not known."""
        if self.out_avals is None:
            return None
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.out_avals)

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
