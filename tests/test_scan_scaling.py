"""How compiled memory grows with the number of steps."""

import functools

import pytest

from tests.benchmarks.scan_scaling import WIDTH, exponent, extra_forwards, peak_bytes

LENGTHS = [512, 4096, 32768]


@functools.cache
def peaks(way):
    return [peak_bytes(way, n, "cpu") for n in LENGTHS]


@pytest.mark.parametrize(
    ("way", "power", "extra"),
    [
        ("plain", 1, 0),
        ("full remat", 1, 0),  # a body of one operation, of which nothing is repeated
        ("sqrt", 1 / 2, 1),
        ("three levels", 1 / 3, 2),
    ],
)
def test_memory_grows_as_the_kth_root(way, power, extra):
    assert exponent(peaks(way), LENGTHS) == pytest.approx(power, abs=0.05)
    assert extra_forwards(way, LENGTHS[-1]) == pytest.approx(extra, abs=0.01)


def test_max_saved_does_not_grow():
    argument, result, moving = 1, 1, 3
    carries = [peak / (WIDTH * 4) for peak in peaks("max_saved=40")]
    assert max(carries) <= 40 + argument + result + moving
