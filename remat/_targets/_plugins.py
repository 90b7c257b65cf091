"""Load the compilers of TPUs and GPUs that are not there.

libtpu and the CUDA plugin compile without a device, but both look for one as they
start, and each needs telling that there is none. Checked with jax 0.10.2 (libtpu
0.0.42) and 0.12.0.1 (libtpu 0.0.50).
"""

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies

from remat import _jax_compat as compat
from remat._targets._quiet import logger, silenced

Device = Any
"""A `jax.Device`, which JAX gives type checkers as a variable."""

_lock = threading.RLock()

_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

_LIBTPU_ENVIRONMENT = {
    # No metadata server to ask: it would be asked 30 times, for a minute and a half.
    "TPU_SKIP_MDS_QUERY": "1",
    # A second process would stop at the first one's lock file.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Any valid answer keeps libtpu from complaining that it does not know.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # No logs of this run in /tmp/tpu_logs, which may belong to another user.
    "TPU_LOG_DIR": "disabled",
}

_PROCESS_ENVIRONMENT = {
    **_LIBTPU_ENVIRONMENT,
    # JAX itself shall not look for a device.
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_LOG_LEVEL_OF_JAX = "1"
"""What importing JAX sets where nothing was set: warnings and worse."""


class TargetError(ValueError):
    """A target that is wrong, or that cannot be compiled for on this machine."""


def quiet_environment() -> None:
    """Prepare a process of our own that compiles for absent devices only.

    Sets, unless already set, the variables that keep JAX and its plugins from looking
    for devices. For the `remat` command and the tests, before JAX's first use; never
    for a user's process, where it would hide the devices that are there.
    """
    for name, value in _PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # JAX read its variable when it was imported, which may have been before.
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def why_not(platform: str) -> str | None:
    """What keeps this machine from compiling for a platform, and what to do.

    Args:
        platform: "tpu", "gpu" or "cpu".

    Returns:
        One sentence, or None where the platform can be compiled for.
    """
    if platform == "cpu":
        return None
    if sys.platform != "linux":
        return (
            f"compiling for an absent {platform.upper()} needs Linux, since the "
            "compilers are Linux packages; use Linux, WSL or Docker"
        )
    found = _cuda_plugin() if platform == "gpu" else importlib.util.find_spec("libtpu")
    if found is None:
        package = "libtpu" if platform == "tpu" else "JAX's CUDA plugin"
        return f'{package} is not installed; run: pip install "remat[targets]"'
    return None


@functools.cache
def tpu_devices(topology: str, chip_config: str | None) -> tuple[Device, ...]:
    """The devices of a TPU topology, such as "v5e:2x2"; they can only be compiled for.

    Args:
        topology: libtpu's name of it.
        chip_config: libtpu's name of how a chip shows its cores, where it matters.

    Raises:
        TargetError: libtpu has no such topology.
    """
    options = {"chip_config_name": chip_config} if chip_config else {}
    with _lock, silenced():
        start_jax()
        with _variables(_LIBTPU_ENVIRONMENT):
            try:
                found = topologies.get_topology_desc(topology, "tpu", **options)
            except jax.errors.JaxRuntimeError as error:
                raise TargetError(
                    f"libtpu knows no topology {topology!r}: {error}"
                ) from None
    return tuple(found.devices)


@functools.cache
def gpu_devices(topology: str, config: str) -> tuple[Device, ...]:
    """GPUs that can only be compiled for.

    Args:
        topology: partitions x hosts x devices of a host, such as "1x1x8".
        config: A `GpuTargetConfigProto` in text form.
    """
    options = {"topology": topology, "target_config": config}
    with _lock, silenced():
        start_jax()
        with _variables({}):
            try:
                found = topologies.get_topology_desc("", platform="cuda", **options)
                return tuple(found.devices)
            except NotImplementedError:
                # JAX's own loading of the plugin failed, for want of a GPU.
                return _gpu_devices_by_hand(options)


def _gpu_devices_by_hand(options: Mapping[str, str]) -> tuple[Device, ...]:
    topology = compat.xla_client.make_c_api_device_topology(_cuda_api(), "", **options)
    return tuple(topology._make_compile_only_devices())


@functools.cache
def _cuda_api() -> Any:
    plugin: Any = _cuda_plugin()
    library = Path(str(plugin.__file__)).parent / "xla_cuda_plugin.so"
    api = compat.xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    compat.xla_client.initialize_pjrt_plugin("cuda")
    _register_kernels(plugin.cuda_plugin_extension, api)
    return api


def _register_kernels(extension: Any, api: Any) -> None:
    """Let the compiler know the kernels of JAX's own (linear algebra, sorting).

    What the plugin does for itself where it finds a GPU: 0.10.2 - 0.12.0.1.
    """
    compat.xla_client.register_custom_type_handler(
        "CUDA", functools.partial(extension.register_custom_type, api)
    )
    compat.xla_client.register_custom_call_handler(
        "CUDA", functools.partial(extension.register_custom_call_target, api)
    )
    for name, value in extension.ffi_types().items():
        compat.xla_client.register_custom_type(name, value, platform="CUDA")
    for name, value in extension.ffi_handlers().items():
        compat.xla_client.register_custom_call_target(
            name, value, platform="CUDA", api_version=1
        )


def _cuda_plugin() -> ModuleType | None:
    for name in _CUDA_PLUGINS:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


@functools.cache
def start_jax() -> None:
    """Let JAX find the devices that are there, before anything else is loaded.

    A TPU that is attached must be started with the user's environment, not with ours,
    and a GPU's warnings are the user's to see.
    """
    logs = contextlib.nullcontext() if _has_nvidia_gpu() else _variables({})
    with _lock, silenced(), logs:
        try:
            jax.devices()
        except RuntimeError as error:
            logger.debug("JAX found no device: %s", error)


def _has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()  # WSL's


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and quiet logs, while a plugin loads.

    A plugin reads its log level once, as it loads. At JAX's own level its compiler
    tells of every program that is too large for the device.
    """
    before = dict(os.environ)
    added = {name: value for name, value in values.items() if name not in before}
    if before.get(_LOG_LEVEL) in (None, _LOG_LEVEL_OF_JAX):
        added[_LOG_LEVEL] = "3"
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def compiler_options(platform: str) -> dict[str, Any]:
    """Options for compiling for an absent platform; they do not change its memory."""
    if platform != "gpu":
        return {}
    options: dict[str, Any] = {
        # On 0.12 a failure in one of several code generating threads ends the process.
        "xla_gpu_force_compilation_parallelism": 1,
        # On 0.10 a dump has an LLVM and a PTX file for every kernel.
        "xla_gpu_dump_llvmir": False,
    }
    if wheel := importlib.util.find_spec("nvidia.cuda_nvcc"):
        # Its ptxas knows old cards, which that of a newer CUDA toolkit refuses.
        (options["xla_gpu_cuda_data_dir"],) = wheel.submodule_search_locations or [""]
    return options


def versions(platform: str) -> str:
    """The versions of all that compiles for a platform, for keys of caches."""
    plugins = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
    names = ("jax", "jaxlib", *plugins.get(platform, ()))
    return " ".join(f"{name} {_version(name)}" for name in names)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
