"""The table of named devices, and how users name them and their topologies."""

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from remat._targets._plugins import TargetError

Entry = Mapping[str, Any]
"""What `targets.toml` says of one device."""


@functools.cache
def table() -> Mapping[str, Entry]:
    """All named devices, in the order of the file."""
    text = resources.files("remat._targets").joinpath("targets.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def aliases() -> Mapping[str, str]:
    """From all that a device is called, in lower case, to its name in the table."""
    return {
        alias.lower(): chip
        for chip, entry in table().items()
        for alias in (chip, entry["kind"], *entry["aliases"])
    }


def parse(name: str) -> tuple[str, str | None]:
    """A device's name in the table and the topology, where one is given.

    Args:
        name: As "h100", "v5e:4x4", "v5litepod-16" or JAX's `device_kind`.

    Raises:
        TargetError: Nothing is called so; near matches are named.
    """
    wanted = name.strip().lower()
    known = aliases()
    if wanted in known:
        return known[wanted], None
    chip, separator, topology = wanted.partition(":")
    if separator and chip in known:
        return known[chip], topology
    chip, _, count = wanted.rpartition("-")
    if chip in known and count.isdigit():
        return known[chip], _counted_topology(known[chip], int(count), name)
    raise TargetError(_unknown(name, wanted.partition(":")[0]))


def _unknown(name: str, chip: str) -> str:
    hints = {"a100": "a100-40gb or a100-80gb", "tpu": "v5e, v5p or v6e"}
    hints["gpu"] = hints["cuda"] = "t4, l4 or h100"
    near = difflib.get_close_matches(chip, aliases(), n=3, cutoff=0.6)
    hint = hints.get(chip) or " or ".join(near)
    return (
        f"unknown target {name!r}."
        + (f" Did you mean {hint}?" if hint else "")
        + f" Known: {', '.join(table())}."
    )


def _counted_topology(chip: str, count: int, name: str) -> str:
    """The topology that Google sells under a count, as 16 of "v5litepod-16"."""
    entry = table()[chip]
    if entry["platform"] != "tpu":
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


def n_tpus(chip: str, topology: str) -> int:
    """Devices in a TPU topology, such as "4x4"."""
    entry = table()[chip]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
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


def n_gpus(chip: str, topology: str) -> int:
    """Devices in "8" (GPUs of one host) or "2x8" (hosts, and GPUs of each)."""
    return math.prod(gpu_shape(topology, chip))


def topology_with(chip: str, n_devices: int) -> str | None:
    """The smallest usual topology that has so many devices."""
    entry = table()[chip]
    if entry["platform"] != "tpu":
        return str(n_devices)
    usual = _TOPOLOGIES[entry["dims"]].values()
    return next((name for name in usual if n_tpus(chip, name) >= n_devices), None)


def gpu_shape(topology: str, chip: str = "h100") -> tuple[int, int]:
    """Hosts, and GPUs of each, in "8" or "2x8"."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", topology)
    if not match or 0 in (int(match[1] or 1), int(match[2])):
        raise TargetError(
            f"{topology!r} is no number of GPUs; write "
            f'"{chip}:8" for 8 in one host, "{chip}:2x8" for 2 such hosts.'
        )
    return int(match[1] or 1), int(match[2])


def gpu_config(entry: Entry) -> str:
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
