"""A contact sheet shows boxes and outlines where the annotations are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sigcam.data.registry import open_dataset
from sigcam.drawing.contact_sheet import annotated, contact_sheet
from support.data_files import (
    TENCH,
    box_xml,
    make_class_folders,
    put,
    put_mask,
    refuses,
    write,
)

RED, YELLOW = (229, 57, 53), (255, 235, 59)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return make_class_folders(tmp_path / "data")


def test_a_contact_sheet_is_the_same_for_a_seed_and_skips_what_cannot_be_read(folders: Path) -> None:
    write(folders / "cat" / "bad.png", "")
    samples = open_dataset(folders)
    pages = [np.asarray(contact_sheet(samples, seed=seed, cell=64)) for seed in (1, 1)]
    assert np.array_equal(*pages)
    assert contact_sheet(samples, count=2, cell=64).width < contact_sheet(samples, cell=64).width
    for file in folders.rglob("*.png"):
        write(file, "")
    refuses(lambda: contact_sheet(samples), "none of the 4 pictures")


def test_boxes_and_outlines_lie_where_the_annotations_say(tmp_path: Path) -> None:
    put(tmp_path / "images/a_1.jpg", (100, 50))  # half as high as wide: 50 rows of ground above and below
    pixels = np.full((50, 100), 2)
    pixels[10:40, 60:90] = 1
    put_mask(tmp_path / "annotations/trimaps/a_1.png", pixels.tolist())
    write(tmp_path / "annotations/trainval.txt", "a_1 1 1 1")
    (pet,) = open_dataset(tmp_path)
    drawn = np.asarray(annotated(pet, 200))
    rows, columns = np.where((drawn == YELLOW).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (70, 129, 120, 179)
    put(tmp_path / "cat/1.png", (100, 50))
    write(tmp_path / "boxes.csv", "cat/1.png,10,5,49,24")
    cat = next(s for s in open_dataset(tmp_path, format="folder") if s.boxes)
    rows, columns = np.where((np.asarray(annotated(cat, 200)) == RED).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (60, 99, 20, 99)


def test_boxes_are_drawn_in_pixels_of_the_original_of_a_squashed_copy(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG", (50, 50))
    write(tmp_path / "Annotations/val/a.xml", box_xml((TENCH, 0, 0, 99, 49), size=(100, 50)))
    (sample,) = open_dataset(tmp_path, split="val")
    rows, columns = np.where((np.asarray(annotated(sample, 200)) == RED).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (50, 149, 0, 199)


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["cub", "cars", "pets", "ilsvrc"])
def test_a_contact_sheet_of_photographs_can_be_drawn(real_data: Path, name: str) -> None:
    sheet = contact_sheet(open_dataset(real_data / name, split="test"))
    assert sheet.width > 1000 and sheet.height > 900
