"""Masks of several files and sizes are combined and resized as the protocol says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.data.images import open_masks, resize_mask
from support.data_files import (
    put,
)


def test_masks_of_several_sizes_meet_at_the_protocols_size(tmp_path: Path) -> None:
    paths = [put(tmp_path / "small.png", (1, 1), 0), put(tmp_path / "large.png", (448, 100), 1)]
    assert np.array_equal(open_masks(paths, []), np.ones((224, 224)))


def test_nearest_is_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width, to = *rng.integers(1, 300, 2), int(rng.integers(1, 300))
        mask = rng.integers(0, 256, (height, width), dtype=np.uint8)
        theirs = cv2.resize(mask, (to, 224), interpolation=cv2.INTER_NEAREST)
        assert np.array_equal(resize_mask(mask, (224, to)), theirs)


@pytest.mark.parametrize("kind", ["1", "L", "P", "RGB", "RGBA", "I;16"])
def test_whatever_is_not_black_is_object(tmp_path: Path, kind: str) -> None:
    pixels = np.array([[0, 1], [255, 0]], np.uint16)
    image = Image.fromarray(pixels if kind == "I;16" else pixels.astype(np.uint8))
    (image if kind == "I;16" else image.point([0] + [255] * 255).convert(kind)).save(tmp_path / "m.png")
    assert open_masks([tmp_path / "m.png"], []).tolist() == [[0, 1], [1, 0]]
