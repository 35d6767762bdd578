"""Preprocessing inside a file gives what Pillow gives."""

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.core.errors import ConfigError
from sigcam.deployment.pillow_resize import PillowResize
from sigcam.models.preprocess import Preprocess


def pictures(width: int, height: int, count: int = 2) -> np.ndarray:
    """Smooth pictures with some noise, (B, H, W, 3) uint8."""
    rng = np.random.default_rng(width)
    coarse = rng.integers(0, 256, (count, 6, 5, 3), dtype=np.uint8)
    smooth = [np.asarray(Image.fromarray(each).resize((width, height), 3)) for each in coarse]
    noisy = np.stack(smooth).astype(int) + rng.integers(-30, 31, (count, height, width, 3))
    return noisy.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize", [None, 60, (70, 58)])
@pytest.mark.parametrize("size", [(150, 101), (33, 48), (64, 200), (56, 48)])
def test_pixels_are_those_of_pillow(size, resize, interpolation):
    preprocess = Preprocess(48, 56, interpolation=interpolation, resize=resize, bgr=resize == 60)
    given = pictures(*size)
    made = PillowResize(preprocess)(torch.from_numpy(given))
    expected = torch.stack([preprocess(Image.fromarray(each)) for each in given])
    levels = (made - expected).abs() * 255 * torch.tensor(preprocess.std)[:, None, None]
    assert made.shape == expected.shape
    assert float(levels.max()) < 1e-2


def test_other_filters_and_larger_crops_are_refused():
    with pytest.raises(ConfigError, match="lanczos"):
        PillowResize(Preprocess(interpolation="lanczos"))
    with pytest.raises(ConfigError, match="larger"):
        PillowResize(Preprocess(64, 64, resize=60))
