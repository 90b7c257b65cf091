"""Every byte of the library's own models is named, on every target."""

import pytest

from tests.benchmarks.unknown import (
    MODELS,
    TARGETS,
    labelled_share,
    report_of,
    unknown_share,
)

SLOW = [pytest.param(m, t, marks=pytest.mark.slow) for m in MODELS for t in TARGETS]


@pytest.mark.parametrize(
    ("model", "target"), [("gpt2-tiny", "v5e"), ("vit-tiny", "h100"), *SLOW]
)
def test_nearly_every_byte_is_named(model, target):
    report = report_of(model, target, "save_dots")
    assert unknown_share(report) <= 0.02
    assert labelled_share(report) >= 0.95
