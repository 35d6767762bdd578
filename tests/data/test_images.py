"""Every odd kind of image file opens, and every bad one is named."""

from __future__ import annotations

import io
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from sigcam.core.errors import DataError
from sigcam.data.images import images_from_paths, open_image, read_image_size
from support.data_files import (
    put,
    says,
)

SIZE = (6, 4)


def first_pixel(path: Path) -> tuple[int, int, int]:
    image = open_image(path)
    assert image.mode == "RGB"
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0]), int(pixel[1]), int(pixel[2])


@pytest.mark.parametrize("extension", ["jpg", "png", "bmp", "webp", "gif", "tif"])
def test_every_common_kind_opens(tmp_path: Path, extension: str) -> None:
    path = put(tmp_path / f"x.{extension}", SIZE)
    assert open_image(path).size == SIZE
    assert np.abs(np.array(first_pixel(path)) - (255, 0, 0)).max() < 4


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 100, (100, 100, 100)),
        ("P", 0, (0, 0, 0)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ],
)
def test_odd_colour_modes_become_rgb(
    tmp_path: Path, mode: str, colour: int | tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    path = tmp_path / "x.tif"
    Image.new(mode, SIZE, colour).save(path)
    assert first_pixel(path) == expected


def test_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(path, quality=95)
    assert np.abs(np.array(first_pixel(path)) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("value", [0, 257, 32896, 65535])
def test_16_bit_grey_is_scaled_by_its_full_range(tmp_path: Path, value: int) -> None:
    for extension in ("png", "tif"):
        path = tmp_path / f"x.{extension}"
        Image.fromarray(np.full((4, 6), value, dtype=np.uint16)).save(path)
        assert first_pixel(path) == (value // 257,) * 3


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (np.int32, (0, 200), (0, 200)),
        (np.int32, (0, 25700), (0, 100)),
        (np.int32, (-1000, 1000), (0, 255)),
        (np.int32, (70000, 70001), (0, 255)),
        (np.float32, (0.0, 0.5), (0, 128)),
        (np.float32, (0.0, 200.0), (0, 200)),
        (np.float32, (-2.0, 2.0), (0, 255)),
        (np.float32, (-3.0, -3.0), (0, 0)),
        (np.float32, (float("nan"), 1.0), (0, 255)),
        (np.float32, (0.25, 1.01), (63, 255)),  # a little too large, as resampling leaves it: not black
        (np.float32, (1.0, 4.0), (64, 255)),
        (np.float32, (30.0, 300.0), (26, 255)),
        (np.float32, (0.0, 25700.0), (0, 100)),
        (np.float32, (0.0, 0.004), (0, 1)),  # a dark one stays dark
        (np.int32, (0, 2), (0, 2)),
        (np.int32, (0, 1023), (0, 255)),
    ],
)
def test_deep_grey_without_a_range_is_not_clipped(
    tmp_path: Path, dtype: type, values: tuple[float, float], expected: tuple[int, int]
) -> None:
    path = tmp_path / "x.tif"
    Image.fromarray(np.array([values], dtype=dtype)).save(path)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == list(expected)


@pytest.mark.parametrize("infinite", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_leave_the_others_visible(tmp_path: Path, infinite: float) -> None:
    path = tmp_path / "x.tif"
    Image.fromarray(np.array([[0, 0.5, 1, infinite]], np.float32)).save(path)
    assert np.asarray(open_image(path))[0, :3, 0].tolist() == [0, 128, 255]
    assert np.asarray(open_image(path))[0, 3, 0] == (255 if infinite > 0 else 0)
    Image.fromarray(np.full((2, 2), infinite, np.float32)).save(path)
    assert len(np.unique(np.asarray(open_image(path)))) == 1


def put_tiff(
    path: Path, rows: bytes, width: int, bits: int, *, sample_format: int = 1, white: int = 1
) -> Path:
    """Write one row of grey samples; Pillow cannot write some kinds that it reads."""
    tags = ((256, width), (257, 1), (258, bits), (259, 1), (262, white), (273, 134), (277, 1), (278, 1))
    tags = (*tags, (279, len(rows)), (339, sample_format))
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag == 273 else 3, 1, value) for tag, value in tags)
    path.write_bytes(struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + rows)
    return path


def test_12_bits_are_scaled_by_their_full_range(tmp_path: Path) -> None:
    path = put_tiff(tmp_path / "x.tif", bytes((0x00, 0x08, 0x00, 0xFF, 0xFF, 0xFF)), 4, 12)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 128, 255, 255]


def test_unsigned_numbers_of_32_bits_are_not_taken_for_signed_ones(tmp_path: Path) -> None:
    values = np.array([0, 2**30, 2**31, 2**32 - 1], np.uint32)
    path = put_tiff(tmp_path / "x.tif", values.tobytes(), 4, 32)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 64, 128, 255]
    path = put_tiff(tmp_path / "x.tif", values.view(np.int32)[[0, 1]].tobytes(), 2, 32, sample_format=2)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize(("kind", "format"), [(np.uint8, 1), (np.uint16, 1), (np.float32, 3)])
def test_what_is_stored_as_a_negative_is_shown_as_a_positive(tmp_path: Path, kind: type, format: int) -> None:
    top = 1 if format == 3 else np.iinfo(kind).max
    values = np.array([0, top], kind)
    path = put_tiff(
        tmp_path / "x.tif", values.tobytes(), 2, 8 * values.itemsize, sample_format=format, white=0
    )
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize("extension", ["tif", "png", "jpg", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_in_the_header_is_the_size_that_opens(
    tmp_path: Path, extension: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{extension}"
    Image.new("RGB", (6, 4), "blue").save(path, exif=exif)
    assert read_image_size(path) == open_image(path).size == ((4, 6) if orientation > 4 else (6, 4))
    assert read_image_size(path, upright=False) == open_image(path, upright=False).size


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_turned_as_pillow_does(tmp_path: Path, orientation: int) -> None:
    exif, path = Image.Exif(), tmp_path / "x.png"
    exif[0x0112] = orientation
    Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3)).save(path, exif=exif)
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image)
    assert np.array_equal(np.asarray(open_image(path)), np.asarray(expected))


def test_a_large_deep_image_takes_little_more_than_its_pixels(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    Image.new("F", (3000, 3000), 0.5).save(path)
    tracemalloc.start()
    open_image(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * 9_000_000  # 4 bytes a pixel, twice while they are copied, and a few; 40 in float64


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "x.png"
    Image.new(mode, SIZE, (0,) * len(mode)).save(path)
    assert first_pixel(path) == (255, 255, 255)


@pytest.mark.parametrize("extension", ["png", "gif"])
def test_transparent_palette_is_laid_on_white(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"x.{extension}"
    image = Image.new("P", SIZE, 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((1, 0), 0)
    image.save(path, transparency=1)
    assert first_pixel(path) == (255, 255, 255)


def test_animation_gives_its_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "x.gif"
    Image.new("RGB", SIZE, "red").save(path, save_all=True, append_images=[Image.new("RGB", SIZE, "blue")])
    assert first_pixel(path) == (255, 0, 0)


def test_one_pixel_is_a_picture(tmp_path: Path) -> None:
    assert open_image(put(tmp_path / "x.png", size=(1, 1))).size == (1, 1)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    image = Image.new("RGB", (6, 4), "blue")
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn 90 degrees clockwise to stand upright
    image.save(path, exif=exif)
    upright = open_image(path)
    assert upright.size == (4, 6)
    assert upright.getpixel((3, 0)) == (255, 0, 0)


def test_broken_exif_does_not_hide_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("RGB", SIZE, "red").save(path, exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff broken")
    assert open_image(path).size == read_image_size(path) == SIZE


def test_missing_empty_foreign_and_folder_are_named(tmp_path: Path) -> None:
    missing, empty, text = tmp_path / "no.png", tmp_path / "empty.png", tmp_path / "text.png"
    empty.touch()
    text.write_text("not a picture")
    says(f"cannot read {missing}: No such file or directory.", partial(open_image, missing))
    says(f"cannot read {empty}: it is empty.", partial(open_image, empty))
    says(
        f"cannot read {text}: it is not an image that Pillow can read.",
        partial(open_image, text),
    )
    says(f"cannot read {tmp_path}: it is a folder, not an image.", partial(open_image, tmp_path))


@pytest.mark.parametrize("extension", ["jpg", "png", "bmp", "webp", "gif", "tif"])
def test_truncated_files_are_named(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"x.{extension}"
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format={"jpg": "JPEG", "tif": "TIFF"}.get(extension, extension))
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(DataError, match=f"cannot read {path}: "):
        open_image(path)


def test_forbidden_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = put(tmp_path / "x.png", SIZE)
    monkeypatch.setattr(Image, "open", refuse)
    says(f"cannot read {path}: Permission denied.", partial(open_image, path))


@pytest.mark.parametrize(
    "limit", [20, 10]
)  # 24 pixels: Pillow warns above the limit, raises above twice the limit
def test_pictures_over_pillows_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    path = put(tmp_path / "x.png", SIZE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    says(
        f"cannot read {path}: it has more than {limit} pixels; make it smaller first.",
        partial(open_image, path),
    )


def test_pictures_are_unlabelled_with_ids_that_stay_below_one_folder(tmp_path: Path) -> None:
    for name in ("in/b.png", "in/a.png", "in/deep/c.png", "z.odd"):
        put(tmp_path / name, SIZE) if not name.endswith("odd") else put(tmp_path / "t.png", SIZE).rename(
            tmp_path / name
        )
    samples = images_from_paths([tmp_path / "z.odd", tmp_path / "in", tmp_path / "in" / "a.png"])
    assert [s.id for s in samples] == ["z.odd", "in/a.png", "in/b.png", "in/deep/c.png"]
    assert samples.classes == ()
    assert all(s.label is None and s.open().size == SIZE for s in samples)
    assert [s.id for s in images_from_paths([tmp_path / "in" / "a.png"])] == ["a.png"]


def test_pictures_name_what_is_wrong(tmp_path: Path) -> None:
    missing = tmp_path / "no.png"
    says(
        f"{missing} does not exist: give image files or folders of them.",
        partial(images_from_paths, [missing]),
    )
    says(
        f"{tmp_path} holds no images: looked for bmp gif jpeg jpg png tif tiff webp.",
        partial(images_from_paths, [tmp_path]),
    )
    says("no images given: name at least one file or folder.", partial(images_from_paths, []))
