"""A mesh from one argument: `"fsdp=4,tensor=2"`.

Three axes have a meaning: `data` splits the batch, `fsdp` the batch and every
parameter, `tensor` heads, MLP and vocabulary. What that means for each array stands in
`_sharding.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from remat._targets._target import Target
from remat._targets._target import target as resolve_target
from remat.models._errors import PresetError

AXES = ("data", "fsdp", "tensor")
"""In this order: the last are nearest neighbours, and tensor talks most."""

MeshLike = str | Mapping[str, int] | Mesh


def make_mesh(mesh: MeshLike, target: Target | str | None = None) -> Mesh:
    """Returns a mesh of a target's devices.

    Args:
        mesh: `"fsdp=4,tensor=2"`, such a mapping, or a mesh with those axes, which is
            returned as it is.
        target: whose devices, as `remat.target` takes it; None for those that are here.

    Raises:
        PresetError: no mesh, or one with an axis that has no meaning here.
        TargetError: the target has fewer devices.

    Example:
        >>> dict(make_mesh("tensor=1,fsdp=1").shape)
        {'fsdp': 1, 'tensor': 1}
    """
    if isinstance(mesh, Mesh):
        _check_axes(mesh.axis_names, mesh)
        return mesh
    sizes = _parse(mesh) if isinstance(mesh, str) else dict(mesh)
    _check_axes(tuple(sizes), mesh)
    for size in sizes.values():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise _not_a_mesh(mesh)
    names = [axis for axis in AXES if axis in sizes]
    return resolve_target(target).mesh([sizes[axis] for axis in names], names)


def n_batch_shards(mesh: Mesh) -> int:
    """Returns into how many equal parts a mesh cuts the batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))


def _parse(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not size.isdecimal() or axis in sizes:
            raise _not_a_mesh(text)
        sizes[axis] = int(size)
    return sizes


def _check_axes(names: tuple[str, ...], given: Any) -> None:
    if not names or not set(names) <= set(AXES):
        raise _not_a_mesh(given)


def _not_a_mesh(given: Any) -> PresetError:
    return PresetError(
        f"a mesh is a size for one or more of {', '.join(AXES)}, as in "
        f'"fsdp=4,tensor=2", given {given!r}'
    )
