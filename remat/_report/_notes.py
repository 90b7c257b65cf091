"""What else to know of a report's figures, in words."""

from collections.abc import Iterator

from remat._compile._compile import Program
from remat._cost._cost import Cost
from remat._report._contents import Totals
from remat._sizes import format_bytes, format_seconds


def notes_on(program: Program, device: Totals, cost: Cost) -> tuple[str, ...]:
    """Says what the figures alone do not.

    Args:
        program: The compiled program.
        device: Its sums of device memory.
        cost: What one run costs.
    """
    return (
        *_of_compile(program),
        *_of_cost(cost),
        *_of_host(cost),
        *_of_temporaries(program, device),
    )


def _of_compile(program: Program) -> Iterator[str]:
    if program.target.kind == "cpu":
        yield "CPU figures rank policies differently than TPU and GPU ones."
    if not program.exact and program.oom is None and program.codegen_error is None:
        yield "Work is that of the program squeezed to its floor."
    if program.codegen_error:
        yield f"Code generation failed: {program.codegen_error}"


def _of_cost(cost: Cost) -> Iterator[str]:
    if cost.xla_recompute_flops:
        share = cost.xla_recompute_flops / cost.flops
        yield (
            f"XLA's own rematerialization, for want of memory, added {share:.0%} of "
            "the FLOPs."
        )
    if cost.n_unknown_loops:
        yield f"{cost.n_unknown_loops} loops of unknown length counted once."
    if cost.n_uncounted:
        yield f"{cost.n_uncounted:.0f} runs of kernels of unknown FLOPs."


def _of_host(cost: Cost) -> Iterator[str]:
    """Whether the traffic to the host can hide behind what the device does."""
    if not cost.host_bytes or not cost.host_s >= 0:
        return
    moved = f"Host traffic of {format_bytes(round(cost.host_bytes))} takes"
    took, work = format_seconds(cost.host_s), format_seconds(cost.busy_s)
    if cost.host_s <= cost.busy_s:
        yield f"{moved} {took} of the host link: it can hide behind {work} of work."
    else:
        yield f"{moved} {took} of the host link: more than {work} of work can hide."


def _of_temporaries(program: Program, device: Totals) -> Iterator[str]:
    stated = program.stats.temp_bytes if program.stats else device.temp_bytes
    if stated != device.temp_bytes:
        yield (
            f"XLA states {stated} bytes of temporaries, fragmentation counted twice; "
            f"{device.temp_bytes} are assigned."
        )
