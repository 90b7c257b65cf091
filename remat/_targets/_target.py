"""The devices that programs are compiled for: attached ones, and named ones elsewhere.

The figures of the named ones stand in `targets.toml`, each with its source.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from remat._targets import _plugins
from remat._targets._plugins import TargetError as TargetError
from remat._targets._plugins import quiet_environment as quiet_environment
from remat._targets._table import (
    Entry,
    aliases,
    gpu_config,
    gpu_shape,
    n_gpus,
    n_tpus,
    parse,
    table,
    topology_with,
)

Kind = Literal["cpu", "gpu", "tpu"]

PREALLOCATED_SHARE = 0.75
"""The share of a GPU's memory that JAX takes unless told otherwise."""


def _figure() -> Any:
    # Not compared: it follows from the name, and nan is not equal to itself.
    return dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A device, or a topology of equal devices, to compile for. Made by `target`.

    All figures are of one device.
    """

    name: str
    """Name with the topology, where that is not the default one."""
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
    """What one program may use, its code included. GPU: the share that JAX
    preallocates, by `XLA_PYTHON_CLIENT_MEM_FRACTION`. TPU: what the compiler allows."""
    reserved_bytes: int
    """What a TPU's runtime keeps for itself; `available_bytes` is without it."""
    bandwidth_bytes_s: float = _figure()
    """Peak between device memory and cores; nan where unknown."""
    flops_bf16: float = _figure()
    """Peak FLOP/s of bfloat16 matrix products; nan where unknown."""
    flops_fp32: float = _figure()
    """Peak FLOP/s in float32; nan where unknown."""
    flops_tf32: float = _figure()
    """Peak FLOP/s of float32 matrix products at JAX's default precision."""
    host_link_bytes_s: float = _figure()
    """Peak to or from host memory, one direction; nan where unknown."""
    ici_bytes_s: float = _figure()
    """Peak to other devices (ICI, NVLink), one direction, all links; nan if unknown."""
    clock_hz: float = _figure()
    """Cycles a second of a TPU's cores; nan elsewhere."""
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
        usable_target(self)
        entry = table()[self.chip]
        assert self.topology is not None
        if self.kind == "gpu":
            hosts, per_host = gpu_shape(self.topology)
            return _plugins.gpu_devices(f"1x{hosts}x{per_host}", gpu_config(entry))
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
            >>> import remat
            >>> remat.target("cpu").mesh((1,), ("data",)).axis_names
            ('data',)
        """
        wanted = math.prod(shape)
        if wanted > self.n_devices:
            raise TargetError(
                f"a mesh of {'x'.join(map(str, shape))} needs {wanted} devices; "
                f"{self.name} has {self.n_devices}. {self.how_to_get_more(wanted)}"
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

    def how_to_get_more(self, wanted: int | str) -> str:
        """What a user can do who needs more devices."""
        if self.kind == "cpu":
            return (
                "Set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{wanted} before JAX starts."
            )
        topology = topology_with(self.chip, int(wanted))
        return f'Name a larger topology, such as "{self.chip}:{topology}".'


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
        >>> import remat
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
    chip, topology = parse(name)
    return _cpu(topology) if chip == "cpu" else _named(chip, topology)


def usable_target(name: str | Target | None = None) -> Target:
    """A target, as `target` finds it, that this machine can compile for.

    Raises:
        TargetError: Also where it cannot; with what to install.
    """
    device = target(name)
    if why := device.why_not():
        raise TargetError(f"cannot compile for {device.name}: {why}.")
    return device


def targets() -> tuple[Target, ...]:
    """All named targets in their default topology: TPUs, GPUs, then the CPU."""
    return tuple(target(chip) for chip in table())


# Named targets


def _named(chip: str, topology: str | None) -> Target:
    entry = table()[chip]
    kind = entry["platform"]
    default: str = entry.get("topology", "1")
    topology = default if topology is None else topology
    count = n_tpus if kind == "tpu" else n_gpus
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


def _figures(entry: Entry) -> dict[str, Any]:
    """The fields of a Target that the file has; nan and 0 for what it does not."""
    memory = entry.get("memory", 0)
    rates = {
        "bandwidth_bytes_s": "bandwidth",
        "flops_bf16": "bf16",
        "flops_fp32": "fp32",
        "flops_tf32": "tf32" if "tf32" in entry else "fp32",
        "host_link_bytes_s": "host_link",
        "ici_bytes_s": "ici",
        "clock_hz": "clock_hz",
    }
    return {
        "device_kind": entry.get("kind"),
        "memory_bytes": memory,
        "reserved_bytes": memory - entry.get("available", memory),
        "source": "; ".join(entry.get("sources", ["none: this device is not known"])),
        **{field: float(entry.get(key, math.nan)) for field, key in rates.items()},
    }


def _available(entry: Entry) -> int:
    if "available" in entry:
        return entry["available"]
    return int(entry.get("memory", 0) * _preallocated_share())


def _preallocated_share() -> float:
    """The share of a GPU's memory that JAX's allocator may take, by its variables.

    It holds also without preallocation (`XLA_PYTHON_CLIENT_PREALLOCATE=false`), which
    only makes the allocator take it by and by.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if given := os.environ.get(name):
            return _share(name, given)
    return PREALLOCATED_SHARE


def _share(name: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise TargetError(
            f"the variable {name} is {given!r}; it must be a number, such as 0.9."
        ) from None


# Attached devices


def _attached_devices(kind: str) -> list[_plugins.Device]:
    _plugins.start_jax()
    try:
        return jax.devices(kind)
    except RuntimeError as error:
        raise TargetError(f"JAX shows no {kind} here: {error}") from None


def _attached(kind: str) -> Target:
    devices = _attached_devices(kind)
    device_kind = devices[0].device_kind
    chip = aliases().get(device_kind.lower(), kind)
    entry = table().get(chip, {})
    if kind == "cpu":
        entry = {**entry, **_this_cpu(entry)}
    figures = {**_figures(entry), "device_kind": device_kind}
    # Of several hosts each can ask its own devices only.
    own = [d for d in devices if d.process_index == jax.process_index()]
    limit = _measured_limit((own or devices)[0]) or _available(entry)
    figures["memory_bytes"] = figures["memory_bytes"] or limit
    return Target(
        name=chip,
        kind=devices[0].platform,
        chip=chip,
        topology=None,
        n_devices=len(devices),
        attached=True,
        available_bytes=limit,
        **figures,
    )


def _cpu(n_devices: str | None) -> Target:
    here = _attached("cpu")
    if n_devices is None:
        return here
    if not n_devices.isdigit() or not 0 < int(n_devices) <= here.n_devices:
        raise TargetError(
            f"'cpu:{n_devices}' asks for {n_devices} CPU devices; there are "
            f"{here.n_devices}. {here.how_to_get_more(n_devices)}"
        )
    return dataclasses.replace(
        here, name=f"cpu:{n_devices}", topology=n_devices, n_devices=int(n_devices)
    )


def _this_cpu(entry: Entry) -> dict[str, Any]:
    """The table has the figures of one core."""
    cores = os.cpu_count() or 1
    rates = {name: entry[name] * cores for name in ("bf16", "fp32")}
    memory = _host_memory()
    return {**rates, "memory": memory, "available": memory}


def _measured_limit(device: _plugins.Device) -> int:
    """What the allocator of an attached device may take; 0 where it does not tell."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def _host_memory() -> int:
    if not hasattr(os, "sysconf"):  # Windows does not tell: then nothing is refused
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
