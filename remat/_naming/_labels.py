"""What an intermediate value of a region is, in words that a person understands."""

import dataclasses
from typing import Any

import jax.extend.core as jec

from remat._naming._op_name import LABEL_SCOPE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What one intermediate value of a region is."""

    id: str
    """Unique in its region, and the same in every equal region."""
    module_path: str
    """Flax module path or named scopes, such as `"layer_0/attention/query"`; empty
    where there is none."""
    primitive: str
    """Name of the primitive that makes the value."""
    checkpoint_name: str | None
    """Name that the model's own code gives it."""
    shape: tuple[int, ...]
    """Shape of the value (one step's, inside a scan)."""
    dtype: str
    """Its dtype."""
    bytes: int
    """Its size (one step's, inside a scan)."""
    source: str | None
    """Line that made it, as `"file.py:12"`."""
    times: int = 1
    """Lengths of the scans around it inside the region, multiplied."""

    @property
    def scope(self) -> str:
        """The name scope that marks what is kept in compiled programs."""
        return LABEL_SCOPE + (self.checkpoint_name or self.id).replace("/", ".")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedValue:
    """A value that can be named, and the equation that makes it."""

    label: Label
    eqn: jec.JaxprEqn
    aval: Any
    """Type of the value, one of the results of `eqn`."""
    aliases: tuple[str, ...]
    """Checkpoint names that the model's code gives it."""
    ordinal: int
    """Index among the region's values of its kind (`remat.policies.kind_of`)."""
