"""Predicted against measured; without a device, that this is said."""

import jax
import jax.numpy as jnp
import pytest

import remat
from remat._report._on_device import _arrays, _measured


def test_without_statistics_it_is_said():
    found = remat.measure(lambda x: x @ x, jnp.ones((64, 64)))
    assert found.peak_bytes is None and found.ratio is None
    assert found.report.argument_bytes == 64 * 64 * 4
    assert "the cpu backend keeps no memory statistics" in str(found)


def test_shapes_cannot_be_run():
    with pytest.raises(remat.TargetError, match="for shapes use analyze"):
        remat.measure(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32))


def test_leaves_that_are_no_arrays_are_left_out():
    x = jnp.ones(3)
    (first, second), named = _arrays(((x, "relu"), {"train": True}))
    assert first is x and second is None and named == {"train": None}


def test_the_process_before_does_not_count():
    report = remat.measure(lambda x: x @ x, jnp.ones((64, 64))).report
    own = report.argument_bytes  # 16 KiB, there before the run
    before = {"bytes_in_use": own + 5000, "peak_bytes_in_use": own + 6000}
    after = {"bytes_in_use": own, "peak_bytes_in_use": 2 * own + 5000}
    found = _measured(report, before, after)
    assert found.peak_bytes == 2 * own
    assert found.ratio == 2 * own / report.peak_bytes
    assert str(found) == "predicted 32.0 KiB, measured 32.0 KiB (1.000)"


def test_a_peak_from_before_tells_nothing():
    report = remat.measure(lambda x: x @ x, jnp.ones((64, 64))).report
    stats = {"bytes_in_use": 0, "peak_bytes_in_use": 1 << 30}
    found = _measured(report, stats, stats)
    assert found.peak_bytes is None and "larger ran" in str(found)
