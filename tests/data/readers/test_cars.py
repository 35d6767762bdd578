"""Stanford Cars: the published MATLAB files are read, mistakes in them are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from sigcam.data.registry import guess_format, open_dataset
from support.data_files import (
    check_paths,
    put,
    refuses,
)


def put_cars(root: Path, *, changed: dict[str, object] | None = None, labels: bool = True) -> Path:
    io = pytest.importorskip("scipy.io", reason="scipy writes the MATLAB files of this test")
    names = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    fields = [(name, object) for name in names if labels or name != "class"]
    for split, file in (
        ("train", "devkit/cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat" if labels else "devkit/cars_test_annos.mat"),
    ):
        count = 2 if split == "train" else 1
        rows = np.zeros((1, count), dtype=fields)
        for i in range(count):
            row = {"bbox_x1": 1, "bbox_y1": 3, "bbox_x2": 40, "bbox_y2": 30, "class": i + 1}
            row |= {"fname": f"0000{i + 1}.jpg"} | (changed or {})
            for name, _ in fields:
                rows[0, i][name] = row[name]
            put(root / f"cars_{split}" / f"0000{i + 1}.jpg")
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        io.savemat(root / file, {"annotations": rows})
    classes = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    io.savemat(root / "devkit" / "cars_meta.mat", {"class_names": classes})
    return root


def test_cars_are_read_from_the_devkit_and_their_boxes_counted_from_0(tmp_path: Path) -> None:
    put_cars(tmp_path)
    assert guess_format(tmp_path) == "cars"
    train, test = (open_dataset(tmp_path, split=split) for split in ("train", "test"))
    assert [sample.label for sample in train] == [0, 1] and len(test) == 1
    assert train.classes == ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    assert train[0].boxes == ((0, 2, 39, 29),)  # of a picture of 40 x 30: the last pixel is inside it
    check_paths(train)
    check_paths(test)


def test_cars_of_the_test_split_have_no_label_where_the_file_has_none(tmp_path: Path) -> None:
    put_cars(tmp_path, labels=False)
    (sample,) = open_dataset(tmp_path, split="test")
    assert sample.label is None and sample.boxes == ((0, 2, 39, 29),)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bbox_x1": 0}, ["cars_train_annos.mat annotation 1", "00001.jpg", "pixel 1"]),
        ({"bbox_x2": 0}, ["cars_train_annos.mat annotation 1", "inverted"]),
        ({"class": 3}, ["cars_train_annos.mat annotation 1", "class 3 of 2"]),
        ({"fname": "gone.jpg"}, ["cars_train_annos.mat annotation 1", "gone.jpg", "cars_train"]),
        ({"fname": "00001.jpg"}, ["cars_train_annos.mat annotation 2", "00001.jpg", "annotation 1 already"]),
        ({"bbox_x2": 41}, ["annotation 1", "00001.jpg", "(1, 3, 41, 30)", "40 x 30"]),
        ({"bbox_y2": 31}, ["annotation 1", "00001.jpg", "(1, 3, 40, 31)", "40 x 30"]),
        ({"bbox_x1": np.zeros((0, 0))}, ["annotation 1", "00001.jpg", "'[]' as bbox_x1"]),
        ({"bbox_y1": float("nan")}, ["annotation 1", "00001.jpg", "'nan' as bbox_y1"]),
        ({"bbox_y2": float("inf")}, ["annotation 1", "00001.jpg", "'inf' as bbox_y2"]),
        ({"bbox_x2": "wide"}, ["annotation 1", "00001.jpg", "'wide' as bbox_x2"]),
        ({"class": np.zeros((0, 0))}, ["annotation 1", "00001.jpg", "'[]' as class"]),
        ({"class": float("nan")}, ["annotation 1", "00001.jpg", "'nan' as class"]),
    ],
)
def test_a_mistake_in_the_cars_files_is_named(
    tmp_path: Path, changed: dict[str, object], words: list[str]
) -> None:
    put_cars(tmp_path, changed=changed)
    refuses(lambda: open_dataset(tmp_path, split="train"), *words)


def test_annotations_of_cars_without_a_field_are_refused(tmp_path: Path) -> None:
    put_cars(tmp_path)
    io = pytest.importorskip("scipy.io")
    io.savemat(tmp_path / "devkit" / "cars_train_annos.mat", {"annotations": np.array(["a", "b"], object)})
    refuses(lambda: open_dataset(tmp_path, split="train"), "cars_train_annos.mat", "bbox_x1", "devkit")


def test_a_damaged_matlab_file_is_named(tmp_path: Path) -> None:
    put_cars(tmp_path)
    (tmp_path / "devkit" / "cars_train_annos.mat").write_bytes(b"nothing")
    refuses(lambda: open_dataset(tmp_path, split="train"), "cars_train_annos.mat")


def test_cars_are_read_without_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_cars(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert len(open_dataset(tmp_path, split="train")) == 2


@pytest.mark.parametrize("name", ["../../x.jpg", "/x.jpg", "a\nb.jpg", 7, np.zeros((0, 0)), "n" * 300])
def test_what_names_no_image_of_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    put_cars(tmp_path, changed={"fname": name})
    refuses(lambda: open_dataset(tmp_path, split="train"), "cars_train_annos.mat annotation 1")
