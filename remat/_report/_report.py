"""What one compiled program uses: the memory report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat._compile._compile import XlaStats
from remat._cost._cost import Cost
from remat._files import write_bytes, write_text
from remat._hlo._spaces import DEVICE
from remat._report._buffer import Buffer as Buffer
from remat._report._diff import ReportDiff, diff
from remat._report._recomputed import Recomputed
from remat._report._roles import Roles as Roles
from remat._report._timeline import TimelinePoint as TimelinePoint
from remat._report._timeline import summits

SCHEMA = "remat.report/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory, work and time of one compiled program, on one device."""

    target: str
    """Name of the device it was compiled for."""
    module: str
    """Name of the HLO module."""
    n_devices: int = 1
    """Devices that run it together; all figures are of one of them."""
    peak_bytes: int
    """Device memory the allocator must find: arguments + outputs - aliased +
    temporaries. A floor where `exact` is False."""
    live_peak_bytes: int
    """The most bytes of device memory live at once, constants included."""
    floor_bytes: int | None
    """What the compiler can squeeze the program to; None where it was not asked."""
    argument_bytes: int
    """Arguments in device memory."""
    output_bytes: int
    """Outputs in device memory, aliased ones included."""
    alias_bytes: int
    """Outputs written over donated arguments."""
    temp_bytes: int
    """Temporaries in device memory, the gaps between them included."""
    constant_bytes: int
    """Constants in device memory; not in `peak_bytes`."""
    host_bytes: int
    """Host memory: offloaded temporaries, arguments and outputs kept there."""
    on_chip_bytes: int
    """The chip's own memories (TPU)."""
    generated_code_bytes: int
    """The program's own code in device memory."""
    available_bytes: int
    """What one program may use of the device."""
    fits: bool
    """Whether peak, constants and generated code are within `available_bytes`."""
    exact: bool
    """False for a probe: the compiler was asked for the least, not for the program."""
    flops: int
    """FLOPs of one run, trip counts included."""
    recompute_flops: int
    """Of these, FLOPs of values computed a second time for the backward pass."""
    bytes_accessed: int
    """Device memory traffic of one run, trip counts included."""
    estimated_step_s: float
    """Time of one run; nan where the device's figures are not known."""
    estimate_source: str
    """What that is from: "cycles" (a full TPU compile's own estimate of its
    instructions, roofline for the rest), "roofline" or "none"."""
    cost: Cost = field(repr=False)
    """The whole cost, of which the fields above are a part."""
    buffers: tuple[Buffer, ...] = field(repr=False)
    """What is live at the peak (of device, host and on-chip memory each), largest
    first, one entry for each allocated value."""
    timeline: tuple[TimelinePoint, ...] = field(repr=False)
    """Live bytes over the schedule, loop bodies once."""
    recomputed: tuple[Recomputed, ...] = field(default=(), repr=False)
    """Matrix products computed a second time for the backward pass, by module."""
    notes: tuple[str, ...] = ()
    """What else to know of these figures."""
    xla_stats: XlaStats | None = field(default=None, repr=False)
    """What XLA itself stated; None where the compile did not end."""

    @property
    def fragmentation_bytes(self) -> int:
        """Assigned but not live at the peak: gaps between the temporaries."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        live_temp = self.live_peak_bytes - held - self.constant_bytes
        return max(0, self.temp_bytes - live_temp)

    def by_category(self, memory_space: str = DEVICE) -> dict[str, int]:
        """Bytes live at the peak by category, largest first."""
        totals: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.memory_space == memory_space:
                key = buffer.category
                totals[key] = totals.get(key, 0) + buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def summits(self, n: int = 5) -> tuple[TimelinePoint, ...]:
        """The peak and the next highest points that memory falls from, highest first.

        To lower the peak beyond the second, what the second holds must shrink too.
        """
        return summits(self.timeline, n)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; figures that are not known are None."""
        data = {"schema": SCHEMA, **dataclasses.asdict(self)}
        data["fragmentation_bytes"] = self.fragmentation_bytes
        return _json_ready(data)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained page that needs no network.

        Args:
            path: File to write it to as well.

        Returns:
            The page: timeline, treemap of the peak by module, table of the buffers.
        """
        from remat._show.page import report_page

        text = report_page(self)
        if path is not None:
            write_text(path, text)
        return text

    def to_pprof(self, path: str | Path | None = None) -> bytes:
        """The buffers at the peak as a profile that `pprof` and its kin read.

        Args:
            path: File to write it to as well, `memory.pb.gz`.

        Returns:
            The gzipped `profile.proto`.
        """
        from remat._report._pprof import pprof_of

        data = pprof_of(self)
        if path is not None:
            write_bytes(path, data)
        return data

    def plot(self) -> Any:
        """Timeline and treemap of the peak, as a plotly figure."""
        from remat._show.figure import report_figure

        return report_figure(self)

    def diff(self, other: MemoryReport) -> ReportDiff:
        """What changes at the peak if `other` runs in place of this program.

        Args:
            other: Report of another program for the same device.

        Returns:
            What went, what came and what moved to the host; adds up to
            `other.peak_bytes - self.peak_bytes`.

        Raises:
            ValueError: The two are for different devices, or one is a floor.
        """
        return diff(self, other)

    def _repr_html_(self) -> str:
        from remat._show.page import notebook_html

        return notebook_html(self)

    def __str__(self) -> str:
        """The report as a terminal shows it."""
        from remat._show.report import report_text

        return report_text(self)


def _json_ready(value: Any) -> Any:
    """Without nan and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    return value
