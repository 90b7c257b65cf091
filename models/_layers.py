"""A stack of equal layers, scanned or unrolled, each one a region.

The layer's own code knows about neither: it maps the residual stream to itself.
Wrapping happens around a *call* of the layer, not around its class, so parameter
names are the same with and without regions (`nn.remat(Block)` would rename an
unnamed `Block_0` to `CheckpointBlock_0`), and static arguments such as
`deterministic` are closed over instead of being numbered.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn

from remat import policies
from remat.policies import as_policy

Layer = nn.Module | Sequence[nn.Module]
Call = Callable[[Any, Any], Any]


def make_layers(
    make_layer: Callable[[], nn.Module], n_layers: int, scan_layers: bool
) -> Layer:
    """Returns what `setup` should assign: one layer to scan, or a list of them.

    Scanned parameters have a leading axis of length `n_layers` under `layers`;
    unrolled ones stand under `layers_0`, `layers_1`, ...
    """
    if scan_layers:
        return make_layer()
    return [make_layer() for _ in range(n_layers)]


def apply_layers(
    layers: Layer, call: Call, x: Any, *, n_layers: int, policy: Any
) -> Any:
    """Runs every layer in turn, each as a region under `policy`.

    Args:
        layers: what `make_layers` returned.
        call: `call(layer, x)`, one layer's forward pass.
        x: the residual stream, (B, T, D), or a pytree that holds it.
        n_layers: how many layers there are.
        policy: whatever `remat.policies.as_policy` takes; "none" for no regions.

    Returns:
        The residual stream after the last layer.
    """
    if not isinstance(layers, nn.Module):
        # Outside a loop XLA's CSE would merge the recompute with the forward pass.
        region = as_region(call, policy, prevent_cse=True)
        for layer in layers:
            x = region(layer, x)
        return x

    # Inside scan the loop itself keeps forward and recompute apart.
    region = as_region(call, policy, prevent_cse=False)

    def layer_step(layer, carry, _):
        return region(layer, carry), None

    scan = nn.scan(
        layer_step,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=n_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    x, _ = scan(layers, x, None)
    return x


def as_region(
    call: Callable[..., Any],
    policy: Any,
    *,
    prevent_cse: bool,
    remat: Callable[..., Any] = nn.remat,
) -> Callable[..., Any]:
    """Wraps a call of a layer in `remat`; under "none" it stays as it is."""
    policy = as_policy(policy)
    if policy == policies.none:
        return call
    return remat(call, policy=policy, prevent_cse=prevent_cse)
