"""CUB-200-2011 as it is published: birds with a box each, and segmentations where they were unpacked too."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import open_image, read_image_size
from sigcam.data.masks import open_levels
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box, numbered_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGES, CLASSES, LABELS, PARTS, BOXES = (
    "images.txt",
    "classes.txt",
    "image_class_labels.txt",
    "train_test_split.txt",
    "bounding_boxes.txt",
)
SPLITS = {"train": "1", "test": "0"}
HALF = 127  # a pixel is 0, 51, 102, 153, 204 or 255: how many of five annotators saw the bird there
CubRows = dict[str, tuple[int, str]]  # line number and the rest of the line, by the number it begins with


def cub(root: str | Path, *, split: str = "train") -> Samples:
    """The pictures of one official split; root is CUB_200_2011, or the folder that it was unpacked in.

    Masks come from segmentations/ in or beside it: 1 where more than half of the annotators saw the bird.
    """
    home = _home(Path(root))
    if split not in SPLITS:
        raise DataError(f"{home} has no split {split!r}: it has {', '.join(SPLITS)}.")
    images, labels, parts = (_rows(home / name) for name in (IMAGES, LABELS, PARTS))
    boxes = _rows(home / BOXES) if (home / BOXES).is_file() else None
    names = {number: name for number, (_, name) in _rows(home / CLASSES).items()}
    places = {number: place for place, number in enumerate(names)}
    masks = next((f for f in (home / "segmentations", home.parent / "segmentations") if f.is_dir()), None)
    items, lines = list[Sample](), dict[str, int]()
    for number, (line, id) in images.items():
        where = f"{home / IMAGES} line {line}: image {id}"
        if lines.setdefault(id, line) != line:
            raise DataError(f"{where} is in line {lines[id]} already: remove one.")
        for rows, name in ((labels, LABELS), (parts, PARTS), (boxes, BOXES)):
            if rows is not None and number not in rows:
                raise DataError(f"{where} has no line in {name}: add one that begins with {number}.")
        if parts[number][1] not in SPLITS.values():
            raise DataError(f"{home / PARTS} line {parts[number][0]}: {parts[number][1]!r} is not 0 or 1.")
        if parts[number][1] != SPLITS[split]:
            continue
        file = home / "images" / id
        if not file.is_file():
            raise DataError(f"{where} is not in {home / 'images'}: add it, or remove its lines.")
        line, label = labels[number]
        if label not in places:
            raise DataError(f"{home / LABELS} line {line}: image {id} has class {label}, not in {CLASSES}.")
        box = None
        if boxes:
            line, text = boxes[number]
            where = f"{home / BOXES} line {line}: image {id}"
            box = _box(text, read_image_size(file, upright=False), where)
        mask = (masks / id).with_suffix(".png") if masks else None
        items.append(
            Sample(
                id,
                partial(open_image, file, upright=False),
                places[label],
                (box,) if box else None,
                partial(open_segmentation, mask) if mask and mask.is_file() else None,
                path=file,
            )
        )
    if not items:
        raise DataError(f"{home} has no split {split!r}: {PARTS} puts no picture in it.")
    return Samples(tuple(items), tuple(names.values()))


def holds_cub(root: str | Path) -> bool:
    """Whether the data set's own lists are there."""
    home = _home(Path(root))
    return all((home / name).is_file() for name in (IMAGES, LABELS, PARTS))


def open_segmentation(path: Path) -> NDArray[np.uint8]:
    """(H, W): 1 where more than half of the annotators saw the bird, else 0."""
    import numpy as np

    return (open_levels(path) > HALF).astype(np.uint8)


def _home(root: Path) -> Path:
    inner = root / "CUB_200_2011"
    return inner if inner.is_dir() and not (root / IMAGES).is_file() else root


def _rows(path: Path) -> CubRows:
    rows = CubRows()
    for line, text in numbered_lines(path):
        number, _, rest = text.partition(" ")
        if not number.isdecimal() or not rest.strip():
            raise DataError(f"{path} line {line}: {text!r} does not begin with a number and a space.")
        if number in rows:
            raise DataError(f"{path} line {line}: {number} is in line {rows[number][0]} already.")
        rows[number] = line, rest.strip()
    return rows


def _box(text: str, size: ImageSize | None, where: str) -> Box:
    """x, y, width, height as xyxy: in these lists x + width is the last pixel inside, at most W - 1, and the
    public evaluator reads it so (PROTOCOL 5.6)."""
    try:
        x, y, width, height = map(float, text.split())
    except ValueError:
        raise DataError(f"{where} has {text!r}, which is not x, y, width and height.") from None
    corners = (x, y, x + width, y + height)
    if not all(map(math.isfinite, corners)) or min(x, y, width, height) < 0:
        raise DataError(f"{where} has a box {text} that is inverted or begins outside the picture.")
    box = (int(corners[0]), int(corners[1]), int(corners[2]), int(corners[3]))
    check_box(box, size, where)
    return box
