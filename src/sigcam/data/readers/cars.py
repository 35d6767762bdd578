"""Stanford Cars as published: 196 car models with one box per image, in MATLAB files."""

import reprlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sigcam.core.errors import DataError
from sigcam.data.images import open_image, read_image_size
from sigcam.data.matlab import MAX_MATLAB_BYTES, read_variables
from sigcam.data.sample import Sample, Samples
from sigcam.data.text_files import check_box, check_inside, is_file

ANNOTATION_FILES = {
    "train": ("cars_train_annos.mat",),
    "test": ("cars_test_annos_withlabels.mat", "cars_test_annos.mat"),
}
CLASS_FILE = "cars_meta.mat"
CORNERS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def cars(root: str | Path, *, split: str = "train") -> Samples:
    """Return the images of cars_train or cars_test; the MATLAB files are in root or in devkit/.

    The files count pixels from 1; boxes are converted to count from 0, with x1 and y1 the last pixel inside.
    Without cars_test_annos_withlabels.mat the test images have no label.
    """
    root = Path(root)
    if split not in ANNOTATION_FILES:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(ANNOTATION_FILES)}.")
    file = _find_file(root, ANNOTATION_FILES[split])
    if file is None:
        raise DataError(
            f"{root} has no split {split!r}: put {ANNOTATION_FILES[split][0]} in it or in devkit/."
        )
    class_file = _find_file(root, (CLASS_FILE,))
    if class_file is None:
        raise DataError(f"{root} has no {CLASS_FILE}, which names the classes: put it beside {file.name}.")
    classes = tuple(str(name).strip() for name in _read_variable(class_file, "class_names"))
    home = root / f"cars_{split}"
    rows = _read_variable(file, "annotations")
    fields = set(rows[0]) if rows and all(isinstance(row, dict) for row in rows) else set()
    missing = next((name for name in (*CORNERS, "fname") if name not in fields), None)
    if rows and missing:
        raise DataError(f"{file} has annotations without {missing}: take it from the data set's devkit.")
    items, numbers = list[Sample](), dict[str, int]()
    for number, row in enumerate(rows, 1):
        id = row["fname"]
        if not isinstance(id, str) or not id.isprintable():
            name = reprlib.repr(str(id))
            raise DataError(f"{file} annotation {number}: {name} is not the name of an image.")
        where, image = f"{file} annotation {number}: image {id[:300]}", home / id
        check_inside(id, where)
        if numbers.setdefault(id, number) != number:
            raise DataError(f"{where} is in annotation {numbers[id]} already: remove one.")
        label = _whole_number(row, "class", where) - 1 if "class" in fields else None
        if label is not None and not 0 <= label < len(classes):
            raise DataError(f"{where} has class {label + 1} of {len(classes)}.")
        if not is_file(image):
            raise DataError(f"{where} is not in {home}: add it.")
        x0, y0, x1, y1 = (_whole_number(row, name, where) for name in CORNERS)
        if x0 < 1 or y0 < 1:
            raise DataError(f"{where} has a box {(x0, y0, x1, y1)} that begins before pixel 1.")
        check_box((x0, y0, x1, y1), read_image_size(image, upright=False), where)
        boxes = ((x0 - 1, y0 - 1, x1 - 1, y1 - 1),)
        items.append(Sample(id, partial(open_image, image, upright=False), label, boxes, path=image))
    if not items:
        raise DataError(f"{file} lists no images.")
    return Samples(tuple(items), classes)


def is_cars(root: str | Path) -> bool:
    """Return whether annotation files of Stanford Cars are there."""
    return any(_find_file(Path(root), names) for names in ANNOTATION_FILES.values())


def _find_file(root: Path, names: Iterable[str]) -> Path | None:
    return next((h / name for name in names for h in (root, root / "devkit") if (h / name).is_file()), None)


def _whole_number(row: Any, name: str, where: str) -> int:
    try:
        return int(row[name])
    except (TypeError, ValueError, OverflowError):  # empty; text or NaN; infinite
        value = reprlib.repr(str(row[name]))
        raise DataError(f"{where} has {value} as {name}, which is not a whole number.") from None


def _read_variable(path: Path, name: str) -> list[Any]:
    """Return a variable of a MATLAB file, a list of its elements."""
    try:
        if path.stat().st_size > MAX_MATLAB_BYTES:
            raise ValueError(f"it has more than {MAX_MATLAB_BYTES >> 20} MB")
        variables = read_variables(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}.") from error
    if name not in variables:
        raise DataError(f"{path} has no {name}: take the file from the data set's devkit.")
    return variables[name] if isinstance(variables[name], list) else [variables[name]]
