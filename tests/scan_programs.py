"""Scan bodies of every kind, and how results are compared."""

import jax
import jax.numpy as jnp
import numpy as np


def sine(c, x):
    """One array, no inner value larger than it."""
    c = jnp.sin(c + x) * 1.01
    return c, c


def counter(carry, x):
    """A pytree with an integer, a key and a None; ys that are a pytree too."""
    c = {"h": jnp.tanh(carry["h"] * 1.1 + x["a"]), "n": carry["n"] + x["i"]}
    key, used = jax.random.split(carry["key"])
    noise = jax.random.normal(used, c["h"].shape)
    c = {"h": c["h"] + 0.01 * noise, "n": c["n"], "key": key, "none": None}
    return c, (c["h"].sum(), {"n": c["n"], "x": x["i"]}, None)


def gate(carry, x):
    """Inner values larger than the carry; two arrays of unlike shapes."""
    h, m = carry
    z = jax.nn.sigmoid(h @ m + x)
    r = jax.nn.sigmoid(h * z - x)
    h = z * h + (1 - z) * jnp.tanh(r * h)
    return (h, m * 0.999 + 0.001 * jnp.outer(h, r)), h.mean()


def half(c, x):
    """Half precision."""
    c = (jnp.sin(c) * 1.01 + x).astype(jnp.bfloat16)
    return c, (c * c).astype(jnp.float32)


def inputs(name, n):
    """The body, first carry and xs of n steps."""
    ramp = jnp.linspace(0.0, 1.0, n, dtype=jnp.float32)
    if name == "sine":
        return sine, jnp.arange(3.0) / 7, jnp.stack([ramp, -ramp, ramp**2], 1)
    if name == "counter":
        carry = {"h": jnp.ones(2) / 3, "n": 0, "key": jax.random.key(0), "none": None}
        return counter, carry, {"a": ramp, "i": jnp.arange(n), "none": None}
    if name == "gate":
        return gate, (jnp.arange(3.0) / 5, jnp.eye(3) / 2), ramp
    carry = jnp.linspace(0, 1, 4, dtype=jnp.bfloat16)
    return half, carry, ramp.astype(jnp.bfloat16)


BODIES = ("sine", "counter", "gate", "half")


def float_leaves(tree):
    """The leaves that have a gradient, and a function that puts others back."""
    leaves, treedef = jax.tree.flatten(tree)
    floats = [leaf for leaf in leaves if _is_float(leaf)]

    def merge(floats):
        rest = iter(floats)
        return treedef.unflatten(
            [next(rest) if _is_float(leaf) else leaf for leaf in leaves]
        )

    return floats, merge


def _is_float(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def value_and_gradient(scan, name, n, **options):
    """What a scan returns, and the gradient of a weighted sum of all of it."""
    body, init, xs = inputs(name, n)
    floats, merge = float_leaves((init, xs))

    def loss(floats):
        init, xs = merge(floats)
        out = scan(body, init, xs, length=n, **options)
        terms = [
            (
                leaf.astype(jnp.float32)
                * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape))
            )
            for leaf in jax.tree.leaves(out)
            if _is_float(leaf)
        ]
        return sum(term.sum() for term in terms), out

    return jax.value_and_grad(loss, has_aux=True)(floats)


def assert_same(got, want, rtol):
    """Trees equal in structure, types and values, relative to the largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(*leaves, strict=True):
        assert jax.typeof(a) == jax.typeof(b)
    assert_close(*leaves, rtol)


def assert_close(got, want, rtol):
    """Lists of arrays equal in value, relative to the largest value."""
    for a, b in zip(got, want, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        scale = max(1.0, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=rtol)
