"""Import JAX, which `remat/__init__.py` does before all else, without noise.

On 0.10, with the CUDA plugin and no NVIDIA driver, `import jax` alone writes to the
terminal that no GPU will be used: for a process that came to compile for one elsewhere.
"""

import sys

from remat._targets._quiet import silenced

if "jax" not in sys.modules:
    with silenced():
        import jax as jax
