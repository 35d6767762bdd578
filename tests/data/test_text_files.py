"""Lists written by other programs and other systems are read, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sigcam.data.registry import READERS
from sigcam.data.text_files import check_box, is_file, numbered_lines
from support.data_files import (
    GOLDFISH,
    TENCH,
    box_xml,
    make_class_folders,
    make_cub,
    put,
    put_mask,
    refuses,
    write,
)


def wsol(root: Path, name: str) -> None:
    put(root / "images/1.png")
    write(root / "train/image_ids.txt", name)


def wsol_mask(root: Path, name: str) -> None:
    put(root / "images/1.png")
    put_mask(root / "masks/1.png", [[0, 1]])
    write(root / "train/image_ids.txt", "1.png")
    write(root / "train/localization.txt", f"1.png,{name},")


def cub(root: Path, name: str) -> None:
    make_cub(root)
    write(root / "images.txt", f"1 001.Black/a_46.jpg\n2 {name}\n3 002.Laysan/c.jpg")


def pets(root: Path, name: str) -> None:
    (root / "images").mkdir()
    write(root / "annotations/trainval.txt", f"{name} 1 1 1")


LISTS: dict[str, Callable[[Path, str], None]] = {"wsol": wsol, "mask": wsol_mask, "cub": cub, "pets": pets}


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/../../b.png", "/etc/passwd", "..\\b.png"])
@pytest.mark.parametrize("reader", LISTS)
def test_a_list_names_no_file_outside_its_folder(tmp_path: Path, reader: str, name: str) -> None:
    LISTS[reader](tmp_path, name)
    layout = "wsol" if reader == "mask" else reader
    refuses(partial(READERS[layout], tmp_path), "line", "is not a path below the folder of images")


@pytest.mark.parametrize("reader", LISTS)
def test_a_name_too_long_for_the_disk_is_a_file_that_is_not_there(tmp_path: Path, reader: str) -> None:
    LISTS[reader](tmp_path, "n" * 300 + ".png")
    refuses(partial(READERS["wsol" if reader == "mask" else reader], tmp_path), "nnn")
    assert not is_file(tmp_path / ("n" * 300)) and is_file(write(tmp_path / "x", ""))


@pytest.mark.parametrize("reader", LISTS)
def test_an_endless_line_is_refused_without_repeating_it(tmp_path: Path, reader: str) -> None:
    LISTS[reader](tmp_path, "x" * 100_000)
    refuses(partial(READERS["wsol" if reader == "mask" else reader], tmp_path), "line", "characters: is this")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_as_on_any_system(tmp_path: Path, end: str, mark: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(f"{mark}a b{end}{end}c\u2028d{end}".encode())
    assert list(numbered_lines(path)) == [(1, "a b"), (3, "c\u2028d")]


def test_latin_1_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("caf\u00e9.jpg".encode("latin-1"))
    refuses(lambda: list(numbered_lines(tmp_path / "x.txt")), "x.txt", "not UTF-8", "byte 3")


def test_a_name_with_an_odd_character_is_one_line_of_boxes_csv(tmp_path: Path) -> None:
    put(tmp_path / "cat/a\u2028b.png")
    put(tmp_path / "dog/x.png")
    write(tmp_path / "boxes.csv", "cat/a\u2028b.png,0,0,5,5\r\n")
    assert [sample.boxes for sample in READERS["folder"](tmp_path)] == [((0, 0, 5, 5),), None]


def test_an_open_quote_in_boxes_csv_is_named(tmp_path: Path) -> None:
    make_class_folders(tmp_path)
    write(tmp_path / "boxes.csv", 'cat/1.png,0,0,5,5\n"cat/2 b.png,0,0,5,5\ndog/3.png,0,0,5,5\n')
    refuses(partial(READERS["folder"], tmp_path), "boxes.csv line 3", "open quote")


def test_a_box_beyond_the_pixels_of_any_image_is_refused() -> None:
    refuses(lambda: check_box((0, 0, 10**17, 5), None, "x"), "x has a box", "beyond the pixels of any image")
    check_box((0, 0, 10**6, 5), None, "x")


def test_a_size_of_no_image_is_refused(tmp_path: Path) -> None:
    wsol(tmp_path, "1.png")
    write(tmp_path / "train/image_sizes.txt", "1.png,40,99999999999999")
    refuses(partial(READERS["wsol"], tmp_path), "image_sizes.txt line 1", "no image is so large")
    put(tmp_path / f"ilsvrc/train/{TENCH}/1.png")
    xml = tmp_path / f"ilsvrc/Annotations/train/{TENCH}/1.xml"
    write(xml, box_xml((TENCH, 1, 2, 30, 20), size=(10**20, 30)))
    refuses(partial(READERS["ilsvrc"], tmp_path / "ilsvrc"), "1.xml", "pixels in a row")


def test_images_of_one_name_in_two_folders_have_their_own_boxes(tmp_path: Path) -> None:
    for number, synset in enumerate((TENCH, GOLDFISH)):
        put(tmp_path / f"train/{synset}/1.png")
        boxes = box_xml((TENCH, number, 0, 9, 9), (GOLDFISH, number, 0, 9, 9))
        write(tmp_path / f"Annotations/train/{synset}/1.xml", boxes)
    samples = READERS["ilsvrc"](tmp_path)
    assert [sample.boxes for sample in samples] == [((0, 0, 9, 9),), ((1, 0, 9, 9),)]
    (tmp_path / f"Annotations/train/{TENCH}").rename(tmp_path / "Annotations/train/other")
    refuses(partial(READERS["ilsvrc"], tmp_path), "cannot tell which", TENCH)


def test_an_entity_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    put(tmp_path / f"train/{TENCH}/1.png")
    entities = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(12))
    text = f'<!DOCTYPE x [<!ENTITY a0 "lol">{entities}]><annotation>&a12;</annotation>'
    write(tmp_path / f"Annotations/train/{TENCH}/1.xml", text)
    refuses(partial(READERS["ilsvrc"], tmp_path), "1.xml")
