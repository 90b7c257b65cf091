"""Programs for the tests of naming and planning, and what is measured on them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat._naming._naming import keep
from remat._plan._costs import array_bytes, equation_cost
from remat._plan._flow import flow_of
from remat._plan._solve import Choice
from remat._regions._with_policy import find_regions, rewrite_regions
from remat.policies import Decision

X, W = jax.random.normal(jax.random.key(0), (2, 4, 4))


@jax.custom_vjp
def tanh_matmul(x, w):
    """Keeps a cosine that only its own rule computes."""
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, jnp.cos(y))


def _backward(kept, g):
    x, w, c = kept
    d = g * c
    return d @ w.T, x.T @ d


tanh_matmul.defvjp(_forward, _backward)


def scan_with_carry(x, w):
    def step(carry, _):
        return (jnp.tanh(carry @ w), jnp.sin(carry))

    return jax.lax.scan(step, x, None, length=3)[0]


def scan_with_all(x, w):
    def step(carry, v):
        return (jnp.tanh(v @ carry @ w), jnp.sin(carry))

    carry, ys = jax.lax.scan(step, jnp.sin(x), jnp.stack([x, x, w]))
    return carry + ys.sum(0)


def branches(x, w):
    return jnp.sin(jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), jnp.exp, x))


def dropout(x, key):
    return jnp.sin(x * jax.random.bernoulli(key, 0.5, x.shape))


def with_callback(x, w):
    jax.debug.callback(lambda _: None, x)
    return jnp.exp(jnp.sin(x @ w))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (lambda x, w: jnp.sin(jnp.tanh(x @ w) @ w), (X, W)),
    "attention": (
        lambda x, w: jax.nn.softmax(x @ w @ x.T) @ jax.nn.gelu(x @ w),
        (X, W),
    ),
    "silu": (lambda x, w: jax.nn.silu(x @ w) @ w + x, (X, W)),
    "relu": (lambda x, w: jax.nn.relu(x @ w) @ w + x, (X, W)),
    "max": (
        lambda x, w: jnp.max(jnp.maximum(x @ w, 0.3) @ w, axis=0) * jnp.abs(x),
        (X, W),
    ),
    "top_k": (lambda x, w: jax.lax.top_k(jnp.sin(x @ w), 2)[0] * 2, (X, W)),
    "sort": (lambda x, w: jnp.sort(jnp.sin(x @ w)) @ w, (X, W)),
    "scan, carry": (scan_with_carry, (X, W)),
    "scan, all": (scan_with_all, (X, W)),
    "cond": (branches, (X, W)),
    "custom_vjp": (lambda x, w: jnp.sin(tanh_matmul(jnp.sin(x), w)), (X, W)),
    "dropout": (dropout, (X, jax.random.key(2))),
    "callback": (with_callback, (X, W)),
}


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar loss with `fn` as its one region."""
    region = jax.checkpoint(fn)
    return lambda *args: jnp.sum(region(*args))


def region_jaxpr(fn: Callable[..., Any], *args: Any) -> jec.Jaxpr:
    """The jaxpr of the outer region of `loss_of(fn)`."""
    region, *_ = find_regions(jax.checkpoint(fn), *args)
    return region.jaxpr


def keeping(loss: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    """The loss with its regions keeping exactly what a choice says."""
    table = {id_: Decision.SAVE for id_ in choice.saved}
    table |= {id_: Decision.OFFLOAD for id_ in choice.offloaded}
    return keeping_table(loss, table)


def keeping_table(
    loss: Callable[..., Any], table: dict[str, Decision]
) -> Callable[..., Any]:
    """The loss with its regions keeping what a table of ids says."""

    def edit(region, eqn):
        jaxpr, policy = keep(eqn.params["jaxpr"], table)
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "policy": policy})

    return rewrite_regions(loss, edit)


def live_flops(fn: Callable[..., Any], *args: Any) -> float:
    """FLOPs of the equations that a function's results come from, loops counted."""
    flow = flow_of(jax.make_jaxpr(fn)(*args))
    ends = [value for value in flow.outputs if value is not None]
    live = [flow.equations[p] for p in flow.ancestors(ends)]
    return sum(e.times * equation_cost(e.eqn).flops for e in live if not e.moves)


def kept_bytes(loss: Callable[..., Any], *args: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass, arguments left out."""
    traced = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(loss, *a)[1]))(*args)
    jaxpr = traced.jaxpr
    kept = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, jec.Literal))
    return sum(array_bytes(v.aval) for v in kept if v not in jaxpr.invars)


def float_positions(args: tuple[Any, ...]) -> list[int]:
    """Which arguments can be differentiated."""
    return [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]
