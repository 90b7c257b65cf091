"""`remat.sequential`: segments for blocks that are called one after another."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from remat._regions._boundary import Boundary
from remat._scan._segments import Lengths, Segments, cut, inner, lengths_for
from remat._wrap._wrap import Rule, is_bound_linen, wrap_function
from remat.policies import Policy, as_policy, none

Block = Callable[[Any], Any]


def sequential(
    blocks: Sequence[Block],
    x: Any,
    segments: Segments = "sqrt",
    policy: Policy | str | Callable[..., Any] = "nothing",
    *,
    max_saved: int | None = None,
) -> Any:
    """Call blocks in turn, keeping few of the values between them.

    `blocks[-1](... blocks[1](blocks[0](x)))`, for layers that are a Python list and
    no scan: they may differ, and so may the shapes between them. Between forward and
    backward pass only the input of each segment of blocks is kept; going backward,
    one segment at a time is run again. N blocks need about `2 * sqrt(N)` of the
    values between blocks instead of N, for one more forward pass.

    Args:
        blocks: Functions of one argument, a pytree of arrays: plain functions,
            Linen modules that are bound (made or set up in the module that calls
            this), NNX modules, whose state is updated, or callable pytrees. Arrays
            that a function closes over are differentiated too.
        x: What the first block takes.
        segments: As for `remat.scan`, of blocks instead of steps.
        policy: What each block, then a region, keeps while its segment runs back.
            By default it recomputes everything, so that one block's inner values
            exist at a time; "none" makes no region of a block.
        max_saved: Instead of `segments`: the most values between blocks to keep at
            once; the fewest extra forward passes that do it.

    Returns:
        What the last block returns; `x` where there are no blocks.

    Raises:
        SegmentsError: As for `remat.scan`.
        PolicyError: The policy is none.
        TypeError: A block cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> layers = [lambda x, w=w: jnp.tanh(x * w) for w in range(1, 10)]
        >>> float(remat.sequential(layers, 0.5)) == float(remat.sequential(
        ...     layers, 0.5, segments=None, policy="none"))
        True
    """
    for i, block in enumerate(blocks):
        if not callable(block):
            raise TypeError(
                f"blocks must be functions or modules, got {type(block).__name__} "
                f"as blocks[{i}]"
            )
    if not blocks:
        return x
    rule = None if as_policy(policy) == none else Rule.make(policy, True)
    lengths = lengths_for(len(blocks), segments, max_saved=max_saved)
    return _Runner(rule).run(tuple(blocks), x, lengths)


@dataclasses.dataclass(frozen=True, slots=True)
class _Runner:
    rule: Rule | None
    """How a block is made a region, if it is."""

    def run(self, blocks: tuple[Block, ...], x: Any, lengths: Lengths) -> Any:
        lengths = inner(len(blocks), lengths)
        pieces = cut(len(blocks), lengths)
        if pieces is None:
            return self.run_each(blocks, x)
        for i in range(0, len(blocks), pieces.block):
            x = self.run_segment(blocks[i : i + pieces.block], x, lengths[1:])
        return x

    def run_each(self, blocks: tuple[Block, ...], x: Any) -> Any:
        for block in blocks:
            if self.rule is None:
                x = block(x)
            else:
                x = _region(lambda inner, x: inner[0](x), (block,), self.rule)(x)
        return x

    def run_segment(self, blocks: tuple[Block, ...], x: Any, lengths: Lengths) -> Any:
        if len(blocks) == 1 and self.rule is not None:
            return self.run_each(blocks, x)  # a region keeps its input and no more
        run = functools.partial(self.run, lengths=lengths)
        return _region(run, blocks, _SEGMENT)(x)


_SEGMENT = Rule(cast(Policy, Boundary()), True)


def _region(
    run: Callable[[tuple[Block, ...], Any], Any], blocks: tuple[Block, ...], rule: Rule
) -> Callable[[Any], Any]:
    """`run(blocks, x)` of `x` as a region, with the arrays in the blocks as inputs."""

    # Flax lifts a Linen module's scope where the first argument is one.
    def fn(owner: Any, blocks: tuple[Block, ...], x: Any) -> Any:
        del owner
        return run(blocks, x)

    owner = next(filter(is_bound_linen, blocks), None)
    return functools.partial(wrap_function(fn, rule, (), fn), owner, blocks)
