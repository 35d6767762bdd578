"""Maps on disk: hostile files are refused without allocating what they claim, names never clash."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.data.maps import find_maps, map_names, open_map
from support.data_files import refuses
from support.folders import png_header


def put_npy(path: Path, shape: str, kind: str = "<f4", data: bytes = bytes(64)) -> Path:
    """Write a .npy file with this header, true or not."""
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}".encode()
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    "shape",
    [
        "(1000000, 1000000)",
        "(4294967296, 4294967296)",
        "(99999999999999999999999, 2)",
        "(-1, 4)",
        "(1.5, 2)",
        "(3, 4",
        "((((((((",
        "None",
        "(17, 1)",
    ],
)
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path: Path, shape: str) -> None:
    refuses(partial(open_map, put_npy(tmp_path / "x.npy", shape), "x.jpg"), "x.jpg", "cannot read", "x.npy")


@pytest.mark.parametrize("kind", ["<U9999999", "|O", "zz", "|V99999999", "<c8"])
def test_an_array_of_no_real_numbers_is_refused(tmp_path: Path, kind: str) -> None:
    refuses(partial(open_map, put_npy(tmp_path / "x.npy", "(4, 4)", kind), "x.jpg"), "x.jpg", "x.npy")


def test_a_long_header_is_refused_in_one_short_line(tmp_path: Path) -> None:
    path = put_npy(tmp_path / "x.npy", "(" + "1, " * 15_000 + ")")
    refuses(partial(open_map, path, "x.jpg"), "x.npy")


@pytest.mark.parametrize("width", [10_000, 100_000])
def test_a_png_map_that_claims_to_be_huge_is_refused(tmp_path: Path, width: int) -> None:
    (tmp_path / "x.png").write_bytes(png_header(width, 10_000))
    refuses(partial(open_map, tmp_path / "x.png", "x.jpg"), "x.jpg", "x.png", "pixels")


def test_a_png_map_with_a_damaged_palette_chunk_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "x.png", transparency=0)
    data = (tmp_path / "x.png").read_bytes()
    at = data.index(b"tRNS")
    (tmp_path / "x.png").write_bytes(
        data[: at - 4] + struct.pack(">I", 0) + data[at : at + 4] + data[at + 6 :]
    )
    refuses(partial(open_map, tmp_path / "x.png", "x.jpg"), "x.jpg", "x.png")


@pytest.mark.parametrize(
    "ids",
    [
        ["IMG.jpg", "img.png"],
        ["a/IMG.jpg", "A/img.jpg"],
        ["a/b.jpg", "a__b.jpg"],
        ["a.jpg", "a.png", "a.jpg.png"],
        ["caf\u00e9.jpg", "cafe\u0301.png"],
        ["x.jpg", "X.jpg", "x.jpg~2.png"],
    ],
)
def test_no_two_maps_have_one_name_on_any_disk(ids: list[str]) -> None:
    names = [name.casefold() for name in map_names(ids)]
    assert len(set(names)) == len(ids)
    assert map_names(["a/photo.jpg", "b.png"]) == ["a__photo.map", "b.map"]


def test_maps_whose_names_differ_in_case_only_are_found_again(tmp_path: Path) -> None:
    ids = ["IMG.jpg", "img.png"]
    for name in map_names(ids):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 2), np.float32))
    assert [path.name for path in find_maps(tmp_path, ids)] == ["IMG.jpg.map.npy", "img.png.map.npy"]


def test_names_longer_than_a_disk_takes_are_cut_stay_unique_and_are_found_again(tmp_path: Path) -> None:
    deep = "/".join(["a folder with a long name"] * 20)
    ids = [f"{deep}/1.jpg", f"{deep}/2.jpg", "\u00e9" * 122 + "x.png", "caf\udce9" * 60 + ".png", "short.png"]
    names = map_names(ids)
    assert len(set(names)) == 5 and names[-1] == "short.map"
    for name in names:
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 2), np.float32))
    assert [path.name for path in find_maps(tmp_path, ids)] == [f"{name}.npy" for name in names]
