"""The arithmetic of cutting N steps into segments."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat._scan._segments import (
    SegmentsError,
    StepCosts,
    balanced,
    cut,
    inner,
    kept,
    lengths_for,
    n_carries,
)

NESTS = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def run_nest(n_steps, lengths, costs):
    """Runs a nest forward and back; the steps run, times run, and most kept at once."""
    times = [0] * n_steps
    most = 0.0

    def note(held):
        nonlocal most
        most = max(most, held)

    def segments(steps, lengths):
        lengths = inner(len(steps), lengths)
        block = math.prod(lengths[1:]) if len(lengths) > 1 else len(steps)
        return [steps[i : i + block] for i in range(0, len(steps), block)], lengths

    def back(steps, lengths, held):
        pieces, lengths = segments(steps, lengths)
        if len(lengths) == 1:
            note(held + len(steps) * costs.step)
            return
        for i in reversed(range(len(pieces))):
            for step in pieces[i]:
                times[step] += 1
            back(pieces[i], lengths[1:], held + (i + 1) * costs.carry)

    if n_steps:
        back(list(range(n_steps)), lengths, 0.0)
    return times, most


@settings(deadline=None)
@given(NESTS, st.data(), st.sampled_from([1.0, 0.5, 3.0]))
def test_kept_is_what_a_simulated_run_holds(lengths, data, step):
    n_steps = data.draw(st.integers(0, math.prod(lengths)))
    costs = StepCosts(carry=1.0, step=step)
    _, most = run_nest(n_steps, lengths, costs)
    assert kept(n_steps, lengths, costs) == most


@settings(deadline=None)
@given(NESTS, st.data())
def test_no_step_runs_more_often_than_there_are_levels(lengths, data):
    n_steps = data.draw(st.integers(1, math.prod(lengths)))
    times, _ = run_nest(n_steps, lengths, StepCosts())
    assert max(times) <= len(inner(n_steps, lengths)) - 1
    pieces = cut(n_steps, inner(n_steps, lengths))
    if pieces is not None:  # nothing padded: the pieces are the steps
        assert pieces.count * pieces.block + pieces.rest == n_steps


@pytest.mark.parametrize("n_steps", [*range(1, 40), 97, 1000, 1021])
@pytest.mark.parametrize("step", [1.0, 2.0, 0.25])
def test_two_levels_keep_within_a_carry_of_the_least(n_steps, step):
    costs = StepCosts(step=step)
    tried = [
        kept(n_steps, (count, -(-n_steps // count)), costs)
        for count in range(1, n_steps + 1)
    ]
    least = min(tried)
    assert kept(n_steps, balanced(n_steps, 2, costs), costs) <= least + costs.carry


@pytest.mark.parametrize(
    ("n_steps", "n_levels", "lengths"),
    [
        (1024, 2, (32, 32)),
        (1000, 3, (10, 10, 10)),
        (256, 4, (4, 4, 4, 4)),
        (65536, 2, (256, 256)),
        (4, 2, (4,)),
        (1, 3, (1,)),
    ],
)
def test_powers_are_cut_into_equal_lengths(n_steps, n_levels, lengths):
    assert balanced(n_steps, n_levels) == lengths


@pytest.mark.parametrize("n_levels", [1, 2, 3, 4])
def test_memory_grows_with_the_kth_root(n_levels):
    small, large = 2**8, 2**16
    costs = StepCosts()
    grown = kept(large, balanced(large, n_levels), costs) / kept(
        small, balanced(small, n_levels), costs
    )
    assert grown == pytest.approx((large / small) ** (1 / n_levels), rel=0.06)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 100))
def test_max_saved_is_met_with_the_fewest_levels(n_steps, max_saved):
    try:
        lengths = lengths_for(n_steps, "sqrt", max_saved=max_saved)
    except SegmentsError:
        assert max_saved < 3 * math.log(max(n_steps, 3), 3) + 3
        return
    assert kept(n_steps, lengths, StepCosts()) <= max_saved
    if len(lengths) > 1:
        assert n_steps > max_saved
    if len(lengths) > 2:  # two levels cannot do it
        pairs = ((c, -(-n_steps // c)) for c in range(1, n_steps + 1))
        assert min(kept(n_steps, pair, StepCosts()) for pair in pairs) > max_saved


def test_a_count_gives_at_most_that_many_segments():
    for n_steps in range(1, 60):
        for count in range(1, 20):
            assert n_carries(n_steps, lengths_for(n_steps, count)) <= max(
                count, n_steps if count == 1 else count
            )


@pytest.mark.parametrize(
    ("segments", "options", "message"),
    [
        ("log", {}, 'segments is "sqrt", a number of segments'),
        (0, {}, "at least 1, got 0"),
        (True, {}, "at least 1, got True"),
        ((), {}, "whole numbers of at least 1"),
        ((3, 0), {}, "whole numbers of at least 1"),
        ((3, 3), {}, r"holds 9 steps and the scan has 100.*such as \(34, 3\)"),
        (4, {"max_saved": 10}, "segments or max_saved, not both"),
        ("sqrt", {"max_saved": 3}, "give at least 1[0-9]"),
    ],
)
def test_errors_say_what_to_give(segments, options, message):
    with pytest.raises(SegmentsError, match=message):
        lengths_for(100, segments, **options)
