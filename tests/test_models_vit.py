"""ViT at any resolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import models
from remat.models import vit


def test_patches_are_rows_of_pixels():
    images = jnp.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    cut = vit.patches(images, 2)
    assert cut.shape == (2, 6, 12)
    # Second patch of the first row: columns 2 and 3 of rows 0 and 1.
    np.testing.assert_array_equal(cut[1, 1], images[1, :2, 2:4].reshape(-1))


def test_sides_must_divide_into_patches():
    with pytest.raises(ValueError, match=r"20 x 16 pixels do not divide into .* 8 x 8"):
        vit.patches(jnp.zeros((1, 20, 16, 3)), 8)


@pytest.mark.parametrize("n_out", [4, 7, 8, 64])
def test_cubic_weights_keep_constants(n_out):
    weights = vit.cubic_weights(4, n_out)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    if n_out == 4:
        np.testing.assert_allclose(weights, np.eye(4), atol=1e-7)


def test_interpolation_keeps_lines_inside():
    # A cubic kernel reproduces a straight line where no border is near.
    line = jnp.arange(16.0)
    doubled = vit.cubic_weights(16, 32) @ line
    wanted = (np.arange(32) + 0.5) / 2 - 0.5
    np.testing.assert_allclose(doubled[4:-4], wanted[4:-4], atol=0.07)


@pytest.mark.parametrize("shape", [(32, 32), (64, 48), (8, 8)])
def test_one_set_of_parameters_serves_every_size(shape):
    built = models.build("vit-tiny")
    images = jax.ShapeDtypeStruct((2, *shape, 3), jnp.float32)

    def logits(params, images):
        return built.model.apply({"params": params}, images)

    assert jax.eval_shape(logits, built.args[0], images).shape == (2, 10)


def test_resolution_is_an_option():
    built = models.build("vit-l16", batch=1, image_size=2048)
    assert built.args[1]["images"].shape == (1, 2048, 2048, 3)
    text = str(jax.make_jaxpr(built.loss)(*built.args))
    assert f"[1,{1 + 128 * 128},1024]" in text
    assert built.describe["n_params"] == 304326632
