"""Presets: a published model by name, ready to be traced, with nothing allocated."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from remat._targets._target import Target
from remat.models._checks import positive
from remat.models._errors import PresetError
from remat.models._families import (
    FAMILIES,
    Batch,
    Family,
    Init,
    Logits,
    Loss,
    Params,
)
from remat.models._mesh import MeshLike, make_mesh, n_batch_shards
from remat.models._sharding import (
    batch_shardings,
    hold,
    shardings,
    with_shardings,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model with its loss and the shapes to trace it with."""

    name: str
    """The preset."""
    config: Any
    """The model's frozen configuration, overrides applied."""
    model: Any
    """The Linen module; of an NNX model its graph definition."""
    loss: Loss
    """`loss(params, batch)`: mean cross-entropy in nats, an fp32 scalar."""
    logits: Logits
    """`logits(params, tokens or images)`: without dropout, fp32."""
    args: tuple[Any, Batch]
    """`(params, batch)` as `jax.ShapeDtypeStruct`s, with shardings on a mesh."""
    init: Init
    """`init(key)`: real parameters."""
    describe: dict[str, Any]
    """What was built: preset, family, n_params, batch, seq and the configuration."""


def presets() -> tuple[str, ...]:
    """Returns every preset's name, family by family.

    Example:
        >>> import remat.models
        >>> "gpt2-xl" in remat.models.presets()
        True
    """
    return tuple(name for family in FAMILIES for name in family.configs)


def build(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    scan_layers: bool = True,
    mesh: MeshLike | None = None,
    target: Target | str | None = None,
    **overrides: Any,
) -> Built:
    """Builds a preset: its loss, and its arguments as shapes.

    Args:
        name: one of `presets()`.
        batch: sequences or images a step; the default is the preset's.
        seq: tokens a sequence; the default is the preset's. A GPT-2 sequence beyond
            the position table makes the table longer, which `describe` shows in
            `n_positions` and `n_params`. Images take `image_size=` in place of it.
        scan_layers: one traced layer in a loop, or every layer written out.
        mesh: devices to spread the model over, such as `"fsdp=16"` or
            `"fsdp=4,tensor=2"` (`data` is the third axis); the batch is cut by `data`
            and `fsdp`, and its default grows to a multiple of both. None for one.
        target: whose devices the mesh is of, such as `"v5e:4x4"`; None for those here.
        **overrides: fields of the model's configuration, such as `dropout=0.1`,
            `policy="save_dots"`, `dtype=jnp.float32`, `loss_chunks=8`.

    Returns:
        The loss, its arguments and the model. Every layer is a region.

    Raises:
        PresetError: an unknown preset or option, a size below 1, or a batch that the
            mesh does not divide.
        TargetError: a mesh of more devices than there are.

    Example:
        >>> import remat.models
        >>> built = remat.models.build("gpt2", batch=4)
        >>> built.describe["n_params"]
        124439808
        >>> built.args[1]["tokens"].shape
        (4, 1024)
    """
    family = _family_of(name)
    devices = None if mesh is None else make_mesh(mesh, target)
    options = {**overrides, "mesh": devices}
    config = configured(family.configs[name], scan_layers, options)
    default_batch, default_seq = family.sizes[name]
    batch = _batch_on(devices, batch, default_batch)
    seq = default_seq if seq is None else positive("seq", seq)
    config, shapes = family.batch(config, batch, seq)
    if config.dropout > 0:
        shapes = {**shapes, "dropout_key": _key_shape()}
    made = family.make(config)
    params = jax.eval_shape(made.init, _key_shape())
    if devices is not None:
        params = with_shardings(params, shardings(params, devices))
        shapes = with_shardings(shapes, batch_shardings(shapes, devices))
    return Built(
        name=name,
        config=config,
        model=made.model,
        loss=_held_in_place(made.loss, devices),
        logits=made.logits,
        args=(params, shapes),
        init=made.init,
        describe={
            "preset": name,
            "family": family.name,
            "n_params": n_params(params),
            "batch": batch,
            "seq": seq,
            **_plain(config),
        },
    )


def n_params(params: Any) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _batch_on(mesh: Mesh | None, batch: int | None, default: int) -> int:
    """The batch asked for, or the default one, as a mesh can cut it."""
    n_shards = 1 if mesh is None else n_batch_shards(mesh)
    if batch is None:
        return -(-default // n_shards) * n_shards
    if positive("batch", batch) % n_shards:
        raise PresetError(
            f"batch must be a multiple of {n_shards}, into which the mesh cuts it, "
            f"given {batch}"
        )
    return batch


def _held_in_place(loss: Loss, mesh: Mesh | None) -> Loss:
    """A loss whose gradients lie where its parameters do."""
    if mesh is None:
        return loss

    def sharded_loss(params: Params, batch: Batch) -> jax.Array:
        return loss(hold(params, mesh), batch)

    return sharded_loss


def _family_of(name: str) -> Family:
    for family in FAMILIES:
        if name in family.configs:
            return family
    raise PresetError(
        f"no preset is called {name!r}{_near(name, presets())}; "
        f"the presets are {', '.join(presets())}"
    )


def configured(config: Any, scan_layers: bool, overrides: Mapping[str, Any]) -> Any:
    """Returns a configuration with fields replaced.

    Raises:
        PresetError: naming a field that it does not have.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for option in overrides:
        if option not in fields:
            raise PresetError(
                f"{type(config).__name__} has no option {option!r}"
                f"{_near(option, fields)}; its options are {', '.join(fields)}"
            )
    return dataclasses.replace(config, scan_layers=scan_layers, **overrides)


def _near(wanted: str, names: tuple[str, ...] | list[str]) -> str:
    matches = difflib.get_close_matches(wanted, names, n=3)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""


def _key_shape() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def _plain(config: Any) -> dict[str, Any]:
    """Returns a configuration's fields as what JSON can hold."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["dtype"] = jnp.dtype(fields["dtype"]).name
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = dataclasses.asdict(fields["rope_scaling"])
    mesh = fields.pop("mesh")
    if mesh is not None:
        fields["mesh"] = dict(mesh.shape)
    if not isinstance(fields["policy"], str):
        fields["policy"] = repr(fields["policy"])
    return fields
