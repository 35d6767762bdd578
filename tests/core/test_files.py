"""Files are written whole or not at all, and changes to them are noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import (
    check_writable,
    error_line,
    file_stamp,
    hash_of,
    parse_json,
    write_atomic,
    write_text_atomic,
)


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
