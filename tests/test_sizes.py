import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat._sizes import (
    SizeError,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("12GiB", 12 * 2**30),
        ("12 gib", 12 * 2**30),
        ("16GB", 16 * 10**9),
        ("15.75G", int(15.75 * 2**30)),
        ("800MiB", 800 * 2**20),
        (".5KiB", 512),
        ("1024", 1024),
        (4096, 4096),
        ("7B", 7),
    ],
)
def test_reads_sizes(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["twelve", "", "-1GiB", "0", "12Gib2", True, "1e3", "GiB"]
)
def test_refuses_what_is_no_size(text):
    with pytest.raises(SizeError, match="GiB"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=2**60))
def test_a_count_of_bytes_is_itself(n):
    assert parse_bytes(n) == parse_bytes(str(n)) == n


def test_writes_sizes_for_people():
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 * 2**20) == "3.0 MiB"
    assert format_bytes(-5 * 2**30) == "-5.00 GiB"
    assert format_count(2.5e12) == "2.5 T"
    assert format_count(12) == "12"
    assert format_seconds(2e-5) == "20 µs"
    assert format_seconds(0.25) == "250.0 ms"
