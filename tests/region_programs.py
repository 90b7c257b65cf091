"""Small differentiable programs with regions, one for each place a region can be in.

Each is a function of no arguments that gives `(loss, args)`; gradients are taken with
respect to the first argument.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

D = 4
WS = 0.3 * jr.normal(jr.key(0), (3, D, D))
X = jr.normal(jr.key(1), (2, D))


def block(w, x):
    """Two products and something between them, so that policies differ."""
    return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w), "mid") @ w)


layer = jax.checkpoint(block)


def unrolled():
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return (x**2).sum()

    return loss, (WS, X)


def scanned():
    def loss(ws, x):
        return (jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2).sum()

    return loss, (WS, X)


def fori():
    def loss(ws, x):
        return (jax.lax.fori_loop(0, 3, lambda i, h: layer(ws[i], h), x) ** 2).sum()

    return loss, (WS, X)


def branched():
    def loss(ws, x):
        x = jax.lax.cond(x.sum() > 0, layer, lambda w, x: w.sum() * x, ws[0], x)
        x = jax.lax.switch(1, [lambda w, x: x, layer], ws[1], x)
        return (x**2).sum()

    return loss, (WS, X)


def jitted_inside():
    def loss(ws, x):
        inner = jax.jit(layer)
        for w in ws:
            x = inner(w, x)
        return (x**2).sum()

    return loss, (WS, X)


def nested():
    def pair(ws, x):
        return layer(ws[1], layer(ws[0], x)) * 2

    def loss(ws, x):
        return (jax.checkpoint(pair)(ws, x) ** 2).sum()

    return loss, (WS, X)


def vmapped():
    def loss(ws, x):
        return (jax.vmap(layer, in_axes=(None, 0))(ws[0], x) ** 2).sum()

    return loss, (WS, X)


def sharded():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    data, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(whole, data), out_specs=data)
    def apply(ws, x):
        return layer(ws[1], layer(ws[0], x))

    def loss(ws, x):
        return (apply(ws, x) ** 2).sum()

    return loss, (WS, X)


@jax.custom_jvp
def ruled(w, x):
    return layer(w, x)


@ruled.defjvp
def ruled_jvp(primals, tangents):
    return jax.jvp(layer, primals, tangents)


def custom_jvp():
    def loss(ws, x):
        return (ruled(ws[1], ruled(ws[0], x)) ** 2).sum()

    return loss, (WS, X)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        y = jnp.sin(nn.Dense(2 * D, name="wi")(x))
        y = nn.Dropout(0.3, deterministic=not train)(y)
        return x + nn.Dense(D, name="wo")(y)


class LinenNet(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x, train: bool):
        remat_block = nn.remat(LinenBlock, static_argnums=(2,))
        if not self.scan:
            for i in range(2):
                x = remat_block(name=f"h_{i}")(x, train)
            return x
        scan = nn.scan(
            lambda module, h, _: (module(h, train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        return scan(remat_block(name="layers"), x, None)[0]


def _linen(scan):
    net = LinenNet(scan)
    params = net.init(jr.key(2), X, False)

    def loss(params, x):
        # This key's generator compiles fast.
        y = net.apply(params, x, True, rngs={"dropout": jr.key(3, impl="rbg")})
        return (jnp.asarray(y) ** 2).sum()

    return loss, (params, X)


def linen_scanned():
    return _linen(scan=True)


def linen_unrolled():
    return _linen(scan=False)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.sin(self.norm(self.linear(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        for one in self.blocks:
            x = nnx.remat(NnxBlock.__call__)(one, x)
        return x


def nnx_functional():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, x):
        return (nnx.merge(graph, params, rest, copy=True)(x) ** 2).sum()

    return loss, (params, X)


class EqxNet(eqx.Module):
    layers: list
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        for one in self.layers:
            step = eqx.filter_checkpoint(lambda m, h: self.activation(jax.vmap(m)(h)))
            x = x + step(one, x)
        return x


def equinox():
    layers = [eqx.nn.Linear(D, D, key=key) for key in jr.split(jr.key(4), 2)]
    net = EqxNet(layers, jnp.sin)
    arrays, static = eqx.partition(net, eqx.is_array)

    def loss(arrays, x):
        return (eqx.combine(arrays, static)(x) ** 2).sum()

    return loss, (arrays, X)


def haiku():
    def net(x):
        for _ in range(2):
            x = x + hk.remat(hk.nets.MLP([2 * D, D], activation=jnp.sin))(x)
        return x

    transformed = hk.without_apply_rng(hk.transform(net))
    params = transformed.init(jr.key(5), X)
    return lambda params, x: (transformed.apply(params, x) ** 2).sum(), (params, X)


PLACES = (
    unrolled,
    scanned,
    fori,
    branched,
    jitted_inside,
    nested,
    vmapped,
    sharded,
    custom_jvp,
)
FRAMEWORKS = (
    linen_scanned,
    linen_unrolled,
    nnx_functional,
    equinox,
    haiku,
)
PROGRAMS = PLACES + FRAMEWORKS
