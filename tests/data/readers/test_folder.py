"""Class folders, splits and boxes.csv are read, mistakes in them are named."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from sigcam.data.readers.folder import folder
from sigcam.data.registry import guess_format, open_dataset
from support.data_files import (
    check_paths,
    make_class_folders,
    put,
    refuses,
    says,
    write,
)

SIZE = (40, 30)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return make_class_folders(tmp_path / "data")


def test_folder_labels_by_sorted_folder_name(tmp_path: Path) -> None:
    for name in (
        "dog/b.JPG",
        "dog/deep/a.png",
        "cat/1.jpeg",
        "cat/.hidden.png",
        ".git/x.png",
        "cat/notes.txt",
    ):
        put(tmp_path / name) if not name.endswith("txt") else (tmp_path / name).write_text("x")
    samples = folder(tmp_path)
    assert samples.classes == ("cat", "dog")
    assert [(s.id, s.label) for s in samples] == [("cat/1.jpeg", 0), ("dog/b.JPG", 1), ("dog/deep/a.png", 1)]
    assert samples[0].open().size == SIZE


def test_folder_with_splits_picks_one_with_the_classes_of_train(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "val/b/3.png"):
        put(tmp_path / name)
    assert [s.id for s in folder(tmp_path)] == ["train/a/1.png", "train/b/2.png"]
    for split in ("val", "test"):  # there is no test/: val/ stands in
        samples = folder(tmp_path, split=split)
        assert [(s.id, s.label) for s in samples] == [("val/b/3.png", 1)]
        assert samples.classes == ("a", "b")
    says(f"{tmp_path} has no split 'dev': it has train, val.", partial(folder, tmp_path, split="dev"))


def test_classes_named_train_and_bus_are_no_splits(tmp_path: Path) -> None:
    put(tmp_path / "train" / "1.png")
    put(tmp_path / "bus" / "2.png")
    assert folder(tmp_path).classes == ("bus", "train")


def test_folder_names_what_is_wrong(tmp_path: Path) -> None:
    says(
        f"{tmp_path / 'no'} does not exist: give a folder with one folder per class.",
        partial(folder, tmp_path / "no"),
    )
    says(
        f"{tmp_path} is not a labelled set: it holds no class folders and no images. "
        f"Put them in {tmp_path}/<class>/<file>.",
        partial(folder, tmp_path),
    )
    picture = put(tmp_path / "x.png")
    says(
        f"{tmp_path} is not a labelled set: it holds images but no class folders. "
        f"Put them in {tmp_path}/<class>/<file>.",
        partial(folder, tmp_path),
    )
    says(f"cannot list {picture}: Not a directory. Give a folder of class folders.", partial(folder, picture))


def test_class_folder_without_pictures_is_named(tmp_path: Path) -> None:
    put(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    says(f"class folder {tmp_path / 'dog'} holds no images: fill it or remove it.", partial(folder, tmp_path))


def test_class_unknown_to_train_is_named(tmp_path: Path) -> None:
    put(tmp_path / "train" / "cat" / "1.png")
    put(tmp_path / "test" / "cow" / "1.png")
    says(
        f"{tmp_path / 'test' / 'cow'} is not a class of {tmp_path / 'train'}: add it there or remove it.",
        partial(folder, tmp_path, split="test"),
    )


@pytest.mark.parametrize("header", ["", "image,x0,y0,x1,y1,label\n"])
def test_boxes_csv_gives_pictures_several_boxes_or_none(folders: Path, header: str) -> None:
    text = '\ufeff{}cat/1.png,1,2,10,20\n\n"cat/2 b.png",0,0,40,30,cat\ncat/1.png,5,5,5,5,cat'
    write(folders / "boxes.csv", text.format(header))
    assert guess_format(folders) == "folder"
    samples = open_dataset(folders)
    assert [sample.boxes for sample in samples] == [((1, 2, 10, 20), (5, 5, 5, 5)), ((0, 0, 40, 30),), None]
    check_paths(samples)


def test_boxes_of_another_class_than_the_pictures_are_left_out(folders: Path) -> None:
    write(folders / "boxes.csv", "cat/1.png,1,2,10,20,cat\ncat/1.png,0,0,5,5,dog\n")
    assert open_dataset(folders)[0].boxes == ((1, 2, 10, 20),)


def test_boxes_csv_may_be_beside_the_classes_of_a_split_or_beside_the_splits(folders: Path) -> None:
    root = folders.parent
    put(root / "set/train/cat/1.png")
    put(root / "set/test/cat/2.png")
    write(root / "set/boxes.csv", "train/cat/1.png,1,1,2,2\ntest/cat/2.png,3,3,4,4\n")
    assert open_dataset(root / "set", split="train")[0].boxes == ((1, 1, 2, 2),)
    assert open_dataset(root / "set", split="test")[0].boxes == ((3, 3, 4, 4),)
    write(root / "set/test/boxes.csv", "cat/2.png,5,5,6,6\n")
    assert open_dataset(root / "set", split="test")[0].boxes == ((5, 5, 6, 6),)


def test_boxes_csv_is_in_pixels_of_the_upright_picture(folders: Path) -> None:
    turned = Image.new("RGB", (40, 30))
    turned.getexif()[0x0112] = 6
    turned.save(folders / "cat" / "1.png", exif=turned.getexif())
    write(folders / "boxes.csv", "cat/1.png,0,0,29,39\n")
    (sample, *_) = open_dataset(folders)
    assert sample.open().size == (30, 40) and sample.boxes == ((0, 0, 29, 39),)
    write(folders / "boxes.csv", "cat/1.png,0,0,39,29\n")
    refuses(lambda: open_dataset(folders), "boxes.csv line 1", "30 x 40")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cat/1.png,1,2,10", ["boxes.csv line 1", "image,x0,y0,x1,y1"]),
        ("cat/1.png,1,2,10,20\n\ncat/9.png,1,2,3,4", ["boxes.csv line 3", "cat/9.png", "is not in"]),
        ("../data/cat/1.png,1,2,3,4", ["boxes.csv line 1", "is not in"]),
        ("cat/1.png,1,2,41,20", ["boxes.csv line 1", "beyond", "40 x 30"]),
        ("cat/1.png,10,2,1,20", ["boxes.csv line 1", "inverted"]),
        ("cat/1.png,-1,2,1,20", ["boxes.csv line 1", "'-1'"]),
        ("cat/1.png,1.5,2,1,20", ["boxes.csv line 1", "'1.5'"]),
        ("cat/1.png,1,2,10,20,bird", ["boxes.csv line 1", "'bird'"]),
        (f"cat/1.png,1,2,10,20\n{'a' * 200_000},1,2,10,20", ["boxes.csv line 2", "field limit", "quote"]),
        (f"cat/1.png,1,2,{'1' * 5000},20", ["boxes.csv line 1", "cat/1.png", "'111", "...", "whole"]),
    ],
)
def test_a_mistake_in_boxes_csv_is_named_by_line(folders: Path, text: str, words: list[str]) -> None:
    write(folders / "boxes.csv", text)
    refuses(lambda: open_dataset(folders), *words)
