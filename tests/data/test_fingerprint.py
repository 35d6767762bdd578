"""Fingerprints of data are those of earlier versions, so that stored results and manifests still match."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import open_masks
from sigcam.data.readers.shapes import shapes
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Sample, Samples, data_fingerprint, files_fingerprint
from support.data_files import make_cub, put, put_mask, write


def test_a_named_size_has_the_fingerprint_of_a_plain_one() -> None:
    known: Any = {"id": "a", "open": Image.new, "label": 1, "boxes": ((1, 2, 3, 4),)}
    sizes: list[Any] = [(64, 32), ImageSize(64, 32)]
    prints = {data_fingerprint(Samples((Sample(**known, size=size),), ("x", "y"))) for size in sizes}
    expected = hashlib.blake2b(b'["x", "y"]a\x001 ((1, 2, 3, 4),) (64, 32)\n', digest_size=16).hexdigest()
    assert prints == {expected}


def of_mask(open_mask: Callable[[], Any]) -> str:
    """The fingerprint of one image with this mask."""
    item = Sample("a", Image.new, open_mask=open_mask, path=Path("a.png"))  # type: ignore[arg-type]
    return files_fingerprint(Samples((item,), ("x",)))


@pytest.mark.parametrize("wrap", ["partial", "lambda", "keywords", "method"])
def test_a_changed_mask_is_noticed_however_its_opener_is_made(tmp_path: Path, wrap: str) -> None:
    file = put_mask(tmp_path / "m.png", [[0, 1]])

    class Opener:
        def open(self) -> Any:
            return open_masks([file], [])

    openers: dict[str, Callable[[], Any]] = {
        "partial": partial(open_masks, (file,), ()),
        "lambda": lambda: open_masks([file], []),
        "keywords": partial(open_masks, objects=[file], ignored=[]),
        "method": Opener().open,
    }
    before = of_mask(openers[wrap])
    assert of_mask(openers[wrap]) == before
    put_mask(file, [[1, 1]])
    assert of_mask(openers[wrap]) != before


def test_an_object_and_an_ignored_region_are_not_the_same_mask(tmp_path: Path) -> None:
    a, b = (put_mask(tmp_path / name, [[0, value]]) for name, value in (("a.png", 1), ("b.png", 200)))
    b.write_bytes(b.read_bytes() + b"x")  # of another size
    prints = {
        of_mask(partial(open_masks, objects, ignored))
        for objects, ignored in (((a,), (b,)), ((b,), (a,)), ((a, b), ()), ((a,), ()))
    }
    assert len(prints) == 4


def test_an_image_in_memory_that_was_edited_is_noticed() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)

    def fingerprint(opener: Callable[[], Image.Image]) -> str:
        return files_fingerprint(Samples((Sample("a", opener),), ("x",)))

    def draw(array: Any) -> Image.Image:
        return Image.fromarray(array)

    for opener in (lambda: draw(pixels), partial(draw, pixels)):
        pixels[:] = 0
        before = fingerprint(opener)
        assert fingerprint(opener) == before
        pixels[0, 0] = 1
        assert fingerprint(opener) != before


def test_an_image_that_becomes_readable_is_noticed() -> None:
    readable = False

    def opener() -> Image.Image:
        if not readable:
            raise DataError("not yet")
        return Image.new("RGB", (2, 2))

    samples = Samples((Sample("a", opener),), ("x",))
    before = files_fingerprint(samples)
    readable = True
    assert files_fingerprint(samples) != before


def test_drawn_shapes_are_told_apart_without_drawing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    birds = [shapes(2, seed=seed, size=size) for seed in (0, 1) for size in (32, 64)]
    monkeypatch.setattr("sigcam.data.shape_drawing._bird", None)
    assert len({files_fingerprint(samples) for samples in birds}) == 4


@pytest.mark.parametrize("name", ["cub", "wsol", "pets"])
def test_every_reader_names_the_files_of_its_masks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cub":
        make_cub(tmp_path)
        file = put_mask(tmp_path / "segmentations/001.Black/b.png", [[0, 255]])
    elif name == "wsol":
        put(tmp_path / "images/1.png")
        file = put_mask(tmp_path / "masks/1.png", [[0, 1]])
        write(tmp_path / "train/image_ids.txt", "1.png")
        write(tmp_path / "train/localization.txt", "1.png,1.png,")
    else:
        put(tmp_path / "images/Birman_1.jpg")
        file = put_mask(tmp_path / "annotations/trimaps/Birman_1.png", [[1, 2]])
        write(tmp_path / "annotations/trainval.txt", "Birman_1 1 1 1")
    samples = open_dataset(tmp_path, format=name)
    monkeypatch.setattr(Image, "open", None)  # nothing is decoded
    before = files_fingerprint(samples)
    file.write_bytes(file.read_bytes() + b"x")
    assert files_fingerprint(samples) != before
