"""Real uses of `remat.scan`: a long RNN, rollouts fitted by gradient, a deep stack."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import remat
from remat._scan._segments import StepCosts, balanced, kept
from tests.benchmarks.deepest_stack import report_of
from tests.scan_programs import assert_same

# --- a GRU over 4,096 steps


def gru(weights, h, x):
    z = jax.nn.sigmoid(x @ weights["xz"] + h @ weights["hz"])
    r = jax.nn.sigmoid(x @ weights["xr"] + h @ weights["hr"])
    candidate = jnp.tanh(x @ weights["xn"] + (r * h) @ weights["hn"])
    h = (1 - z) * candidate + z * h
    return h, h.mean()


def gru_loss(scan, weights, xs, **options):
    h = jnp.zeros((xs.shape[1], weights["hz"].shape[0]))
    last, means = scan(functools.partial(gru, weights), h, xs, **options)
    return (last**2).mean() + (means**2).mean()


def gru_weights(n_in, n_hidden):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(n_in, n_hidden)] * 3 + [(n_hidden, n_hidden)] * 3
    names = ["xz", "xr", "xn", "hz", "hr", "hn"]
    drawn = (jax.random.normal(k, s) / 3 for k, s in zip(keys, shapes, strict=True))
    return dict(zip(names, drawn, strict=True))


def test_a_gru_over_4096_steps_learns_what_lax_scan_does():
    weights = gru_weights(2, 4)
    xs = jnp.sin(jnp.arange(4096 * 2.0)).reshape(4096, 1, 2)
    got = jax.jit(jax.value_and_grad(functools.partial(gru_loss, remat.scan)))(
        weights, xs
    )
    plain = jax.value_and_grad(functools.partial(gru_loss, lax.scan))
    assert_same(got, jax.jit(plain)(weights, xs), 1e-5)


def test_a_gru_over_4096_steps_keeps_some_two_hundred_states_on_h100():
    weights = jax.eval_shape(lambda: gru_weights(256, 256))
    xs = jax.ShapeDtypeStruct((4096, 64, 256), jnp.float32)

    def temp_bytes(scan):
        gradient = jax.grad(functools.partial(gru_loss, scan))
        return remat.analyze(gradient, weights, xs, target="h100").temp_bytes

    state = 64 * 256 * 4
    # Besides: gates of one step, and each level's sums of the weights' gradients.
    sums = 2 * 6 * 256 * 256 * 4
    assert temp_bytes(remat.scan) <= (2 * 64 + 40) * state + sums
    assert temp_bytes(lax.scan) >= 4 * 4096 * state


# --- rollouts of 10,000 steps, fitted by gradient


def lorenz(parameters, state, _):
    """One explicit step of 0.0002."""
    x, y, z = state
    sigma, rho, beta = parameters
    change = jnp.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])
    state = state + 2e-4 * change
    return state, None


def heat(conductivity, u, _):
    """One explicit step of the heat equation on a ring."""
    flux = conductivity * (jnp.roll(u, -1) - u)
    return u + flux - jnp.roll(flux, 1), None


def fit(step, start, first, target, n_steps, rate, n_updates):
    """Gradient descent on the parameters of a rollout; losses and parameters."""

    def loss(parameters):
        last, _ = remat.scan(functools.partial(step, parameters), first, None, n_steps)
        return ((last - target) ** 2).mean()

    optimizer = optax.adam(rate)

    def update(state, _):
        parameters, moments = state
        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(parameters, updates), moments), value

    state = (start, optimizer.init(start))
    (parameters, _), losses = jax.jit(
        lambda state: lax.scan(update, state, None, n_updates)
    )(state)
    return losses, parameters


def rollout(step, parameters, first, n_steps):
    return lax.scan(functools.partial(step, parameters), first, None, n_steps)[0]


def test_a_lorenz_rollout_of_10000_steps_is_fitted():
    true, first = jnp.array([10.0, 28.0, 8 / 3]), jnp.array([1.0, 1.0, 1.05])
    target = rollout(lorenz, true, first, 10_000)
    start = true * jnp.array([1.02, 0.99, 1.02])
    losses, _ = fit(lorenz, start, first, target, 10_000, 0.01, 40)
    assert losses[-1] < losses[0] / 50


def test_a_heat_rollout_of_10000_steps_is_fitted():
    ring = jnp.linspace(0, 2 * jnp.pi, 16, endpoint=False)
    true, first = 2e-3 * (1 + 0.5 * jnp.sin(ring)), jnp.cos(ring) + jnp.sin(2 * ring)
    target = rollout(heat, true, first, 10_000)
    losses, _ = fit(heat, jnp.full(16, 2e-3), first, target, 10_000, 1e-4, 60)
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize(("step", "n"), [(lorenz, 3), (heat, 16)])
def test_gradients_of_rollouts_are_those_of_lax_scan(step, n):
    parameters = jnp.array([10.0, 28.0, 8 / 3]) if n == 3 else jnp.full(16, 2e-3)
    first = jnp.linspace(1.0, 1.2, n)

    def loss(scan, parameters):
        body = functools.partial(step, parameters)
        return (scan(body, first, None, 10_000)[0] ** 2).sum()

    got = jax.jit(jax.grad(functools.partial(loss, remat.scan)))(parameters)
    assert_same(
        got, jax.jit(jax.grad(functools.partial(loss, lax.scan)))(parameters), 1e-4
    )


# --- a stack of 96 layers on a v5e


@pytest.mark.slow
def test_a_stack_of_96_layers_fits_a_v5e_in_segments():
    n_layers, batch = 96, 16
    every_layer = report_of("full", n_layers, "v5e", batch)
    cut = report_of("sqrt", n_layers, "v5e", batch)
    assert cut.peak_bytes <= cut.available_bytes
    carry = batch * 1024 * 768 * 2
    lengths = balanced(n_layers, 2, StepCosts())
    saved = (n_layers - kept(n_layers, lengths, StepCosts())) * carry
    assert every_layer.peak_bytes - cut.peak_bytes >= 0.8 * saved
