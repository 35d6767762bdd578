"""Weights in files of other libraries, read without these: TF.js, TFLite, pickled NumPy arrays."""

import io
import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.files import error_line, parse_json

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
TFLITE_TYPES = {0: "<f4", 2: "<i4", 3: "u1", 9: "i1"}  # float32, int32, uint8, int8
# Places of fields in TFLite's tables.
SUBGRAPHS, BUFFERS = 2, 4  # of a model
TENSORS = 0  # of a subgraph
SHAPE, TYPE, BUFFER, NAME, QUANTIZATION = range(5)  # of a tensor
SCALE, ZERO_POINT = 2, 3  # of a quantisation
DATA = 0  # of a buffer


def read_tfjs(members: Mapping[str, bytes], model: str) -> dict[str, Tensor]:
    """Return the weights of a TF.js layers model by name.

    Args:
        members: files by path: the model and its shards.
        model: path of the JSON file; the shards lie beside it.
    """
    tensors, folder = dict[str, Tensor](), model.rpartition("/")[0]
    try:
        for group in parse_json(member_of(members, model))["weightsManifest"]:
            shards = [member_of(members, f"{folder}/{path}".lstrip("/")) for path in group["paths"]]
            data, at = b"".join(shards), 0
            for weight in group["weights"]:
                if weight["dtype"] != "float32" or "quantization" in weight:
                    raise DataError(f"{weight['name']} in {model} is not stored as float32")
                shape = tuple(map(int, weight["shape"]))
                end = at + 4 * math.prod(shape)
                if min(shape, default=0) < 0 or end > len(data):
                    raise DataError(f"the shards of {model} end before {weight['name']}")
                values = np.frombuffer(data[at:end], "<f4").reshape(shape)
                tensors[str(weight["name"])], at = torch.from_numpy(values.astype(np.float32)), end
            if at != len(data):
                raise DataError(f"the shards of {model} have {len(data) - at} bytes too many")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{model} is not a TF.js layers model ({error_line(error)})") from error
    return tensors


def member_of(members: Mapping[str, bytes], path: str) -> bytes:
    """Return a file of an archive; DataError if it is missing."""
    if path not in members:
        raise DataError(f"there is no {path} in the archive")
    return members[path]


def read_tflite(data: bytes) -> dict[str, Tensor]:
    """Return the constants of a TFLite model by name, in float32: scale * (stored number - zero point)."""
    buffer = FlatBuffer(data)
    try:
        if data[4:8] != b"TFL3":
            raise ValueError("it does not begin as one")
        model = buffer.follow(0)
        buffers = buffer.tables(model, BUFFERS)
        subgraphs = buffer.tables(model, SUBGRAPHS)
        found = [
            _constant(buffer, buffers, each) for graph in subgraphs for each in buffer.tables(graph, TENSORS)
        ]
    except (struct.error, ValueError, IndexError) as error:
        raise DataError(f"it is no TFLite model, or a damaged one ({error_line(error)})") from error
    return {name: tensor for name, tensor in found if tensor is not None}


def _constant(buffer: "FlatBuffer", buffers: list[int], tensor: int) -> tuple[str, Tensor | None]:
    """Return the name of a tensor and its numbers; None if they are computed, not stored."""
    name = bytes(buffer.vector(tensor, NAME, 1)).decode()
    data = buffer.vector(buffers[buffer.number(tensor, BUFFER, "<I")], DATA, 1)
    if not data:
        return name, None
    kind = TFLITE_TYPES.get(buffer.number(tensor, TYPE, "<B"))
    if kind is None:
        raise ValueError(f"{name} has a type that is not read")
    shape = np.frombuffer(buffer.vector(tensor, SHAPE, 4), "<i4")
    values = np.frombuffer(data, kind).reshape(tuple(shape.tolist())).astype(np.float64)
    if (place := buffer.field(tensor, QUANTIZATION)) is not None:
        quantization = buffer.follow(place)
        scale = np.frombuffer(buffer.vector(quantization, SCALE, 4), "<f4")
        zero = np.frombuffer(buffer.vector(quantization, ZERO_POINT, 8), "<i8")
        if len(scale) > 1 or len(zero) > 1:
            raise ValueError(f"{name} has a scale for each channel, which is not read")
        if len(scale):
            with np.errstate(all="ignore"):  # checked below
                values = float(scale[0]) * (values - (int(zero[0]) if len(zero) else 0))
    if not np.abs(values).max() <= np.finfo(np.float32).max:  # or NaN
        raise ValueError(f"{name} holds numbers that are not finite")
    return name, torch.from_numpy(values.astype(np.float32))


@dataclass(frozen=True)
class FlatBuffer:
    """Tables in the FlatBuffers format; a place outside the data raises ValueError or struct.error."""

    data: bytes

    def read(self, layout: str, at: int) -> int:
        """Return the number at a place."""
        if at < 0:  # which struct would count from the end
            raise ValueError(f"it points to {at}")
        return int(struct.unpack_from(layout, self.data, at)[0])

    def follow(self, at: int) -> int:
        """Return the place that the offset at a place points to."""
        return at + self.read("<I", at)

    def field(self, table: int, index: int) -> int | None:
        """Return the place of a table's field; None if the table does not have it."""
        layout = table - self.read("<i", table)
        entry = 4 + 2 * index  # after the sizes of the layout and of the table
        offset = self.read("<H", layout + entry) if entry < self.read("<H", layout) else 0
        return table + offset if offset else None

    def number(self, table: int, index: int, layout: str) -> int:
        """Return a number in a table, 0 by default."""
        place = self.field(table, index)
        return 0 if place is None else self.read(layout, place)

    def vector(self, table: int, index: int, size: int) -> memoryview:
        """Return the bytes of a vector in a table whose elements have `size` bytes, none by default."""
        place = self.field(table, index)
        if place is None:
            return memoryview(b"")
        start = self.follow(place)
        end = start + 4 + size * self.read("<I", start)
        if end > len(self.data):
            raise ValueError(f"it ends before {end}")
        return memoryview(self.data)[start + 4 : end]

    def tables(self, table: int, index: int) -> list[int]:
        """Return the places of the tables in a vector."""
        place = self.field(table, index)
        if place is None:
            return []
        count, start = len(self.vector(table, index, 4)) // 4, self.follow(place) + 4
        return [self.follow(start + 4 * i) for i in range(count)]


def read_arrays(data: bytes) -> Any:
    """Return the NumPy arrays, in plain containers, of a pickle; DataError if it holds anything else."""
    try:
        return ArraysOnly(io.BytesIO(data)).load()
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise almost anything
        raise DataError(f"it is no pickle of arrays, or a damaged one ({error_line(error)})") from error


class ArraysOnly(pickle.Unpickler):
    """Unpickler that reads NumPy arrays in plain containers and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"the file asks for {module}.{name}, which is no array: it is not read.")
        return super().find_class(module, name)
