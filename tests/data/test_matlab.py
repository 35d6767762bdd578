"""MATLAB files: what SciPy reads is read the same, what is damaged raises ValueError and nothing else."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from sigcam.data.matlab import read_variables

HEADER = bytes(124) + struct.pack("<H", 0x0100) + b"IM"


def saved(variables: dict[str, Any], compressed: bool = False) -> bytes:
    scipy_io = pytest.importorskip("scipy.io", reason="scipy writes the MATLAB files of this test")
    file = io.BytesIO()
    scipy_io.savemat(file, variables, do_compression=compressed)
    return file.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_text_numbers_cells_and_structs_are_read(compressed: bool) -> None:
    rows = np.zeros((1, 2), dtype=[("x", object), ("fname", object)])
    for i, name in enumerate(("a.jpg", "b\u00e9.jpg")):
        rows[0, i]["x"], rows[0, i]["fname"] = (i + 0.5, np.uint8(200), np.int64(-3))[i], name
    cell = np.array(["one", "two words", ""], dtype=object)
    numbers = np.arange(6.0).reshape(2, 3)
    found = read_variables(saved({"rows": rows, "cell": cell, "n": numbers, "k": 7}, compressed))
    assert found["rows"] == [{"x": 0.5, "fname": "a.jpg"}, {"x": 200, "fname": "b\u00e9.jpg"}]
    assert [value if isinstance(value, str) else "" for value in found["cell"]] == ["one", "two words", ""]
    assert found["n"].tolist() == numbers.ravel("F").tolist() and found["k"] == 7


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def array(kind: int, shape: tuple[int, ...], rest: bytes, name: bytes = b"x") -> bytes:
    flags, sizes = struct.pack("<II", kind, 0), struct.pack(f"<{len(shape)}i", *shape)
    return element(14, element(6, flags) + element(5, sizes) + element(1, name) + rest)


def test_the_bytes_of_other_machines_are_turned_around() -> None:
    parts = [
        (6, struct.pack(">II", 6, 0)),
        (5, struct.pack(">ii", 1, 1)),
        (1, b"x"),
        (9, struct.pack(">d", 2.5)),
    ]
    inner = b"".join(struct.pack(">II", k, len(c)) + c + bytes(-len(c) % 8) for k, c in parts)
    data = bytes(124) + struct.pack(">H", 0x0100) + b"MI" + struct.pack(">II", 14, len(inner)) + inner
    assert read_variables(data) == {"x": 2.5}


def nested(depth: int) -> bytes:
    content = array(6, (1, 1), element(9, bytes(8)))
    for _ in range(depth):
        content = array(1, (1, 1), content)
    return content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(200),
        HEADER[:124] + struct.pack("<H", 0x0200) + b"IM",
        HEADER + struct.pack("<II", 14, 2**31),
        HEADER + element(15, b"no zlib"),
        HEADER + element(15, zlib.compress(bytes(2**27), 9)),
        HEADER + array(1, (10**9, 1), b""),
        HEADER + array(1, (-1, -1), b""),
        HEADER + array(2, (10**9, 10**9), element(5, bytes(4)) + element(1, b"")),
        HEADER + array(6, (1, 1), b""),
        HEADER + array(6, (1, 1), element(99, bytes(8))),
        HEADER + array(6, (1, 1), element(9, bytes(7))),
        HEADER + array(4, (1, 1), element(16, b"\xff")),
        HEADER + array(4, (1, 1), element(9, bytes(8))),
        HEADER + array(3, (1, 1), b""),
        HEADER + nested(1000),
        HEADER + struct.pack("<HH4s", 1, 60, b"abcd"),
    ],
)
def test_a_damaged_or_hostile_file_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_variables(data)


def test_cells_in_cells_are_read_to_some_depth() -> None:
    value = read_variables(HEADER + nested(4))["x"]
    for _ in range(4):
        (value,) = value
    assert value == 0
