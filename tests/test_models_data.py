"""Data: an order that seed and step decide, and what is held out stays so."""

import chex
import numpy as np
import pytest

from remat.models._data import Digits, open_text


def test_batches_depend_on_seed_and_step_alone():
    text = open_text(None, 16)
    first = text.batch(3, 7, 4)
    chex.assert_trees_all_equal(first, open_text(None, 16).batch(3, 7, 4))
    assert not np.array_equal(first["tokens"], text.batch(3, 8, 4)["tokens"])
    assert not np.array_equal(first["tokens"], text.batch(4, 7, 4)["tokens"])
    np.testing.assert_array_equal(first["tokens"][:, 1:], first["targets"][:, :-1])
    assert first["tokens"].dtype == np.int32


def test_held_out_text_is_never_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes([65] * 900 + [66] * 100))
    text = open_text(path, 8)
    for step in range(50):
        assert (text.batch(0, step, 8)["targets"] == 65).all()
    for batch in text.held_out(3):
        assert batch["tokens"].shape == (3, 8)
        assert (batch["tokens"] == 66).all()


@pytest.mark.parametrize("image_size", [8, 32, 36])
def test_digits_fill_images_of_any_size(image_size):
    digits = Digits(
        images=np.arange(20 * 64, dtype=np.float32).reshape(20, 8, 8),
        labels=np.arange(20, dtype=np.int32),
        image_size=image_size,
        n_channels=3,
        fingerprint="",
    )
    batch = digits.batch(0, 0, 5)
    assert batch["images"].shape == (5, image_size, image_size, 3)
    assert (batch["labels"] < 16).all()
    corners = batch["images"][:, [0, -1], [0, -1], 0]
    wanted = 64 * batch["labels"][:, None] + [0, 63]
    np.testing.assert_array_equal(corners, wanted)
    judged = np.concatenate([each["labels"] for each in digits.held_out(2)])
    np.testing.assert_array_equal(judged, [16, 17, 18, 19])
