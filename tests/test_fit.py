import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat._compare._fit import largest_within


@given(
    base=st.integers(0, 10_000),
    slope=st.integers(1, 500),
    start=st.integers(1, 300),
    limit=st.integers(1, 100_000),
)
@settings(deadline=None)
def test_a_line_is_searched_exactly_and_in_few_steps(base, slope, start, limit):
    asked = []

    def size(n):
        asked.append(n)
        return base + slope * n

    assert largest_within(size, limit, start) == max((limit - base) // slope, 0)
    assert len(asked) == len(set(asked))
    assert len(asked) <= 8 + 24


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 4000))
@settings(deadline=None)
def test_any_growing_size_is_searched_exactly(steps, limit):
    sizes = [sum(steps[: n + 1]) for n in range(len(steps))]
    expected = sum(size <= limit for size in sizes)
    found = largest_within(lambda n: sizes[n - 1], limit, start=1, upper=len(sizes) + 1)
    assert found == expected


def test_start_must_be_positive():
    import remat

    with pytest.raises(ValueError, match="at least 1"):
        remat.fit(lambda n: (abs, (n,)), start=0)
