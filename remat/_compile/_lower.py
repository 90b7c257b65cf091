"""Trace and lower a function for a target, from shapes alone."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from remat import _jax_compat as compat
from remat._compile._strided import refuse_strided_offload
from remat._regions._flatten import is_traceable
from remat._targets._backend_query import watch_backend_queries
from remat._targets._target import Target, TargetError


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Lowered:
    """Lower `fn(*args, **kwargs)` for a target, which need not be there.

    Args:
        fn: Function that JAX can trace, jitted or not.
        args: Positional arguments: pytrees of arrays and `jax.ShapeDtypeStruct`s,
            of which only shapes are used; other leaves are held static. Shardings
            are kept, over the target's devices; where no argument has one,
            everything lies on the first device.
        kwargs: Keyword arguments, likewise.
        target: Device to lower for.
        donate_argnums: Positional arguments whose memory the outputs may take.

    Raises:
        TargetError: This machine cannot compile for the target, or an argument is
            sharded in a way that cannot be moved to its devices.

    Warns:
        BackendQueryWarning: The function asks JAX for the devices that are here.
    """
    traced = trace(fn, args, kwargs, target, donate_argnums=donate_argnums)
    return lower_traced(traced, target)


def lower_traced(traced: Any, target: Target) -> jax.stages.Lowered:
    """Lower what `trace` returned, for the target it was traced for.

    Raises:
        CompileError: It offloads what the target's compiler cannot.
        TargetError: The function calls back to Python, which needs the device, or
            places values on a mesh of other devices.
    """
    refuse_strided_offload(traced.jaxpr, target)
    if target.attached:
        return traced.lower()
    try:
        return traced.lower(lowering_platforms=(target.lowering_platform,))
    except RuntimeError as error:
        calls = sorted(set(_callbacks(traced.jaxpr)))
        if "Unknown backend" not in str(error) or not calls:
            raise
        raise TargetError(
            f"calls back to Python cannot be compiled for {target.name}, which is not "
            f"here: {', '.join(calls)}. Take them out, as by a flag of the model."
        ) from None
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise TargetError(
            f"the function places values on a mesh of its own, whose devices are not "
            f"those of {target.name}. Build the model with a mesh of the target: "
            f"remat.target({target.name!r}).mesh(shape, names). JAX says: {error}"
        ) from None


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """Trace as `lower` does; the result (`jax.stages.Traced`) also has the `jaxpr`."""
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [is_traceable(leaf) for leaf in leaves]

    # Leaves that are no arrays become None for JAX, and come back for the function.
    @functools.wraps(fn, updated=())
    def over_arrays(*args: Any, **kwargs: Any) -> Any:
        given = treedef.flatten_up_to((args, kwargs))
        whole = [
            new if yes else old
            for new, old, yes in zip(given, leaves, is_array, strict=True)
        ]
        inner_args, inner_kwargs = treedef.unflatten(whole)
        return _arrays_only(fn(*inner_args, **inner_kwargs))

    options: dict[str, Any] = {"donate_argnums": donate_argnums}
    if not any(is_array):  # nothing else would say which devices
        options["out_shardings"] = target.sharding()
    shardings = [
        _moved(leaf, target) if yes else None
        for leaf, yes in zip(leaves, is_array, strict=True)
    ]

    def trace_on(default: NamedSharding | None) -> Any:
        shapes = [
            _shape(leaf, sharding or default) if yes else None
            for leaf, yes, sharding in zip(leaves, is_array, shardings, strict=True)
        ]
        args, kwargs = treedef.unflatten(shapes)
        return jax.jit(over_arrays, **options).trace(*args, **kwargs)

    with watch_backend_queries(target):
        if any(shardings):  # the others follow them
            return trace_on(None)
        traced = trace_on(target.sharding())
        # Not on the first device, where the function has a mesh of its own.
        return trace_on(None) if _has_mesh(traced.jaxpr) else traced


def _callbacks(jaxpr: Any) -> Iterator[str]:
    """The calls back to Python in a program, each with its line."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in _CALLBACKS:
            yield f"{eqn.primitive.name} at {compat.source_line(eqn)}"
        for inner in compat.subjaxprs(eqn.params):
            yield from _callbacks(inner)


_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")
"""Names of primitives: 0.10.2 - 0.12.0.1."""


def _has_mesh(jaxpr: Any) -> bool:
    """Whether a program names several devices itself (shard_map, a constraint)."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        places = [eqn.params.get(name) for name in _PLACES]
        for value in jax.tree.leaves(places):
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh) and mesh.size > 1:
                return True
        if any(_has_mesh(inner) for inner in compat.subjaxprs(eqn.params)):
            return True
    return False


_PLACES = ("mesh", "sharding", "in_shardings", "out_shardings")
"""Parameters of equations that can name devices: 0.10.2 - 0.12.0.1."""


def _arrays_only(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else None, tree
    )


def _shape(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _moved(leaf: Any, target: Target) -> NamedSharding | None:
    """An argument's sharding, over the target's devices; None where it has none."""
    sharding = getattr(leaf, "sharding", None)
    on_host = sharding is not None and sharding.memory_kind == "pinned_host"
    if isinstance(sharding, NamedSharding) and not _is_uncommitted(leaf):
        mesh = _mesh_on(sharding.mesh, target)
        moved = NamedSharding(mesh, sharding.spec)
    elif sharding is None or len(sharding.device_set) == 1:
        moved = target.sharding() if on_host else None
    else:
        raise TargetError(
            f"an argument of shape {leaf.shape} has a {type(sharding).__name__} over "
            f"{len(sharding.device_set)} devices, which cannot be moved to "
            f"{target.name}; give it a NamedSharding."
        )
    return moved.with_memory_kind("pinned_host") if moved and on_host else moved


def _is_uncommitted(leaf: Any) -> bool:
    """Whether an array lies where it does by default only, so may lie elsewhere."""
    return isinstance(leaf, jax.Array) and not leaf.committed


def _mesh_on(mesh: Any, target: Target) -> Mesh:
    """The mesh itself, or one of the target's devices with its axes."""
    if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(target.devices()):
        return mesh
    moved = target.mesh(tuple(mesh.shape.values()), mesh.axis_names)
    return Mesh(moved.devices, moved.axis_names, axis_types=mesh.axis_types)
