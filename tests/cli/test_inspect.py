"""`sigcam inspect` counts splits and annotations, and names damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sigcam.data.registry import open_dataset
from sigcam.reports.inspection import open_splits, unreadable
from support.commands import run
from support.data_files import (
    make_class_folders,
    make_cub,
    put,
    refuses,
    write,
)


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    return make_cub(tmp_path / "CUB_200_2011")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return make_class_folders(tmp_path / "data")


def test_inspect_counts_splits_classes_annotations_and_damaged_files(
    cub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(cub / "images/002.Laysan/c.jpg", "not a picture")
    write(cub / "segmentations/001.Black/a_46.png", "not a mask")
    sheet = tmp_path / "out" / "contact-sheet.png"
    assert run(monkeypatch, "inspect", "--data", cub, "--output", sheet.parent, "--json") == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)["data"]
    assert (facts["format"], facts["images"], facts["classes"]) == ("cub", 3, 2)
    train, test = facts["splits"]
    assert (train["split"], train["images"], train["images per class"]) == ("train", 2, "1 to 1")
    assert (train["boxes"], train["with masks"], train["damaged"]) == (2, 0, 1)
    assert (test["split"], test["images per class"], test["damaged"]) == ("test", "0 to 1", 1)
    assert facts["damaged files"] == 2 and facts["damaged"][0]["image"] == "002.Laysan/c.jpg"
    assert "a_46.png" in facts["damaged"][1]["reason"]
    assert "train: 2 of 2" in captured.err
    assert sheet.read_bytes().startswith(b"\x89PNG") and facts["contact sheet"] == str(sheet)
    manifest = json.loads((sheet.parent / "manifest.json").read_text())
    assert manifest["numbers"]["images"] == 3 and set(manifest["data_fingerprint"]) == {"train", "test"}
    assert run(monkeypatch, "inspect", "--data", cub, "--split", "test") == 0
    printed = capsys.readouterr().out
    assert "damaged" in printed and "a_46" in printed and "Laysan" not in printed


def test_inspect_names_a_few_damaged_files_and_counts_all(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(9):
        write(folders / "cat" / f"bad{number}.png", "")
    assert run(monkeypatch, "inspect", "--data", folders, "--json") == 0
    facts = json.loads(capsys.readouterr().out)["data"]
    assert facts["damaged files"] == 9 and len(facts["damaged"]) == 5


def test_inspect_refuses_what_it_cannot_do_in_one_line(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folders.parent / "file", "in the way")
    for words, said in (
        (("--data", folders, "--output", folders.parent / "file"), "--output"),
        (("--output", folders.parent / "out"), "--data"),
        (("--data", "shapes", "--split", "extra"), "no split 'extra'"),
        (("--data", folders.parent / "gone"), "does not exist"),
    ):
        assert run(monkeypatch, "inspect", *words) == 2
        error = capsys.readouterr().err.strip()
        assert said in error and len(error.splitlines()) == 1, error
    assert not (folders.parent / "out").exists()


def test_a_split_that_several_names_open_is_counted_once(folders: Path) -> None:
    assert list(open_splits(str(folders), "folder")) == ["train, val, test"]
    put(folders.parent / "set/train/cat/1.png")
    put(folders.parent / "set/val/cat/2.png")
    assert list(open_splits(str(folders.parent / "set"), "folder")) == ["train", "val, test"]
    assert list(open_splits("shapes:8", "shapes")) == ["train", "val", "test"]


def test_a_mistake_in_one_split_is_not_taken_for_a_missing_split(cub: Path) -> None:
    write(cub / "bounding_boxes.txt", "1 x 1 1 1\n2 1 1 1 1\n3 1 1 1 1")
    refuses(lambda: open_splits(str(cub), "cub"), "bounding_boxes.txt line 1")


def test_pictures_that_are_not_files_are_not_decoded_to_look_for_damage() -> None:
    assert unreadable(open_dataset("shapes:4")) == []
