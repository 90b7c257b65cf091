"""The policy of the regions that segments are made of.

A segment is a region that keeps its input and nothing else. It is no business of the
policies a user gives: `with_policy` leaves such a region alone, so that a scan stays
cut while the policy of its body changes.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

from jax.ad_checkpoint import Offloadable

from remat._jax_compat import name_p
from remat._jaxprs._read_slice import read_slice_p

CARRY_NAME = "remat_scan_carry"
"""Checkpoint name of the carry into a segment."""


# JAX keeps weak references to a policy, so it needs the slot for them.
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class Boundary:
    """Policy of a segment: recompute all of it from its input."""

    offload: bool = False
    """Whether the carry into the segment waits in host memory."""
    scan: Hashable = None
    """What is known of the scan it is a segment of; for who lists these."""

    needs_binding: ClassVar[bool] = False
    checkpoint_names: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Answer JAX's question about one equation."""
        if self.offload and primitive is name_p and params["name"] == CARRY_NAME:
            return Offloadable(src="device", dst="pinned_host")
        return False


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class KeepAllButSlices:
    """Policy of what is no region, but reads its part of stacked arrays by itself.

    Without one, JAX would keep a copy of every part.
    """

    needs_binding: ClassVar[bool] = False
    checkpoint_names: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Answer JAX's question about one equation."""
        return primitive is not read_slice_p


def is_boundary(policy: object) -> bool:
    """Whether this is the policy of what the users of a program see no region in."""
    return isinstance(policy, Boundary | KeepAllButSlices)


def is_segment(policy: object) -> bool:
    """Whether a region with this policy is a segment of a scan."""
    return isinstance(policy, Boundary)
