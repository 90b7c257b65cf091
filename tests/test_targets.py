import ast
import dataclasses
import doctest
import math
import os
import subprocess
import sys
import threading

import jax
import pytest
from jax.sharding import PartitionSpec

import remat
from remat._targets import _plugins, _target
from remat._targets._table import table

ABSENT = [name for name in table() if name != "cpu"]
TPUS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
GPUS = [
    "t4 l4 a10g a100-40gb a100-80gb h100 h200 b200 gb300 a6000 rtx4090 rtx-pro-6000",
    "v100",
]
RATES = [
    "bandwidth_bytes_s",
    "flops_bf16",
    "flops_fp32",
    "host_link_bytes_s",
    "ici_bytes_s",
]


def test_every_promised_target_is_listed():
    names = [t.name for t in remat.targets()]
    assert sorted(names) == sorted([*TPUS, *" ".join(GPUS).split(), "cpu"])


@pytest.mark.parametrize("name", ABSENT)
def test_figures_are_complete_and_plausible(name):
    t = remat.target(name)
    assert all(math.isfinite(getattr(t, rate)) for rate in RATES)
    assert t.source
    assert 0 < t.available_bytes < t.memory_bytes < 300 * 2**30
    assert t.flops_bf16 >= t.flops_fp32 > 1e12
    assert t.bandwidth_bytes_s > t.host_link_bytes_s > 1e9
    assert not t.attached


@pytest.mark.parametrize("name", ABSENT)
def test_every_absent_target_has_devices_here(name):
    t = remat.target(name)
    assert t.why_not() is None
    devices = t.devices()
    assert len(devices) == t.n_devices
    assert {device.platform for device in devices} == {t.kind}
    assert devices[0].device_kind == t.device_kind


@pytest.mark.parametrize(
    ("given", "name", "n_devices"),
    [
        ("v5e", "v5e", 4),
        ("V5E:2x2", "v5e", 4),
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16),
        ("TPU v5 lite", "v5e", 4),
        ("v4-8", "v4", 4),  # Google counts v4's cores
        ("v5p-128", "v5p:4x4x4", 64),
        ("v3:4x4", "v3:4x4", 32),  # JAX shows v3's cores
        ("v7x", "tpu7x", 8),
        ("h100:8", "h100:8", 8),
        ("h100:2x8", "h100:2x8", 16),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 1),
    ],
)
def test_names(given, name, n_devices):
    t = remat.target(given)
    assert (t.name, t.n_devices) == (name, n_devices)
    assert remat.target(t.name) == t
    assert remat.target(t) is t


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("v5", "Did you mean v5p or v5e"),
        ("a100", "a100-40gb or a100-80gb"),
        ("gpu", "t4, l4 or h100"),
        ("quantum", "Known: v2, v3"),
        ("v5e:4", 'as "v5e:2x2"'),
        ("v5p:2x2", "has 3 axes"),
        ("v5e:0x2", "no topology"),
        ("v5litepod-7", "shape of the slice"),
        ("h100:0", '"h100:8"'),
        ("cpu:4096", "host_platform_device_count=4096"),
        (3, "a Target or None, not 3"),
    ],
)
def test_wrong_names_say_what_to_do(given, said):
    with pytest.raises(remat.TargetError, match=said):
        remat.target(given)


def test_a_topology_that_the_compiler_refuses():
    with pytest.raises(remat.TargetError, match=r"no topology 'v5e:3x5'.*2x2x1"):
        remat.target("v5e:3x5").devices()


def test_default_is_the_attached_device():
    t = remat.target(None)
    assert t.attached and t.kind == jax.default_backend() == "cpu"
    assert t.devices() == tuple(jax.devices())
    assert remat.target("cpu") == t
    assert t.available_bytes == t.memory_bytes > 2**30


def test_a_part_of_the_cpu_devices():
    t = remat.target("cpu:2")
    assert t.n_devices == 2
    assert t.devices() == tuple(jax.devices("cpu")[:2])


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:8", "cpu:8"])
def test_mesh(name):
    mesh = remat.target(name).mesh((4, 2), ("data", "model"))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert len(set(mesh.devices.flat)) == 8


@pytest.mark.parametrize(
    ("name", "said"),
    [("v5e", '"v5e:4x4"'), ("h100", '"h100:16"'), ("cpu", "device_count=16")],
)
def test_too_large_a_mesh(name, said):
    with pytest.raises(remat.TargetError, match=f"needs 16 devices.*{said}"):
        remat.target(name).mesh((16,), ("data",))


def test_sharding_is_whole_on_one_device():
    t = remat.target("v5e")
    assert t.sharding().spec == PartitionSpec()
    assert t.sharding().device_set == {t.devices()[0]}


# What the compilers let one program use (libtpu 0.0.50), as their messages round it.
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("v2", 7.48),
        ("v3", 15.48),
        ("v4", 30.75),
        ("v5e", 15.75),
        ("v5p", 95.73),
        ("v6e", 31.24),
        ("tpu7x", 94.74),
    ],
)
def test_tpu_memory_is_what_the_compiler_allows(name, gib):
    t = remat.target(name)
    assert round(t.available_bytes / 2**30, 2) == gib
    assert t.available_bytes + t.reserved_bytes == t.memory_bytes


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, 0.75),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 0.9),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 1.0),
    ],
)
def test_gpu_memory_is_the_allocators_share(monkeypatch, variables, share):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    t = remat.target("h100")
    assert t.available_bytes == int(84942979072 * share)


def test_a_share_that_is_no_number(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(remat.TargetError, match="MEM_FRACTION is 'most'"):
        remat.target("h100")


def test_targets_are_values():
    t = remat.target("v5e")
    assert hash(t) == hash(remat.target("v5e:2x2"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.name = "v6e"  # pyright: ignore


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_elsewhere_than_on_linux(monkeypatch, name):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(remat.TargetError, match="Linux, WSL or Docker"):
        remat.target(name).devices()
    assert remat.target("cpu").why_not() is None


@pytest.mark.parametrize(
    ("name", "package"), [("v5e", "libtpu"), ("h100", "JAX's CUDA plugin")]
)
def test_a_missing_plugin_names_the_extra(monkeypatch, name, package):
    # None there is how Python marks a module that cannot be imported.
    for module in ("libtpu", *_plugins._CUDA_PLUGINS):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(remat.TargetError, match=rf"{package}.*remat\[targets\]"):
        remat.target(name).devices()


def test_devices_from_several_threads():
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(remat.target(n).devices()))
        for n in ("v6e:4x4", "a6000:4", "v5p:2x2x2", "l4:2") * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found)) == [2, 2, 4, 4, 8, 8, 16, 16]


# Whole processes, in which nothing was prepared for absent devices.

PLAIN = """
import os
{before}
environment = dict(os.environ)
import remat
for name in ("v5e", "h100", "h200:2"):
    print(name, len(remat.target(name).devices()), flush=True)
print(sorted(k for k in os.environ if os.environ[k] != environment.get(k)), flush=True)
input()
"""
LOADED = ["v5e 4\n", "h100 1\n", "h200:2 2\n"]
PREPARED = {*_plugins._PROCESS_ENVIRONMENT, "XLA_FLAGS", "TPU_LIBRARY_PATH"}
SET_BY_IMPORTING_JAX = [
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_LIBRARY_PATH",
    "TPU_SKIP_MDS_QUERY",
]


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    plain = {k: v for k, v in os.environ.items() if k not in PREPARED}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**plain, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def loaded(process: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    """The targets' devices, and the variables that are set now and were not before."""
    assert process.stdout is not None
    devices = [process.stdout.readline() for _ in LOADED]
    return devices, ast.literal_eval(process.stdout.readline())


def finish(process: subprocess.Popen[str]) -> str:
    """Let a process end; what it wrote to standard error."""
    _, err = process.communicate("\n", timeout=120)
    assert process.returncode == 0, err
    return err


def test_two_plain_processes_at_once_and_without_noise():
    processes = [start(PLAIN.format(before="")) for _ in range(2)]
    # Both have the compilers loaded before either may end.
    for process in processes:
        devices, variables = loaded(process)
        assert devices == LOADED
        assert set(variables) <= set(SET_BY_IMPORTING_JAX)
    assert [finish(process) for process in processes] == ["", ""]


def test_examples():
    assert doctest.testmod(_target).failed == 0


def test_jax_was_started_on_the_cpu():
    program = PLAIN.format(before="import jax; jax.devices()")
    process = start(program, JAX_PLATFORMS="cpu")
    assert loaded(process) == (LOADED, [])
    finish(process)
