"""What the planner minimizes: a price for computing and one for keeping."""

import dataclasses

from remat._plan._costs import KEEP_PASSES, SCANNED_KEEP_PASSES, Rates
from remat._plan._graph import Equation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Weights of the sum that a choice minimizes."""

    second: float = 0.0
    """Of a second of recomputation."""
    flop: float = 0.0
    """Of a FLOP recomputed, of any kind."""
    matmul_flop: float = 0.0
    """Of a FLOP recomputed in matrix products, convolutions and kernels."""
    kept_byte: float = 0.0
    """Of a byte kept, on the device or on the host."""
    host_byte: float = 0.0
    """Of a byte moved to the host and back, besides."""

    def of(self, equation: Equation) -> float:
        """The price of running an equation once more."""
        return (
            self.second * equation.seconds
            + self.flop * equation.flops
            + self.matmul_flop * equation.matmul_flops
        )


def least_recompute(rates: Rates) -> Prices:
    """Seconds of recomputing, and of device memory that a transfer reads and writes.

    Keeping is free. Without the price of transfers, what costs next to nothing to
    compute again would be moved wherever the host link is idle.
    """
    return Prices(second=1.0, host_byte=KEEP_PASSES / rates.bandwidth_bytes_s)


def least_time(rates: Rates, *, scanned: bool = False) -> Prices:
    """Seconds: of recomputing, and of the memory traffic that keeping takes."""
    passes = SCANNED_KEEP_PASSES if scanned else KEEP_PASSES
    return dataclasses.replace(
        least_recompute(rates), kept_byte=passes / rates.bandwidth_bytes_s
    )


def least_flops() -> Prices:
    """FLOPs in matrix products, convolutions and kernels; the rest breaks ties."""
    return Prices(matmul_flop=1.0, flop=1e-3)
