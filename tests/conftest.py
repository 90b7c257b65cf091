"""Set the environment for absent targets before jax starts, in every worker."""

import importlib.util
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if importlib.util.find_spec("remat._targets._target"):
    from remat._targets._target import quiet_environment

    quiet_environment()
