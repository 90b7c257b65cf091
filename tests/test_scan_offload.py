"""Carries that wait on the host come back while other segments are run.

Told from the schedule of the compiled program: a transfer that is started before and
waited for after a matrix product runs beside it.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import remat
from remat._cost._ops import matmul_flops
from remat._hlo._trips import runs_of_computations, trip_counts
from tests.hlo_programs import compile_for, module_of, shape

N, D, ROWS = 16, 1024, 8192
HOST = 5
CARRY = ROWS * D * 2


def loss(ws, x):
    def body(h, w):
        into, out = w
        return h + jnp.tanh(h @ into) @ out, None

    last, _ = remat.scan(
        body, x, ws, segments=None, offload_carry=True, policy="nothing"
    )
    return (last.astype(jnp.float32) ** 2).mean()


@functools.cache
def module_for(name, **options):
    weights = shape(N, D, D, dtype=jnp.bfloat16)
    x = shape(ROWS, D, dtype=jnp.bfloat16)
    step = jax.value_and_grad(loss)
    args = ((weights, weights), x)
    program = compile_for(name, step, *args, probe=False, options=options)
    return module_of(program)


def transfers(module, direction):
    """Each transfer of a carry in a loop: whether products run beside it.

    Args:
        module: The compiled program.
        direction: "dynamic-slice" from the host, "dynamic-update-slice" to it.
    """
    runs = runs_of_computations(module, trip_counts(module))
    found = []
    for computation in module.computations.values():
        if runs[computation.id] < 2:
            continue
        order = [module.instructions[id] for id in computation.schedule]
        for start, one in enumerate(order):
            if one.opcode != "async-start" or not one.name.startswith(direction):
                continue
            if not any(s.memory_space == HOST for _, s in one.shape.leaves()):
                continue
            done = next(i for i, o in enumerate(order) if one.id in o.operands)
            found.append(any(has_product(module, o) for o in order[start:done]))
    return found


def has_product(module, instruction):
    if matmul_flops(module, instruction):
        return True
    called = (module.computations[id] for id in instruction.called)
    return any(has_product(module, one) for c in called for one in c.instructions)


def test_carries_are_on_the_host_of_a_gpu():
    weights = shape(N, D, D, dtype=jnp.bfloat16)
    x = shape(ROWS, D, dtype=jnp.bfloat16)
    report = remat.analyze(
        jax.value_and_grad(loss), (weights, weights), x, target="h100"
    )
    on_host = [b for b in report.buffers if b.memory_space == "host"]
    assert sum(b.bytes for b in on_host) == report.host_bytes == N * CARRY
    assert {(b.n_stacked, b.category) for b in on_host} == {(N // 4, "residuals")}
    moved = [note for note in report.notes if note.startswith("Host traffic of")]
    assert moved and report.cost.host_bytes == 2 * N * CARRY


# Four segments stand in a loop step, and no compute of the step is before the first.


@pytest.mark.parametrize("name", ["h100", pytest.param("v5e", marks=pytest.mark.slow)])
def test_transfers_of_three_of_four_carries_overlap_compute(name):
    module = module_for(name)
    assert sum(transfers(module, "dynamic-update-slice")) >= 3  # 4 in jax 0.12
    assert sorted(transfers(module, "dynamic-slice")) == [False, True, True, True]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA of jax 0.10 pipelines half of them"
)
def test_pipelined_by_xla_the_transfers_of_all_carries_overlap_compute():
    module = module_for("h100", xla_gpu_enable_pipelined_host_offloading=True)
    assert transfers(module, "dynamic-update-slice") == [True] * 4
    assert transfers(module, "dynamic-slice") == [True] * 4
