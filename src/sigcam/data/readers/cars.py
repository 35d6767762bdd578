"""Stanford Cars as it is published: photographs of 196 models with a box each, in MATLAB files."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box

FILES = {
    "train": ("cars_train_annos.mat",),
    "test": ("cars_test_annos_withlabels.mat", "cars_test_annos.mat"),
}
NAMES = "cars_meta.mat"
CORNERS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def cars(root: str | Path, *, split: str = "train") -> Samples:
    """The pictures of one official split, cars_train or cars_test; annotations may be in devkit/ or in root.

    The files count pixels from 1; boxes here count from 0, x1 and y1 the last inside. Without
    cars_test_annos_withlabels.mat the pictures of the test split have no label.
    """
    root = Path(root)
    if split not in FILES:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(FILES)}.")
    file = _find(root, FILES[split])
    if file is None:
        raise DataError(f"{root} has no split {split!r}: {FILES[split][0]} is not in it or in devkit/.")
    meta = _find(root, (NAMES,))
    if meta is None:
        raise DataError(f"{root} has no {NAMES}, which names the classes: put it beside {file.name}.")
    classes = tuple(str(name).strip() for name in _variable(meta, "class_names"))
    home = root / f"cars_{split}"
    rows = _variable(file, "annotations")
    fields = rows.dtype.names or ()
    lacking = next((name for name in (*CORNERS, "fname") if name not in fields), None)
    if lacking is not None:
        raise DataError(
            f"{file} has annotations without {lacking}: take the file from the data set's devkit."
        )
    items, numbers = list[Sample](), dict[str, int]()
    for number, row in enumerate(rows, 1):
        id = str(row["fname"])
        where, picture = f"{file} annotation {number}: image {id}", home / id
        if numbers.setdefault(id, number) != number:
            raise DataError(f"{where} is in annotation {numbers[id]} already: remove one.")
        label = _whole(row, "class", where) - 1 if "class" in fields else None
        if label is not None and not 0 <= label < len(classes):
            raise DataError(f"{where} has class {label + 1} of {len(classes)}.")
        if not picture.is_file():
            raise DataError(f"{where} is not in {home}: add it.")
        box = _box(row, read_image_size(picture, upright=False), where)
        items.append(Sample(id, partial(open_image, picture, upright=False), label, (box,), path=picture))
    if not items:
        raise DataError(f"{file} names no pictures.")
    return Samples(tuple(items), classes)


def holds_cars(root: str | Path) -> bool:
    """Whether the data set's own annotation files are there."""
    return any(_find(Path(root), names) for names in FILES.values())


def _find(root: Path, names: Iterable[str]) -> Path | None:
    return next((h / name for name in names for h in (root, root / "devkit") if (h / name).is_file()), None)


def _box(row: Any, size: ImageSize | None, where: str) -> Box:
    x0, y0, x1, y1 = (_whole(row, name, where) for name in CORNERS)
    if x0 < 1 or y0 < 1 or x1 < x0 or y1 < y0:
        raise DataError(f"{where} has a box {(x0, y0, x1, y1)} that is inverted or begins before pixel 1.")
    check_box((x0, y0, x1, y1), size, where)
    return x0 - 1, y0 - 1, x1 - 1, y1 - 1


def _whole(row: Any, name: str, where: str) -> int:
    try:
        return int(row[name])
    except (TypeError, ValueError, OverflowError):  # empty; text or NaN; infinite
        seen = reprlib.repr(str(row[name]))
        raise DataError(
            f"{where} has {seen} as {name}, where a whole number is needed: correct it."
        ) from None


def _variable(path: Path, name: str) -> Any:
    """A variable of a MATLAB file, as a list of one dimension."""
    import numpy as np

    try:
        matlab: Any = importlib.import_module("scipy.io")
    except ImportError as error:
        raise DataError(f"{path} is a MATLAB file: to read it, pip install scipy.") from error
    try:
        held = matlab.loadmat(path, squeeze_me=True)
    except Exception as error:  # a damaged file raises nearly everything
        raise DataError(f"cannot read {path}: {str(error) or type(error).__name__}.") from error
    if name not in held:
        raise DataError(f"{path} has no {name}: take the file from the data set's devkit.")
    return np.atleast_1d(held[name])
