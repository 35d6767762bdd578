"""Read the variables of a MATLAB 5 file (MathWorks, MAT-File Format), whatever it says about itself.

SciPy's reader is not used: a damaged file can end the process there.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

MAX_MATLAB_BYTES = 2**26  # of a file and of each of its variables: annotations take a few megabytes
MAX_DEPTH = 8  # of cells and structs in one another
HEADER, VERSION = 128, 0x0100
MATRIX, COMPRESSED = 14, 15  # types of elements
CELL, STRUCT, CHAR, FIRST_NUMBER, LAST_NUMBER = 1, 2, 4, 6, 15  # classes of arrays
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16{}", 16: "utf-8", 17: "utf-16{}", 18: "utf-32{}"}
Elements = Iterator[tuple[int, memoryview]]  # type and content


def read_variables(data: bytes) -> dict[str, Any]:
    """Return the variables by name: text as str, numbers as arrays (one number as such), cells as a list, and
    structs as a list of dicts. Raises ValueError if the file is damaged, too large or of another version."""
    if len(data) < HEADER or data[126:128] not in (b"IM", b"MI"):
        raise ValueError("it is not a file of MATLAB version 5 to 7")
    if len(data) > MAX_MATLAB_BYTES:
        raise ValueError(f"it has more than {MAX_MATLAB_BYTES >> 20} MB")
    order = "<" if data[126:128] == b"IM" else ">"
    if struct.unpack_from(f"{order}H", data, 124)[0] != VERSION:
        raise ValueError("it is not of MATLAB version 5 to 7: save it with -v7")
    variables = dict[str, Any]()
    for kind, content in _elements(memoryview(data)[HEADER:], order):
        if kind == COMPRESSED:
            kind, content = next(_elements(memoryview(_unpacked(content)), order), (0, content))
        if kind == MATRIX:
            name, value = _array(content, order, 0)
            variables[name] = value
    return variables


def _unpacked(content: memoryview) -> bytes:
    try:
        unpacked = zlib.decompressobj().decompress(content, MAX_MATLAB_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(unpacked) > MAX_MATLAB_BYTES:
        raise ValueError(f"a variable has more than {MAX_MATLAB_BYTES >> 20} MB")
    return unpacked


def _elements(data: memoryview, order: str) -> Elements:
    """Yield the elements that follow one another; small ones have type, size and content in eight bytes."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start, end = at + 8, at + 8 + size
        at = end if kind == COMPRESSED else end + -size % 8
        if small := kind >> 16:
            kind, start, end, at = kind & 0xFFFF, start - 4, start - 4 + small, start
        if end > len(data) or small > 4:
            raise ValueError("it ends too early")
        yield kind, data[start:end]


def _array(data: memoryview, order: str, depth: int) -> tuple[str, Any]:
    """Return name and value of an array."""
    import numpy as np

    if not data:
        return "", np.empty(0)
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    parts = _elements(data, order)
    flags, shape = (_numbers(*_next(parts), order) for _ in range(2))
    name, count = _latin(_next(parts)[1]), math.prod(map(int, shape))
    kind = int(flags[0]) & 0xFF if flags.size else 0
    if shape.size < 2 or shape.min() < 0 or count > len(data):
        raise ValueError(f"an array cannot have the shape {str(shape.tolist())[:100]}")
    if kind == CELL:
        return name, [_inner(parts, order, depth) for _ in range(count)]
    if kind == STRUCT:
        width, names = int(_numbers(*_next(parts), order).max(initial=0)), _next(parts)[1]
        fields = [_latin(names[i : i + width]) for i in range(0, len(names), width)] if width else []
        return name, [{field: _inner(parts, order, depth) for field in fields} for _ in range(count)]
    if kind == CHAR:
        type, content = _next(parts)
        if type not in ENCODINGS:
            raise ValueError(f"there is no text of the type {type}")
        return name, bytes(content).decode(ENCODINGS[type].format({"<": "-le", ">": "-be"}[order]))
    if FIRST_NUMBER <= kind <= LAST_NUMBER:
        values = _numbers(*_next(parts), order)
        return name, values[0] if values.size == 1 else values
    raise ValueError(f"it holds an array of the kind {kind}")


def _inner(parts: Elements, order: str, depth: int) -> Any:
    return _array(_next(parts)[1], order, depth + 1)[1]


def _next(parts: Elements) -> tuple[int, memoryview]:
    try:
        return next(parts)
    except StopIteration:
        raise ValueError("it ends too early") from None


def _numbers(kind: int, content: memoryview, order: str) -> Any:
    import numpy as np

    if kind not in NUMBERS:
        raise ValueError(f"there are no numbers of the type {kind}")
    return np.frombuffer(content, np.dtype(f"{order}{NUMBERS[kind]}"))


def _latin(content: memoryview) -> str:
    return bytes(content).split(b"\0")[0].decode("latin-1")
