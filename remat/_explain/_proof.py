"""Whether the recompute that each region asks for is in the compiled program.

The traced step has global sizes and the compiled one those of a device, so what is
expected of one device is worked out first. Where all is sharded, that is the global
FLOPs over the number of devices. Where some is replicated, the products that are no
recompute tell the share.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat._report._recomputed import Expected, ExpectedRegion, Recomputed
from remat._report._report import MemoryReport

THERE = 0.5
"""Share of the expected FLOPs from which a recompute counts as there."""
_SLACK = 0.1
"""Shares of the recompute that are outside 0 to 1 by more are no share of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionProof:
    """What the regions at one place ask to be computed again, and what is."""

    region: ExpectedRegion
    """The regions, with the global figures of the traced step."""
    expected_flops: float
    """FLOPs of matrix products to be computed again, on one device."""
    compiled_matmuls: int
    """Matrix products that the compiled program computes again for them."""
    compiled_flops: float
    """Their FLOPs, on one device."""
    is_there: bool
    """Whether the recompute is in the compiled program."""


def prove(report: MemoryReport, expected: Expected) -> tuple[RegionProof, ...]:
    """Holds what each region asks for against the compiled program.

    Args:
        report: The compiled step.
        expected: What the traced step asks for.

    Returns:
        One entry for the regions at each place.
    """
    share = _share_of_device(report, expected)
    own = report.cost.matmul_flops - report.cost.xla_recompute_flops
    missing = share * expected.matmul_flops - own
    done = _by_region(report.recomputed, expected.regions)
    proofs: list[RegionProof] = []
    for region, found in zip(expected.regions, done, strict=True):
        wanted = share * region.matmul_flops
        compiled = sum(one.matmul_flops for one in found)
        # After XLA merged two products, either of their names may be left. So the
        # names tell which recompute is gone, and the sum whether any is.
        gone = compiled < THERE * wanted and missing >= (1 - THERE) * wanted
        proofs.append(
            RegionProof(
                region=region,
                expected_flops=wanted,
                compiled_matmuls=sum(one.n_matmuls for one in found),
                compiled_flops=compiled,
                is_there=not (wanted and gone),
            )
        )
    return tuple(proofs)


def _share_of_device(report: MemoryReport, expected: Expected) -> float:
    """What one device computes of the traced step."""
    asked = expected.recompute_matmul_flops
    own = report.cost.matmul_flops - report.cost.xla_recompute_flops
    once = expected.matmul_flops - asked
    even = 1 / report.n_devices
    if not asked or not own:
        return even
    there = (own / even - once) / asked
    if -_SLACK <= there <= 1 + _SLACK:
        return even
    again = sum(one.matmul_flops for one in report.recomputed)
    return (own - again) / once if once and own > again else even


def _by_region(
    found: tuple[Recomputed, ...], regions: tuple[ExpectedRegion, ...]
) -> list[list[Recomputed]]:
    """The recomputed products of each region: by module, then by line."""
    done: list[list[Recomputed]] = [[] for _ in regions]
    for one in found:
        near = [i for i, r in enumerate(regions) if _is_within(one, r)]
        if near:
            done[max(near, key=lambda i: _nearness(one, regions[i]))].append(one)
    return done


def _is_within(one: Recomputed, region: ExpectedRegion) -> bool:
    path = region.module_path
    return not path or f"{one.module_path}/".startswith(f"{path}/")


def _nearness(one: Recomputed, region: ExpectedRegion) -> tuple[bool, int]:
    return region.source in one.lines, len(region.module_path)
