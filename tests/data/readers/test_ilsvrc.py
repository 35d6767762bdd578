"""ImageNet: synset folders, flat folders and XML files are read, mistakes in them are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sigcam.data.readers.ilsvrc import read_box_file
from sigcam.data.registry import guess_format, open_dataset
from support.data_files import (
    GOLDFISH,
    SHARK,
    TENCH,
    box_xml,
    check_paths,
    put,
    refuses,
    write,
)


@pytest.fixture(params=["plain", "kaggle"])
def ilsvrc(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folders of synsets to train on, a flat val folder, boxes for some."""
    kaggle = request.param == "kaggle"
    pictures = tmp_path / ("ILSVRC/Data/CLS-LOC" if kaggle else "")
    boxes = tmp_path / ("ILSVRC/Annotations/CLS-LOC" if kaggle else "Annotations")
    for synset in (SHARK, TENCH, GOLDFISH):
        put(pictures / "train" / synset / f"{synset}_1.JPEG")
    for number, synset in ((1, SHARK), (2, TENCH)):
        put(pictures / "val" / f"ILSVRC2012_val_0000000{number}.JPEG")
        text = box_xml((synset, 1, 2, 10, 20), (synset, 0, 0, 39, 29))
        write(boxes / "val" / f"ILSVRC2012_val_0000000{number}.xml", text)
    write(boxes / "train" / TENCH / f"{TENCH}_1.xml", box_xml((TENCH, 2, 2, 80, 60), size=(80, 60)))
    return tmp_path


def test_ilsvrc_classes_are_in_the_order_of_their_synset_ids(ilsvrc: Path) -> None:
    assert guess_format(ilsvrc) == "ilsvrc"
    train, val = (open_dataset(ilsvrc, split=split) for split in ("train", "val"))
    assert train.classes == val.classes == (TENCH, GOLDFISH, SHARK)
    assert [sample.label for sample in train] == [0, 1, 2]
    assert [sample.label for sample in val] == [2, 0]  # a flat folder: the XML files name the classes
    assert val[0].id == "val/ILSVRC2012_val_00000001.JPEG"
    check_paths(train)
    check_paths(val)


def test_ilsvrc_boxes_come_with_the_size_they_refer_to(ilsvrc: Path) -> None:
    train, test = (open_dataset(ilsvrc, split=split) for split in ("train", "test"))
    assert train[0].size == (80, 60) and train[0].boxes == ((2, 2, 79, 59),)  # cut to the picture
    assert train[1].boxes is None and train[1].size is None
    assert test[0].boxes == ((1, 2, 10, 20), (0, 0, 39, 29))  # the test split is ImageNet's val


def test_ilsvrc_boxes_of_other_classes_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG")
    write(tmp_path / "Annotations/val/a.xml", box_xml((SHARK, 1, 1, 5, 5), (TENCH, 9, 9, 3, 4)))
    (sample,) = open_dataset(tmp_path, split="val")
    assert sample.boxes == ((3, 4, 9, 9),)  # corners in order


def test_bad_xml_files_are_named(tmp_path: Path) -> None:
    for text in ("<annotation>", box_xml((TENCH, 1, 1, 5, 5)).replace("<xmin>1<", "<xmin>one<")):
        refuses(lambda text=text: read_box_file(write(tmp_path / "a.xml", text)), "a.xml")
    refuses(
        lambda: read_box_file(write(tmp_path / "a.xml", box_xml((TENCH, 50, 1, 60, 5)))), "a.xml", "outside"
    )
    text = box_xml((TENCH, 1, 1, 5, 5))
    for wrong in (text.replace("<xmax>5<", "<xmax>inf<"), f'<?xml version="1.0" encoding="klingon"?>{text}'):
        refuses(lambda wrong=wrong: read_box_file(write(tmp_path / "a.xml", wrong)), "cannot read", "a.xml")


def test_a_box_is_held_to_the_picture_where_the_xml_file_has_no_size(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG")
    file = write(tmp_path / "Annotations/val/a.xml", box_xml((TENCH, 1, 1, 39, 29), size=(0, 0)))
    assert open_dataset(tmp_path, split="val")[0].boxes == ((1, 1, 39, 29),)
    write(file, box_xml((TENCH, 1, 1, 41, 29), size=(0, 0)))
    refuses(lambda: open_dataset(tmp_path, split="val"), "a.xml", "(1, 1, 41, 29)", "40 x 30")


def test_a_flat_picture_whose_class_is_not_known_is_named(ilsvrc: Path) -> None:
    file = next(ilsvrc.rglob("ILSVRC2012_val_00000002.xml"))
    write(file, box_xml((TENCH, 1, 1, 2, 2), (SHARK, 1, 1, 2, 2)))
    refuses(lambda: open_dataset(ilsvrc, split="val"), "ILSVRC2012_val_00000002.JPEG", "2 classes")
    file.unlink()
    refuses(lambda: open_dataset(ilsvrc, split="val"), "ILSVRC2012_val_00000002.JPEG", "Annotations")


def test_folders_that_are_no_synsets_or_not_in_train_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "train" / TENCH / "a.JPEG")
    put(tmp_path / "val" / SHARK / "b.JPEG")
    refuses(lambda: open_dataset(tmp_path, split="val"), SHARK, "train")
    put(tmp_path / "train" / "tench" / "c.JPEG")
    refuses(lambda: open_dataset(tmp_path, split="train"), "tench", "synset")
