"""Files are written whole or not at all, and changes to them are noticed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.errors import ConfigError, DataError, DiskFull
from sigcam.core.files import (
    atomic_path,
    check_writable,
    error_line,
    exact_stamp,
    file_stamp,
    hash_of,
    parse_json,
    write_atomic,
    write_png,
    write_text_atomic,
)
from support.disks import fill


def test_a_write_replaces_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_text_creates_its_folder_and_bytes_do_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.txt"
    with pytest.raises(FileNotFoundError):
        write_atomic(path, b"x")
    assert write_text_atomic(path, "grün\n") == path and path.read_text(encoding="utf-8") == "grün\n"


def test_a_writable_folder_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "er")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write to the output folder .*--output") as caught:
        check_writable(tmp_path / "file")
    assert isinstance(caught.value, DataError) and (tmp_path / "file").read_text() == "in the way"


def test_a_disk_that_is_full_from_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull, match=f"disk full: {tmp_path}"):
        check_writable(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lack_of_space_names_the_folder(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(DiskFull, match=f"disk full: {tmp_path} .*Free some space"),
        atomic_path(tmp_path / "x.bin") as draft,
    ):
        draft.write_bytes(b"half")
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("some library says something else") from error
    assert list(tmp_path.iterdir()) == []


def test_any_writer_on_a_full_disk_leaves_the_old_file_alone(small_disk: Path) -> None:
    path, pixels = small_disk / "x.bin", np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)
    path.write_bytes(b"old")
    fill(small_disk)
    big = {"a": torch.zeros(500_000)}
    for write in (
        lambda: write_atomic(path, bytes(2_000_000)),
        lambda: write_text_atomic(path, "x" * 2_000_000),
        lambda: write_png(path, Image.fromarray(pixels)),
        lambda: Checkpoint(path, {}).save(big),
    ):
        with pytest.raises(DiskFull, match=f"disk full: {small_disk}"):
            write()
        assert path.read_bytes() == b"old" and not list(small_disk.glob(".sigcam*"))
    with pytest.raises(DiskFull, match=f"disk full: {small_disk}/new .No space left"):
        check_writable(small_disk / "new")
    assert {file.name for file in small_disk.iterdir()} == {"x.bin", "filling"}


def test_a_name_may_be_as_long_as_the_file_system_allows_or_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 251 + ".txt")
    assert write_text_atomic(path, "caf\udce9") == path and path.read_bytes() == b"caf\\udce9"


def test_an_exact_stamp_notices_a_file_of_the_same_size_with_a_copied_date(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    first, plain = exact_stamp(path), file_stamp(path)
    assert exact_stamp(path) == first and exact_stamp(tmp_path / "z") == "gone"
    shutil.copystat(path, other)
    other.replace(path)  # as cp -p and rsync -t do
    assert file_stamp(path) == plain and exact_stamp(path) != first


def test_a_stamp_changes_with_size_and_date(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert file_stamp(path) == "gone"
    path.write_bytes(b"12")
    first = file_stamp(path)
    assert file_stamp(path) == first
    os.utime(path, ns=(0, 1))
    assert file_stamp(path) == "2 1" != first


def test_a_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert hash_of({"a": 1, "b": Path("x")}) == hash_of({"b": Path("x"), "a": 1})
    assert len({hash_of(value) for value in ([1, 2], [2, 1], {"a": 1}, "a", None)}) == 5


def test_an_error_is_told_in_one_line() -> None:
    assert error_line(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert error_line(KeyError()) == "KeyError: no message"


def test_json_that_is_nested_too_deeply_is_a_value_error_like_any_other_damage() -> None:
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
    for text in ("[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "{", "1" * 5000):
        with pytest.raises(ValueError):
            parse_json(text)


def test_the_line_of_an_error_stays_short() -> None:
    assert len(error_line(ValueError("x" * 10_000))) < 400
