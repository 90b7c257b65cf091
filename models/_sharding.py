"""Where every array of a model lies on a mesh: the two tables below, and nothing else.

One table says what each dimension of a parameter *is*, the other which axes of the mesh
cut such a dimension. Optimizer state has a parameter's path inside its own, so the same
table places it. Activations are held in place once a layer, at the residual stream, and
where the vocabulary comes in; the compiler carries that through the rest.

FSDP (Zhao et al. 2023; ZeRO stage 3, Rajbhandari et al. 2020) is the axis `fsdp`: a
layer's parameters are gathered where they are used, and their gradients scattered.
Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") is the axis `tensor`: the first
matrices of attention and MLP are cut by column, the second by row.
"""

import fnmatch
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
"""What a dimension is, and the axes that cut it, where the mesh has them."""

PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("*position_embedder/embedding", (None, "embed")),
    ("*embedder/embedding", ("vocab", "embed")),
    ("*attention/out/kernel", ("heads", None, "embed")),
    ("*attention/out/bias", (None,)),
    ("*attention/*/kernel", ("embed", "heads", None)),
    ("*attention/*/bias", ("heads", None)),
    ("*mlp/wo/kernel", ("mlp", "embed")),
    ("*mlp/wo/bias", (None,)),
    ("*mlp/*/kernel", ("embed", "mlp")),
    ("*mlp/*/bias", ("mlp",)),
    ("*moe/router/kernel", ("embed", None)),
    ("*moe/experts/wo", (None, "mlp", "embed")),
    ("*moe/experts/wi_*", (None, "embed", "mlp")),
    ("*patch_embedder/kernel", (None, "embed")),
    ("*head/kernel", ("embed", "vocab")),
)
"""The end of a parameter's path, and its dimensions, the axis of stacked layers aside.

The first that matches holds; what none matches (norms, positions, the biases of
embedding and head, counts of steps) lies whole on every device.
"""


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every array in a tree of parameters or optimizer state.

    A dimension that the mesh does not divide, such as GPT-2's 50257 words, is whole.

    Example:
        >>> import jax
        >>> from remat.models._mesh import make_mesh
        >>> tree = {"mlp": {"wo": {"kernel": jax.ShapeDtypeStruct((8, 4), "float32")}}}
        >>> tuple(shardings(tree, make_mesh("fsdp=1"))["mlp"]["wo"]["kernel"].spec)
        (None, 'fsdp')
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        dims = _dimensions(jax.tree_util.keystr(path, simple=True, separator="/"))
        stacked = (None,) * (len(leaf.shape) - len(dims))
        return NamedSharding(mesh, spec_of(mesh, leaf.shape, *stacked, *dims))

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every array of a batch: by its first axis; keys whole."""

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(mesh, leaf.shape, "batch"))

    return jax.tree.map(place, tree)


def with_shardings(tree: Any, placed: Any) -> Any:
    """Returns a tree of shapes that say where they lie."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        tree,
        placed,
    )


def constrain(x: jax.Array, mesh: Mesh | None, *dims: str | None) -> jax.Array:
    """Holds an activation in place, and its gradient; without a mesh, nothing.

    Args:
        x: the activation.
        mesh: the devices, or None for one device.
        *dims: what its first dimensions are, as in `MESH_AXES`; the rest is whole.
    """
    if mesh is None:
        return x
    spec = spec_of(mesh, x.shape, *dims)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def hold(tree: Any, mesh: Mesh | None) -> Any:
    """Holds parameters, or optimizer state, and their gradients where they lie."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def spec_of(mesh: Mesh, shape: tuple[int, ...], *dims: str | None) -> PartitionSpec:
    """Returns how a mesh cuts an array whose first dimensions are `dims`."""
    cuts = [_cut(mesh, size, dim) for size, dim in zip(shape, dims, strict=False)]
    while cuts and cuts[-1] is None:  # as JAX itself writes what is whole
        cuts.pop()
    return PartitionSpec(*cuts)


def _cut(mesh: Mesh, size: int, dim: str | None) -> Any:
    axes = tuple(a for a in MESH_AXES.get(dim or "", ()) if a in mesh.shape)
    if not axes or size % math.prod(mesh.shape[axis] for axis in axes):
        return None
    return axes[0] if len(axes) == 1 else axes


def _dimensions(path: str) -> tuple[str | None, ...]:
    for pattern, dims in PARAMETERS:
        if fnmatch.fnmatchcase(path, pattern):
            return dims
    return ()
