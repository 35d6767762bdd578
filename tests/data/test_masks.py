"""Masks of several files and sizes are combined and resized as the protocol says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.images import open_brightness, open_levels, open_masks, resize_mask
from support.data_files import put
from support.folders import png_header


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


@pytest.mark.parametrize("kind", [np.float32, np.int32])
@pytest.mark.parametrize("top", [1, 255, 100_000])
def test_deep_masks_are_not_cut_to_8_bits(tmp_path: Path, kind: type, top: int) -> None:
    path, least = tmp_path / "m.tif", 1 if kind is np.int32 else top / 1000
    pixels = np.array([[0, least], [top, 0]], kind)
    Image.fromarray(pixels).save(path)
    assert open_masks([path], []).tolist() == [[0, 1], [1, 0]]
    assert open_levels(path)[1, 0] == min(top, 255)


def test_a_float_mask_with_nan_and_a_mask_in_lab_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.array([[np.nan, 0.5, np.inf, -1]], np.float32)).save(tmp_path / "m.tif")
    assert open_masks([tmp_path / "m.tif"], []).tolist() == [[0, 1, 1, 0]]
    Image.new("LAB", (1, 1), (255, 128, 128)).save(tmp_path / "m.tif")
    assert open_masks([tmp_path / "m.tif"], []).tolist() == [[1]]


@pytest.mark.parametrize(("kind", "top"), [(np.uint8, 255), (np.uint16, 65535), (np.float32, 1)])
def test_brightness_is_that_of_the_image(tmp_path: Path, kind: type, top: int) -> None:
    Image.fromarray(np.array([[0, top]], kind)).save(tmp_path / "m.tif")
    assert open_brightness(tmp_path / "m.tif").tolist() == [[0, 255]]


def test_a_mask_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.png"
    for width in (10_000, 100_000):
        path.write_bytes(png_header(width, 10_000))
        with pytest.raises(DataError, match=r"cannot read the mask .*m.png: it has more than \d+ pixels"):
            open_masks([path], [])
