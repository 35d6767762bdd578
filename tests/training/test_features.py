"""Features from a file: what is no such file is refused in a sentence, before it fills the memory."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigcam.training.features import read_features
from support.data_files import refuses

ROWS = np.zeros((4, 3), np.float16)


def put(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("labels", [[0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0], [[0, 1]] * 4, [True, False] * 2])
def test_class_numbers_of_any_kind_are_read(tmp_path: Path, labels: list[Any]) -> None:
    features = read_features(put(tmp_path / "f.npz", plain=ROWS, labels=np.array(labels)))
    assert features.labels.tolist() == np.array(labels).astype(int).tolist() and len(features) == 4


@pytest.mark.parametrize(
    "labels",
    [
        np.float64(3.0),
        np.array([0.5, 1, 2, 3]),
        np.array([np.nan, 1, 2, 3]),
        np.array([1e300, 1, 2, 3]),
        np.array([2**64 - 1, 1, 2, 3], np.uint64),
        np.array(["a", "b", "c", "d"]),
        np.zeros((2, 2, 2)),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(tmp_path: Path, labels: Any) -> None:
    refuses(partial(read_features, put(tmp_path / "f.npz", plain=ROWS, labels=labels)), "f.npz", "labels")


@pytest.mark.parametrize("plain", [np.zeros(4, np.float32), np.zeros((4, 3), np.int64), np.float32(1)])
def test_features_that_are_no_rows_of_floats_are_refused(tmp_path: Path, plain: Any) -> None:
    refuses(partial(read_features, put(tmp_path / "f.npz", plain=plain, labels=np.arange(4))), "(n, ...)")


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(99999999999999999999, 2)", "(4, 3", "None"])
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path: Path, shape: str) -> None:
    file = io.BytesIO()
    np.save(file, ROWS)
    header = file.getvalue().replace(b"(4, 3)", shape.encode())
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("plain.npy", header)
        archive.writestr("labels.npy", header)
    refuses(partial(read_features, tmp_path / "f.npz"), "f.npz", "cannot read")


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    path, block = tmp_path / "f.npz", bytes(2**24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("plain.npy", "w") as file:
        for _ in range(2**6):
            file.write(block)
    refuses(partial(read_features, path), "f.npz", "unpack to")
