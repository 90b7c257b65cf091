"""FLOPs, bytes and seconds of jaxprs and of compiled programs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from remat._compile._compile import compile_lowered, lower
from remat._cost._cost import jaxpr_cost, module_cost
from remat._cost._ops import _valid_positions
from remat._hlo import parse
from remat._targets._target import target
from tests.hlo_programs import (
    LAYERS,
    ROWS,
    TARGETS,
    WIDTH,
    Hlo,
    compile_for,
    module_of,
    shape,
    stacked,
)

DEVICES = {name: target(name) for name in TARGETS}
MATMUL = 2 * ROWS * WIDTH * WIDTH


@pytest.fixture(params=TARGETS)
def name(request):
    return request.param


def traced(fn, *args):
    return jaxpr_cost(jax.make_jaxpr(fn)(*args))


def compiled(name, fn, *args):
    program = compile_for(name, fn, *args)
    return module_cost(module_of(program), DEVICES[name])


# A residual block of two products under scan: what XLA's cost analysis gets wrong
# whenever a loop is in the program. True figures by hand: the forward pass is 1, the
# backward pass 2; recomputing a block leaves out its last product, which only the
# block's output needs, so that is 0.5; doing so inside a recomputed outer block costs
# another 1. Without a loop it shows that the first block needs no input gradient.

BLOCKS, D, B = 16, 128, 64
FORWARD = BLOCKS * 2 * (2 * B * D * D)


def block(h, w):
    return h + jnp.tanh(h @ w) @ w, None


def scanned(step):
    return lambda w, x: jax.lax.scan(step, x, w)[0]


def nested(w, x):
    inner = jax.checkpoint(block, prevent_cse=False)
    outer = jax.checkpoint(lambda h, w: jax.lax.scan(inner, h, w), prevent_cse=False)
    return jax.lax.scan(outer, x, w.reshape(4, BLOCKS // 4, D, D))[0]


def unrolled(w, x):
    for i in range(BLOCKS):
        x, _ = jax.checkpoint(block)(x, w[i])
    return x


RECOMPUTE = [
    (scanned(block), 3),
    (scanned(jax.checkpoint(block, prevent_cse=False)), 3.5),
    (nested, 4.5),
    (unrolled, 3.5 - 1 / (2 * BLOCKS)),
]


@pytest.mark.parametrize(("model", "times_forward"), RECOMPUTE)
def test_recompute_inside_loops_is_counted_in_jaxprs(model, times_forward):
    def loss(w, x):
        return (model(w, x) ** 2).sum()

    cost = traced(jax.grad(loss), shape(BLOCKS, D, D), shape(B, D))
    assert cost.matmul_flops == times_forward * FORWARD
    assert cost.matmul_flops < cost.flops < 1.05 * cost.matmul_flops
    assert cost.n_unknown_loops == cost.n_uncounted == 0


@pytest.mark.parametrize("where", ["cpu", "v5e"])
@pytest.mark.parametrize(("model", "times_forward"), RECOMPUTE[:3])
def test_recompute_inside_loops_is_counted_in_programs(where, model, times_forward):
    def loss(w, x):
        return (model(w, x) ** 2).sum()

    cost = compiled(where, jax.grad(loss), shape(BLOCKS, D, D), shape(B, D))
    assert cost.matmul_flops == times_forward * FORWARD


# Compiled programs


def test_flops_of_forward_backward_and_recompute(name):
    module = module_of(stacked(name))
    cost = module_cost(module, DEVICES[name])
    # A layer's forward product, its recomputation, and two for the gradients.
    assert cost.matmul_flops == LAYERS * 4 * MATMUL
    recomputed = LAYERS * MATMUL
    assert recomputed <= cost.recompute_flops < 1.01 * recomputed
    assert cost.n_unknown_loops == 0


def test_a_loop_reads_one_layer_a_step(name):
    cost = module_cost(module_of(stacked(name)), DEVICES[name])
    stack = LAYERS * (ROWS + WIDTH) * WIDTH * 4
    # Reading whole stacks each step would be LAYERS times these passes over them.
    assert 2 * stack < cost.bytes_accessed < 30 * stack


@pytest.mark.parametrize("where", ["cpu", "v5e"])
@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (lambda a, b: a @ b, [(256, 512), (512, 128)], 2 * 256 * 512 * 128),
        (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            [(8, 128, 256), (8, 256, 128)],
            2 * 8 * 128 * 256 * 128,
        ),
        (
            lambda a, b: jnp.einsum("bthd,bshd->bhts", a, b),
            [(2, 128, 4, 64), (2, 128, 4, 64)],
            2 * 2 * 4 * 128 * 128 * 64,
        ),
    ],
)
def test_products_are_exact(where, fn, shapes, flops):
    args = [shape(*s) for s in shapes]
    assert compiled(where, fn, *args).matmul_flops == flops
    assert traced(fn, *args).matmul_flops == flops


def test_a_strided_convolution_and_its_gradient():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, w = shape(4, 33, 33, 16), shape(3, 3, 16, 32)
    forward = 2 * (4 * 16 * 16 * 32) * (3 * 3 * 16)
    assert traced(convolve, x, w).matmul_flops == forward
    assert compiled("cpu", convolve, x, w).matmul_flops == forward


@pytest.mark.parametrize("seed", range(5))
def test_valid_positions_against_counting(seed):
    chance = np.random.default_rng(seed)
    for _ in range(200):
        n_in, n_out, size = (int(chance.integers(1, 9)) for _ in range(3))
        stride, dilation, base = (int(chance.integers(1, 5)) for _ in range(3))
        low = int(chance.integers(-3, 7))
        at = [
            o * stride - low + k * dilation for o in range(n_out) for k in range(size)
        ]
        valid = [a for a in at if 0 <= a <= (n_in - 1) * base and a % base == 0]
        counted = _valid_positions(n_in, n_out, size, stride, low, dilation, base)
        assert counted == len(valid)


def test_bytes_by_hand():
    hlo = Hlo()
    x = hlo.add("parameter", [1000], op_name="x")
    a = hlo.add("sine", [1000], x)
    hlo.add("add", [1000], x, a)
    cost = module_cost(parse(hlo.bytes()))
    sine = 4000 + 4000
    assert cost.bytes_accessed == sine + 3 * 4000
    assert cost.transcendentals == 1000
    assert cost.flops == 1000
    assert math.isnan(cost.estimated_s)


def test_seconds_are_a_roofline():
    hlo = Hlo()
    x = hlo.add("parameter", [1024, 1024])
    dot = hlo.add("dot", [1024, 1024], x, x)
    hlo.entry.instructions[-1].dot_dimension_numbers.lhs_contracting_dimensions.append(
        1
    )
    hlo.add("negate", [1024, 1024], dot)
    device = dataclasses.replace(
        target("h100"), flops_tf32=1e12, flops_fp32=1e12, bandwidth_bytes_s=1e9
    )
    cost = module_cost(parse(hlo.bytes()), device)
    moved = 4 * 2**20
    # The product: 2.1 ms of work, 12.6 ms of traffic (it reads x twice); then 8.4 ms.
    assert cost.estimated_s == pytest.approx((3 * moved + 2 * moved) / 1e9)
    fast = dataclasses.replace(device, bandwidth_bytes_s=1e15)
    work = (2 * 2**30 + 2**20) / 1e12
    assert module_cost(parse(hlo.bytes()), fast).estimated_s == pytest.approx(work)


def test_collectives_of_a_sharded_step():
    device = target("v5e:2x2")
    mesh = device.mesh((4,), ("data",))
    batch = jax.ShapeDtypeStruct(
        (4096, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    weights = jax.ShapeDtypeStruct(
        (1024, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )

    def loss(w, x):
        return ((x @ w) ** 2).mean()

    lowered = lower(jax.grad(loss), (weights, batch), {}, device)
    program = compile_lowered(lowered, device, probe=True)
    cost = module_cost(module_of(program), device)
    assert cost.n_collectives >= 1
    # A ring over 4 devices sends 3/4 of the gradient twice.
    gradient = 1024 * 1024 * 4
    assert cost.collective_bytes == pytest.approx(2 * 3 / 4 * gradient, rel=0.01)
    assert cost.collective_s == pytest.approx(
        cost.collective_bytes / device.ici_bytes_s
    )
    # The products of one device's share of the batch: forward and weight gradient.
    assert cost.matmul_flops == 2 * (2 * 1024 * 1024 * 1024)


# jaxprs


def test_elementwise_and_reductions():
    x = shape(100, 10)
    assert traced(lambda x: x + x * x, x).flops == 2 * 1000
    assert traced(lambda x: x.sum(), x).flops == 999
    assert traced(lambda x: x.max(axis=1), x).flops == 1000 - 100
    cost = traced(jnp.exp, x)
    assert (cost.flops, cost.transcendentals) == (0, 1000)


def test_scans_multiply_and_nest():
    def inner(c, _):
        return c @ c, None

    def outer(c, _):
        return jax.lax.scan(inner, c, None, length=5)[0], None

    cost = traced(lambda x: jax.lax.scan(outer, x, None, length=3)[0], shape(8, 8))
    assert cost.matmul_flops == 3 * 5 * 2 * 8**3


def test_the_most_expensive_branch_counts():
    def choose(i, x):
        return jax.lax.cond(i > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    cost = traced(choose, shape(dtype=jnp.int32), shape(8, 8))
    assert cost.matmul_flops == 2 * (2 * 8**3)


def test_loops_of_unknown_length_count_once_and_are_told():
    def grow(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x @ x, x)

    cost = traced(grow, shape(8, 8))
    assert cost.matmul_flops == 2 * 8**3
    assert cost.n_unknown_loops == 1
    assert compiled("cpu", grow, shape(8, 8)).n_unknown_loops == 1


def test_calls_and_custom_rules_are_counted_once():
    @jax.custom_vjp
    def product(x, y):
        return x @ y

    product.defvjp(lambda x, y: (x @ y, (x, y)), lambda saved, g: (g, g))
    x = shape(8, 8)
    assert traced(jax.jit(lambda x: product(x, x)), x).matmul_flops == 2 * 8**3
    relu = traced(jax.nn.relu, x)
    assert relu.matmul_flops == 0


def test_kernels_are_told():
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    x = shape(8, 128)
    plain = pl.pallas_call(double, out_shape=x)
    cost = traced(plain, x)
    assert (cost.n_kernels, cost.n_uncounted, cost.flops) == (1, 1, 0)
    estimate = pl.CostEstimate(flops=1024, transcendentals=0, bytes_accessed=8192)
    told = pl.pallas_call(double, out_shape=x, cost_estimate=estimate)
    cost = traced(told, x)
    assert (cost.n_kernels, cost.n_uncounted, cost.flops) == (1, 0, 1024)


def test_scatter_and_sort_are_no_calls():
    def update(x, i):
        return jnp.sort(x).at[i].add(1.0)

    cost = traced(update, shape(100), shape(10, dtype=jnp.int32))
    assert cost.flops < 2000
    assert cost.matmul_flops == 0


def test_a_sum_with_what_is_zero_but_for_a_slice_counts_the_slice():
    """As the gradients of weights that the steps of a loop read by index."""

    def total(array, parts):
        read = jax.jit(lambda a, i: jax.lax.dynamic_index_in_dim(a, i))
        return sum((read(array, i) * part).sum() for i, part in enumerate(parts))

    def flops(n):
        ones = jnp.ones((3, 1, 4))
        traced = jax.make_jaxpr(jax.grad(total))(jnp.ones((n, 4)), ones)
        assert "add_any" in str(traced)
        return jaxpr_cost(traced).flops

    assert flops(8) == flops(800)
