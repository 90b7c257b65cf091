"""How to cut N steps into segments: the arithmetic, without JAX.

A nest of k levels is a tuple of k lengths, outermost first: a step is the smallest
segment, `lengths[-1]` steps make a segment, `lengths[-2]` of those the next larger
one, and so on. What does not fill a segment at the end is a shorter one of its own,
cut by the same rule, so any number of steps fits any nest that is large enough.

Between forward and backward pass only the carries into the largest segments are
kept. Going backward, one segment at a time is run again, and keeps the carries into
*its* segments; hence N^(1/k) memory for k-1 extra forward passes. With two levels
this is the sqrt(N) rule of Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (2016). For a fixed number of extra passes equal lengths are optimal among
nests; binomial schedules (Griewank and Walther, "Revolve", 2000) keep somewhat fewer
carries for the same number of passes, but are no loops, so their program grows with N.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

Segments = str | int | Sequence[int] | None
"""How to cut: "sqrt", a number of segments, the lengths of a nest, or not at all."""

Lengths = tuple[int, ...]
"""A nest: number of segments or steps at each level, outermost first."""

_SPREAD = {3: 4}
"""How far from the analytic optimum the search for whole numbers looks, by number of
levels: segment counts within this distance; 1 for more levels, half the optimum for
two."""


class SegmentsError(ValueError):
    """The wanted segments do not fit the scan."""


class SegmentsWarning(UserWarning):
    """A scan that was to be cut into segments is left as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """What a kept carry and a kept step take, in any one unit."""

    carry: float = 1.0
    """One carry at the start of a segment."""
    step: float = 1.0
    """What the backward pass of one step needs, kept while its segment runs back."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Steps cut into equal segments and a rest."""

    block: int
    """Steps in a segment."""
    count: int
    """Full segments."""
    rest: int
    """Steps in the last, shorter segment; 0 for none."""

    @property
    def n_carries(self) -> int:
        """Carries kept: one at the start of every segment."""
        return self.count + (self.rest > 0)


def cut(n_steps: int, lengths: Lengths) -> Cut | None:
    """The outermost cut that a nest makes, or None where one loop is left.

    Args:
        n_steps: Number of steps, at least 1.
        lengths: The nest.

    Example:
        >>> cut(97, (10, 10))
        Cut(block=10, count=9, rest=7)
    """
    block = math.prod(lengths[1:])
    if len(lengths) == 1:
        return None
    count, rest = divmod(n_steps, block)
    return Cut(block=block, count=count, rest=rest)


def inner(n_steps: int, lengths: Lengths) -> Lengths:
    """The nest of one segment of `n_steps`, without levels it cannot fill.

    Example:
        >>> inner(7, (10, 10, 10))
        (10,)
    """
    while len(lengths) > 1 and n_steps <= math.prod(lengths[1:]):
        lengths = lengths[1:]
    return lengths


def kept(n_steps: int, lengths: Lengths, costs: StepCosts) -> float:
    """The most that is kept at once, from the end of the forward pass on.

    Args:
        n_steps: Number of steps.
        lengths: The nest.
        costs: What a carry and a step take.

    Returns:
        For two levels and N = a*b + r: `max(a*carry + b*step, (a+1)*carry + r*step)`,
        the second only with a rest.

    Example:
        >>> kept(97, (10, 10), StepCosts())
        19.0
    """
    if n_steps == 0:
        return 0.0
    lengths = inner(n_steps, lengths)
    pieces = cut(n_steps, lengths)
    if pieces is None:
        return n_steps * costs.step
    # The rest ran last, so it runs back first, while every carry is still there.
    rest = pieces.n_carries * costs.carry + kept(pieces.rest, lengths[1:], costs)
    full = pieces.count * costs.carry + kept(pieces.block, lengths[1:], costs)
    return max(rest if pieces.rest else 0.0, full)


def n_carries(n_steps: int, lengths: Lengths) -> int:
    """Carries between forward and backward pass.

    Example:
        >>> n_carries(97, (10, 10)), n_carries(97, (97,))
        (10, 97)
    """
    lengths = inner(n_steps, lengths)
    pieces = cut(n_steps, lengths) if n_steps else None
    return n_steps if pieces is None else pieces.n_carries


# --- choosing a nest


def lengths_for(
    n_steps: int,
    segments: Segments,
    *,
    max_saved: int | None = None,
    costs: StepCosts | None = None,
) -> Lengths:
    """The nest that `segments` or `max_saved` asks for.

    Args:
        n_steps: Number of steps, at least 1.
        segments: "sqrt" for the two levels (or one) that keep least, a number of
            segments, the lengths of a nest, or None for one level.
        max_saved: The most carries to keep at once; the fewest levels that do.
        costs: What a carry and a step take; equal where not given.

    Raises:
        SegmentsError: Neither a way to cut nor one that fits.

    Example:
        >>> lengths_for(1024, "sqrt"), lengths_for(1021, 16), lengths_for(9, None)
        ((32, 32), (16, 64), (9,))
        >>> lengths_for(1000, "sqrt", max_saved=30)
        (10, 10, 10)
    """
    costs = costs or StepCosts()
    if max_saved is not None:
        return _fewest_levels(n_steps, segments, max_saved, costs)
    if segments is None:
        return (n_steps,)
    if isinstance(segments, str):
        return _named(n_steps, segments, costs)
    if isinstance(segments, int):
        return inner(n_steps, _counted(n_steps, segments))
    return inner(n_steps, _checked(n_steps, tuple(segments)))


@functools.cache
def balanced(n_steps: int, n_levels: int, costs: StepCosts | None = None) -> Lengths:
    """The nest of at most `n_levels` levels that keeps least.

    A rest is another loop in the program, so it must save more than a carry to be
    worth it; among equals the nearest to the analytic optimum is taken, at which all
    levels keep the same.

    Example:
        >>> balanced(1000, 3), balanced(97, 2), balanced(3, 2)
        ((10, 10, 10), (10, 10), (3,))
    """
    costs = costs or StepCosts()
    flat = (n_steps,)
    if n_levels < 2 or n_steps < 2:
        return flat
    optimum = _optimal_count(n_steps, n_levels, costs)
    nests: list[Lengths] = [flat]
    for count in _counts(n_steps, n_levels, optimum):
        block = -(-n_steps // count)
        deeper = balanced(block, n_levels - 1, costs)
        nests.append((-(-n_steps // math.prod(deeper)), *deeper))

    def penalized(lengths: Lengths) -> tuple[float, int, float]:
        rests = n_rests(n_steps, lengths) * costs.carry
        amount = kept(n_steps, lengths, costs) + rests
        return amount, len(lengths), abs(lengths[0] - optimum)

    return min(nests, key=penalized)


def n_rests(n_steps: int, lengths: Lengths) -> int:
    """Loops in a nest besides one for each level.

    Example:
        >>> n_rests(1000, (10, 10, 10)), n_rests(97, (10, 10))
        (0, 1)
    """
    lengths = inner(n_steps, lengths)
    pieces = cut(n_steps, lengths)
    if pieces is None:
        return 0
    full = n_rests(pieces.block, lengths[1:])
    return full + (1 + n_rests(pieces.rest, lengths[1:]) if pieces.rest else 0)


def _optimal_count(n_steps: int, n_levels: int, costs: StepCosts) -> float:
    """Outermost segments at which all levels keep the same amount."""
    share = n_steps * costs.carry ** (n_levels - 1) * costs.step
    return share ** (1 / n_levels) / costs.carry if costs.carry else float(n_steps)


def _counts(n_steps: int, n_levels: int, optimum: float) -> Iterator[int]:
    """Numbers of outermost segments worth trying."""
    spread = max(4, optimum / 2) if n_levels == 2 else _SPREAD.get(n_levels, 1)
    lowest = max(2, math.floor(optimum - spread))
    yield from range(lowest, min(n_steps, math.ceil(optimum + spread)) + 1)


def _fewest_levels(
    n_steps: int, segments: Segments, max_saved: int, costs: StepCosts
) -> Lengths:
    if segments != "sqrt":
        raise SegmentsError(
            f"give segments or max_saved, not both; got segments={segments!r} and "
            f"max_saved={max_saved}"
        )
    least = n_steps
    n_levels = 1
    while n_levels <= max(1, math.ceil(math.log2(n_steps))):
        # By number of carries first; by size among those where sizes differ.
        for choice in (costs, StepCosts()):
            lengths = balanced(n_steps, n_levels, choice)
            amount = math.ceil(kept(n_steps, lengths, StepCosts()))
            if amount <= max_saved:
                return lengths
            least = min(least, amount)
        n_levels += 1
    raise SegmentsError(
        f"max_saved={max_saved} carries is below the {least} that the deepest nest "
        f"of {n_steps} steps keeps; give at least {least}"
    )


def _named(n_steps: int, segments: str, costs: StepCosts) -> Lengths:
    if segments != "sqrt":
        raise SegmentsError(
            f'segments is "sqrt", a number of segments, a tuple of lengths or None, '
            f"got {segments!r}; for more levels give a tuple such as (10, 10, 10) or "
            "max_saved="
        )
    return balanced(n_steps, 2, costs)


def _counted(n_steps: int, count: int) -> Lengths:
    if isinstance(count, bool) or count < 1:
        raise SegmentsError(
            f"segments, as a number, is at least 1, got {count!r}; give None for a "
            "plain scan"
        )
    return (count, -(-n_steps // count))


def _checked(n_steps: int, lengths: Lengths) -> Lengths:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in lengths)
    if not lengths or not whole or min(lengths) < 1:
        raise SegmentsError(
            f"segments, as a tuple, holds whole numbers of at least 1, got {lengths}"
        )
    if math.prod(lengths) < n_steps:
        raise SegmentsError(
            f"segments={lengths} holds {math.prod(lengths)} steps and the scan has "
            f"{n_steps}; make a length larger, such as "
            f"{(-(-n_steps // math.prod(lengths[1:])), *lengths[1:])}"
        )
    return lengths
