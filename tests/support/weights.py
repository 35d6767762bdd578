"""Tiny files of weights in the formats of other libraries, written here from the formats' descriptions."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

TYPES = {"float32": 0, "int32": 2, "uint8": 3, "int8": 9}  # TFLite's numbers for them
Write = Callable[[], int]  # writes a part and returns its place


def archive(files: Mapping[str, bytes], top: str = "package") -> bytes:
    """A gzipped tar file."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def tfjs(arrays: Mapping[str, np.ndarray], folder: str = "", shard: int = 50) -> dict[str, bytes]:
    """The files of a TF.js layers model, its weights cut into shards of some bytes."""
    data = b"".join(array.astype("<f4").tobytes() for array in arrays.values())
    shards = {
        f"group1-shard{i}.bin": data[at : at + shard] for i, at in enumerate(range(0, len(data), shard))
    }
    weights = [{"name": n, "shape": list(a.shape), "dtype": "float32"} for n, a in arrays.items()]
    model = {"format": "layers-model", "weightsManifest": [{"paths": list(shards), "weights": weights}]}
    files = {"model.json": json.dumps(model).encode(), **shards}
    return {f"{folder}{path}": content for path, content in files.items()}


def tflite(tensors: Sequence[tuple[str, np.ndarray | None, float | None, int]]) -> bytes:
    """A TFLite file with tensors of (name, stored numbers or None, scale or None, zero point)."""
    file = _FlatFile(b"\0\0\0\0TFL3")

    def quantization(scale: float, zero: int) -> Write:
        scales = ("ref", lambda: file.vector(struct.pack("<f", scale), 1))
        zeros = ("ref", lambda: file.vector(struct.pack("<q", zero), 1))
        return lambda: file.table([None, None, scales, zeros])

    def tensor(place: int) -> Write:
        name, values, scale, zero = tensors[place]
        shape = (1, 2, 2, 3) if values is None else values.shape
        return lambda: file.table(
            [
                ("ref", lambda: file.vector(struct.pack(f"<{len(shape)}i", *shape), len(shape))),
                None if values is None else ("<B", TYPES[str(values.dtype)]),
                ("<I", place + 1),
                ("ref", lambda: file.vector(name.encode(), len(name))),
                None if scale is None else ("ref", quantization(scale, zero)),
            ]
        )

    def buffer(values: np.ndarray | None) -> Write:
        data = b"" if values is None else values.tobytes()
        return lambda: file.table([("ref", lambda: file.vector(data, len(data)))] if data else [])

    def graph() -> int:
        return file.table([("ref", lambda: file.tables([tensor(i) for i in range(len(tensors))]))])

    buffers = [buffer(None), *(buffer(values) for _, values, _, _ in tensors)]  # the first is always empty
    root = file.table(
        [
            ("<I", 3),
            None,
            ("ref", lambda: file.tables([graph])),
            None,
            ("ref", lambda: file.tables(buffers)),
        ]
    )
    struct.pack_into("<I", file.data, 0, root)
    return bytes(file.data)


class _FlatFile:
    """A FlatBuffers file, written from front to back: what a table points to lies behind it."""

    def __init__(self, begin: bytes) -> None:
        self.data = bytearray(begin)

    def table(self, fields: Sequence[tuple[str, Any] | None]) -> int:
        """Write a table: None for a missing field, ("ref", writer) for an offset, else (layout, number)."""
        self._align()
        layout, at = len(self.data), 4
        places = list[int]()
        for field in fields:
            places.append(at if field else 0)
            at += 4 if field else 0
        self.data += struct.pack(f"<{2 + len(fields)}H", 4 + 2 * len(fields), at, *places)
        self._align()
        table = len(self.data)
        self.data += struct.pack("<i", table - layout) + bytes(at - 4)
        for field, place in zip(fields, places, strict=True):
            if field and field[0] != "ref":
                struct.pack_into(field[0], self.data, table + place, field[1])
            elif field:
                self._point(table + place, field[1]())
        return table

    def vector(self, content: bytes, count: int) -> int:
        self._align()
        place = len(self.data)
        self.data += struct.pack("<I", count) + content
        return place

    def tables(self, writers: Sequence[Write]) -> int:
        place = self.vector(bytes(4 * len(writers)), len(writers))
        for i, write in enumerate(writers):
            self._point(place + 4 + 4 * i, write())
        return place

    def _point(self, at: int, to: int) -> None:
        struct.pack_into("<I", self.data, at, to - at)

    def _align(self) -> None:
        self.data += bytes(-len(self.data) % 4)
