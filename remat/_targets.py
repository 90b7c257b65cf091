"""The devices that programs are compiled for: attached ones, and named ones elsewhere.

The figures of the named ones stand in `targets.toml`, each with its source.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from remat import _plugins
from remat._plugins import TargetError as TargetError
from remat._plugins import quiet_environment as quiet_environment

Kind = Literal["cpu", "gpu", "tpu"]

PREALLOCATED_SHARE = 0.75
"""The share of a GPU's memory that JAX takes unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A device, or a topology of equal devices, to compile for. Made by `target`.

    All figures are of one device.
    """

    name: str
    """What `target` takes to make it again."""
    kind: Kind
    """The platform."""
    chip: str
    """Name of the device without topology, such as "v5e" or "h100"."""
    topology: str | None
    """Arrangement of the devices, such as "4x4"; None where there is none."""
    n_devices: int
    """Devices in the topology."""
    attached: bool
    """Whether the devices are here, so that programs can also be run."""
    device_kind: str
    """What JAX calls the device."""
    memory_bytes: int
    """Device memory."""
    available_bytes: int
    """What one program may use. GPU: the share that JAX preallocates, by
    `XLA_PYTHON_CLIENT_MEM_FRACTION`. TPU: what the compiler allows."""
    reserved_bytes: int
    """Of these, what the runtime keeps for itself."""
    bandwidth_bytes_s: float
    """Peak between device memory and cores; nan where unknown."""
    flops_bf16: float
    """Peak FLOP/s of bfloat16 matrix products; nan where unknown."""
    flops_fp32: float
    """Peak FLOP/s in float32; nan where unknown."""
    flops_tf32: float
    """Peak FLOP/s of float32 matrix products at JAX's default precision."""
    host_link_bytes_s: float
    """Peak to or from host memory, one direction; nan where unknown."""
    ici_bytes_s: float
    """Peak to the neighbouring devices, one direction, all links; nan if unknown."""
    source: str
    """Where the figures are from."""

    @property
    def lowering_platform(self) -> str:
        """What JAX calls the platform when it lowers: "tpu", "cuda" or "cpu"."""
        return "cuda" if self.kind == "gpu" else self.kind

    def devices(self) -> tuple[_plugins.Device, ...]:
        """The devices; absent ones can be compiled for and not run on.

        Raises:
            TargetError: This machine cannot compile for them.
        """
        if self.attached:
            return tuple(_attached_devices(self.kind)[: self.n_devices])
        if reason := self.why_not():
            raise TargetError(f"cannot compile for {self.name}: {reason}.")
        entry = _table()[self.chip]
        assert self.topology is not None
        if self.kind == "gpu":
            hosts, per_host = _gpu_shape(self.topology)
            return _plugins.gpu_devices(f"1x{hosts}x{per_host}", _gpu_config(entry))
        name = f"{self.chip}:{self.topology}"
        return _plugins.tpu_devices(name, entry.get("chip_config"))

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Mesh:
        """A mesh of the target's devices, for the shardings of a program.

        Args:
            shape: Devices along each axis.
            names: A name for each axis.

        Raises:
            TargetError: The target has fewer devices than the mesh.

        Example:
            >>> remat.target("cpu").mesh((1,), ("data",)).axis_names
            ('data',)
        """
        wanted = math.prod(shape)
        if wanted > self.n_devices:
            raise TargetError(
                f"a mesh of {'x'.join(map(str, shape))} needs {wanted} devices; "
                f"{self.name} has {self.n_devices}. {self._how_to_get_more(wanted)}"
            )
        devices = np.array(self.devices()[:wanted]).reshape(tuple(shape))
        return Mesh(devices, tuple(names))

    def sharding(self) -> NamedSharding:
        """The sharding of a value that lies whole on the target's first device."""
        return NamedSharding(self.mesh((1,), ("device",)), PartitionSpec())

    def why_not(self) -> str | None:
        """What keeps this machine from compiling for the target, and what to do.

        Returns:
            One sentence, or None where it can be compiled for.
        """
        return None if self.attached else _plugins.why_not(self.kind)

    def _how_to_get_more(self, wanted: int) -> str:
        if self.kind == "cpu":
            return (
                "Set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{wanted} before JAX starts."
            )
        return f'Name a larger topology, such as "{self.chip}:{wanted}".'


def target(name: str | Target | None = None) -> Target:
    """The device to compile for.

    Args:
        name: A name that `targets` lists, as "v5e" or "h100"; with a topology, as
            "v5e:4x4" (TPU) or "h100:8" (GPUs of one host), or in Google's words, as
            "v5litepod-16". "cpu" is this machine. None: JAX's default device. A
            Target is returned as it is.

    Raises:
        TargetError: Unknown name or impossible topology.

    Example:
        >>> remat.target("v5e:4x4").n_devices
        16
    """
    if isinstance(name, Target):
        return name
    if name is None:
        _plugins.start_jax()
        return _attached(jax.default_backend())
    if not isinstance(name, str):
        raise TargetError(
            f"a target is a name such as 'v5e', a Target or None, not {name!r}."
        )
    if name.strip().lower() == "cpu":
        return _attached("cpu")
    chip, topology = _parse(name)
    return _named(chip, topology)


def targets() -> tuple[Target, ...]:
    """All named targets in their default topology: TPUs, GPUs, then the CPU."""
    return (*(_named(chip, None) for chip in _table()), target("cpu"))


# Names


def _parse(name: str) -> tuple[str, str | None]:
    wanted = name.strip().lower()
    aliases = _aliases()
    if wanted in aliases:
        return aliases[wanted], None
    chip, separator, topology = wanted.partition(":")
    if separator and chip in aliases:
        return aliases[chip], topology
    chip, _, count = wanted.rpartition("-")
    if chip in aliases and count.isdigit():
        return aliases[chip], _counted_topology(aliases[chip], int(count), name)
    raise TargetError(_unknown(name, wanted.partition(":")[0]))


def _unknown(name: str, chip: str) -> str:
    hints = {"a100": "a100-40gb or a100-80gb", "tpu": "v5e, v5p or v6e"}
    hints["gpu"] = hints["cuda"] = "t4, l4 or h100"
    near = difflib.get_close_matches(chip, [*_aliases(), "cpu"], n=3, cutoff=0.6)
    hint = hints.get(chip) or " or ".join(near)
    return (
        f"unknown target {name!r}."
        + (f" Did you mean {hint}?" if hint else "")
        + f" Known: {', '.join([*_table(), 'cpu'])}."
    )


def _counted_topology(chip: str, count: int, name: str) -> str:
    """The topology that Google sells under a count, as 16 of "v5litepod-16"."""
    entry = _table()[chip]
    if entry["platform"] == "gpu":
        return str(count)
    n_chips, odd = divmod(count, 2 if entry["name_counts"] == "cores" else 1)
    topology = _TOPOLOGIES[entry["dims"]].get(n_chips)
    if odd or topology is None:
        raise TargetError(
            f"no topology of {chip} is known as {name!r}; "
            f'give the shape of the slice, as "{chip}:{entry["topology"]}".'
        )
    return topology


_TOPOLOGIES = {
    2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16"}
    | {256: "16x16", 512: "16x32", 1024: "32x32"},
    3: {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    | {128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16"},
}


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("remat").joinpath("targets.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def _aliases() -> Mapping[str, str]:
    return {
        alias.lower(): chip
        for chip, entry in _table().items()
        for alias in (chip, entry["kind"], *entry["aliases"])
    }


# Named targets


def _named(chip: str, topology: str | None) -> Target:
    entry = _table()[chip]
    kind = entry["platform"]
    default: str = entry.get("topology", "1")
    topology = default if topology is None else topology
    count = _n_tpus if kind == "tpu" else _n_gpus
    return Target(
        name=chip if topology == default else f"{chip}:{topology}",
        kind=kind,
        chip=chip,
        topology=topology,
        n_devices=count(chip, topology),
        attached=False,
        available_bytes=_available(entry),
        **_figures(entry),
    )


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "device_kind": entry["kind"],
        "memory_bytes": entry["memory"],
        "reserved_bytes": entry.get("reserved", 0),
        "bandwidth_bytes_s": float(entry["bandwidth"]),
        "flops_bf16": float(entry["bf16"]),
        "flops_fp32": float(entry["fp32"]),
        "flops_tf32": float(entry.get("tf32", entry["fp32"])),
        "host_link_bytes_s": float(entry["host_link"]),
        "ici_bytes_s": float(entry.get("ici", math.nan)),
        "source": "; ".join(entry["sources"]),
    }


def _available(entry: Mapping[str, Any]) -> int:
    if entry["platform"] == "tpu":
        return entry["available"]
    return int(entry["memory"] * _preallocated_share())


def _preallocated_share() -> float:
    given = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return float(given) if given else 1.0
    return float(given) if given else PREALLOCATED_SHARE


def _n_tpus(chip: str, topology: str) -> int:
    entry = _table()[chip]
    if not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        raise TargetError(
            f"{topology!r} is no topology of {chip}; write chips along each axis, "
            f'as "{chip}:{entry["topology"]}".'
        )
    shape = [int(size) for size in topology.split("x")]
    if len(shape) != entry["dims"]:
        raise TargetError(
            f"a topology of {chip} has {entry['dims']} axes, {topology!r} has "
            f'{len(shape)}; write it as "{chip}:{entry["topology"]}".'
        )
    return math.prod(shape) * entry["devices_per_chip"]


def _n_gpus(chip: str, topology: str) -> int:
    return math.prod(_gpu_shape(topology, chip))


def _gpu_shape(topology: str, chip: str = "h100") -> tuple[int, int]:
    """Hosts, and GPUs of each."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", topology)
    if not match or 0 in (int(match[1] or 1), int(match[2])):
        raise TargetError(
            f"{topology!r} is no number of GPUs; write "
            f'"{chip}:8" for 8 in one host, "{chip}:2x8" for 2 such hosts.'
        )
    return int(match[1] or 1), int(match[2])


def _gpu_config(entry: Mapping[str, Any]) -> str:
    """The card's description in the text form of XLA's `GpuTargetConfigProto`.

    These fields are what 0.10.2 parses; a fuller description from a newer XLA is
    refused by it.
    """
    gpu = entry["gpu"]
    major, minor = gpu["compute_capability"]
    sizes = "".join(
        f"  {name}: {gpu[name]}\n"
        for name in (
            "shared_memory_per_core",
            "threads_per_core_limit",
            "core_count",
            "fpus_per_core",
            "l2_cache_size",
            "clock_rate_ghz",
            "shared_memory_per_block_optin",
        )
    )
    return (
        "gpu_device_info {\n"
        "  threads_per_block_limit: 1024 threads_per_warp: 32\n"
        "  shared_memory_per_block: 49152\n"
        "  block_dim_limit_x: 2147483647\n"
        "  block_dim_limit_y: 65535 block_dim_limit_z: 65535\n"
        "  registers_per_core_limit: 65536 registers_per_block_limit: 65536\n"
        f"{sizes}"
        f"  memory_bandwidth: {int(entry['bandwidth'])}\n"
        f"  device_memory_size: {entry['memory']}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        f'device_description_str: "{entry["kind"]}"\n'
    )


# Attached devices


def _attached_devices(kind: str) -> list[_plugins.Device]:
    _plugins.start_jax()
    return jax.devices(kind)


def _attached(kind: str) -> Target:
    devices = _attached_devices(kind)
    device_kind = devices[0].device_kind
    chip = _aliases().get(device_kind.lower())
    if kind == "cpu" or chip is None:
        return _unnamed(kind, devices)
    entry = _table()[chip]
    return Target(
        name=chip,
        kind=entry["platform"],
        chip=chip,
        topology=None,
        n_devices=len(devices),
        attached=True,
        available_bytes=_measured_limit(devices[0]) or _available(entry),
        **_figures(entry),
    )


def _unnamed(kind: str, devices: Sequence[_plugins.Device]) -> Target:
    """A device whose figures nobody wrote down: only its memory is known."""
    platform: Kind = "gpu" if kind in ("cuda", "rocm") else kind  # pyright: ignore
    memory = _host_memory() if kind == "cpu" else _measured_limit(devices[0])
    return Target(
        name=kind,
        kind=platform,
        chip=kind,
        topology=None,
        n_devices=len(devices),
        attached=True,
        device_kind=devices[0].device_kind,
        memory_bytes=memory,
        available_bytes=memory,
        reserved_bytes=0,
        bandwidth_bytes_s=math.nan,
        flops_bf16=math.nan,
        flops_fp32=math.nan,
        flops_tf32=math.nan,
        host_link_bytes_s=math.nan,
        ici_bytes_s=math.nan,
        source="this machine",
    )


def _measured_limit(device: _plugins.Device) -> int:
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
