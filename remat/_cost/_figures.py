"""What running a program costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work, traffic and time of one run of a program on one device."""

    flops: float = 0.0
    """Floating-point operations; a fused multiply-add counts two."""
    bytes_accessed: float = 0.0
    """Bytes read from and written to device memory."""
    transcendentals: float = 0.0
    """Elements of exp, tanh, sin and the like; not in `flops`."""
    estimated_s: float = math.nan
    """Time on the target, by `estimate_source`; nan without a target or its figures."""
    matmul_flops: float = 0.0
    """Of `flops`, those of matrix products and convolutions."""
    recompute_flops: float = 0.0
    """Of `flops`, those of values computed a second time for the backward pass."""
    xla_recompute_flops: float = 0.0
    """Of `flops`, those that XLA's own rematerialization added to save memory."""
    host_bytes: float = 0.0
    """Bytes moved to and from host memory."""
    collective_bytes: float = 0.0
    """Bytes sent to other devices."""
    n_collectives: float = 0.0
    """Collective operations run."""
    n_kernels: float = 0.0
    """Custom kernels run."""
    kernel_bytes: float = 0.0
    """Bytes that they read from and write to device memory."""
    n_uncounted: float = 0.0
    """Of these, kernels whose FLOPs are not known and not counted."""
    n_unknown_loops: int = 0
    """Loops whose trip count is not known; their body is counted once."""
    compute_s: float = math.nan
    """Time of compute and device memory alone: the roofline's."""
    cycles_s: float = math.nan
    """The same by XLA's own estimate, of what it estimates, after a full TPU compile;
    the roofline's elsewhere."""
    host_s: float = math.nan
    """Time of the host traffic on the host link; may hide behind compute."""
    collective_s: float = math.nan
    """Time of the collectives on their links."""
    xla_recompute_s: float = 0.0
    """Of `compute_s`, the time of what XLA's own rematerialization added."""
    estimated_cycles: float = 0.0
    """XLA's own estimate after a full TPU compile; 0 where it gives none."""

    @property
    def estimate_source(self) -> str:
        """What `estimated_s` is from: "cycles" (XLA's own) or "roofline"."""
        by_cycles = self.estimated_cycles and math.isfinite(self.cycles_s)
        return "cycles" if by_cycles else "roofline"

    @property
    def busy_s(self) -> float:
        """Time of compute and collectives, one after the other."""
        cores = self.cycles_s if self.estimate_source == "cycles" else self.compute_s
        return cores + self.collective_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in _FIELDS}
        )

    def times(self, n: float) -> Cost:
        """The cost of `n` runs."""
        return Cost(
            **{
                f.name: getattr(self, f.name) * (1 if f.name in _NOT_SCALED else n)
                for f in _FIELDS
            }
        )


_FIELDS = fields(Cost)
_NOT_SCALED = frozenset({"n_unknown_loops"})

NO_COST = Cost(
    estimated_s=0.0, compute_s=0.0, cycles_s=0.0, host_s=0.0, collective_s=0.0
)
