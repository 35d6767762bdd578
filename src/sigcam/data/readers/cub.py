"""CUB-200-2011 as published: birds with one box each, and segmentations if they were downloaded too."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.images import open_brightness, open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box, check_inside, is_file, numbered_lines, quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGE_LIST, CLASS_LIST, BOX_LIST = "images.txt", "classes.txt", "bounding_boxes.txt"
LABEL_LIST, SPLIT_LIST = "image_class_labels.txt", "train_test_split.txt"
CUB_SPLITS = {"train": "1", "test": "0"}
HALF_OF_THE_VOTES = 127  # a pixel is 51 times the number of annotators, of five, who marked it as bird
CubRows = dict[str, tuple[int, str]]  # number at the start of a line -> line number, rest of the line


def cub(root: str | Path, *, split: str = "train") -> Samples:
    """Return the images of an official split; root is CUB_200_2011 or the folder it was unpacked in.

    Masks come from segmentations/ in or beside it: 1 where more than half of the annotators marked the bird.
    """
    home = _home(Path(root))
    if split not in CUB_SPLITS:
        raise DataError(f"{home} has no split {split!r}: it has {', '.join(CUB_SPLITS)}.")
    images, labels, splits = (_rows(home / name) for name in (IMAGE_LIST, LABEL_LIST, SPLIT_LIST))
    boxes = _rows(home / BOX_LIST) if (home / BOX_LIST).is_file() else None
    names = {number: name for number, (_, name) in _rows(home / CLASS_LIST).items()}
    label_of = {number: label for label, number in enumerate(names)}
    masks = next((f for f in (home / "segmentations", home.parent / "segmentations") if f.is_dir()), None)
    items, line_of = list[Sample](), dict[str, int]()
    for number, (line, id) in images.items():
        where = f"{home / IMAGE_LIST} line {line}: image {id}"
        if line_of.setdefault(id, line) != line:
            raise DataError(f"{where} is in line {line_of[id]} already: remove one.")
        for rows, name in ((labels, LABEL_LIST), (splits, SPLIT_LIST), (boxes, BOX_LIST)):
            if rows is not None and number not in rows:
                raise DataError(f"{where} has no line in {name}: add one that begins with {number}.")
        line, code = splits[number]
        if code not in CUB_SPLITS.values():
            raise DataError(f"{home / SPLIT_LIST} line {line}: {quoted(code)} is not 0 or 1.")
        if code != CUB_SPLITS[split]:
            continue
        check_inside(id, where)
        file = home / "images" / id
        if not is_file(file):
            raise DataError(f"{where} is not in {home / 'images'}: add it, or remove its lines.")
        line, label = labels[number]
        if label not in label_of:
            where = f"{home / LABEL_LIST} line {line}: image {id}"
            raise DataError(f"{where} has class {label}, which {CLASS_LIST} does not have.")
        box = None
        if boxes:
            line, text = boxes[number]
            box = _parse_box(text, file, f"{home / BOX_LIST} line {line}: image {id}")
        mask = (masks / id).with_suffix(".png") if masks else None
        open_mask = partial(open_segmentation, mask) if mask and is_file(mask) else None
        image = partial(open_image, file, upright=False)
        items.append(Sample(id, image, label_of[label], (box,) if box else None, open_mask, path=file))
    if not items:
        raise DataError(f"{home} has no split {split!r}: {SPLIT_LIST} puts no image in it.")
    return Samples(tuple(items), tuple(names.values()))


def is_cub(root: str | Path) -> bool:
    """Return whether the lists of CUB-200-2011 are there."""
    home = _home(Path(root))
    return all((home / name).is_file() for name in (IMAGE_LIST, LABEL_LIST, SPLIT_LIST))


def open_segmentation(path: Path) -> NDArray[np.uint8]:
    """Return a mask, (H, W): 1 where more than half of the annotators marked the bird, else 0."""
    import numpy as np

    return (open_brightness(path) > HALF_OF_THE_VOTES).astype(np.uint8)


def _home(root: Path) -> Path:
    inner = root / "CUB_200_2011"
    return inner if inner.is_dir() and not (root / IMAGE_LIST).is_file() else root


def _rows(path: Path) -> CubRows:
    rows = CubRows()
    for line, text in numbered_lines(path):
        number, _, rest = text.partition(" ")
        if not number.isdecimal() or not rest.strip():
            raise DataError(f"{path} line {line}: {quoted(text)} does not begin with a number and a space.")
        if number in rows:
            raise DataError(f"{path} line {line}: {number} is in line {rows[number][0]} already.")
        rows[number] = line, rest.strip()
    return rows


def _parse_box(text: str, image: Path, where: str) -> Box:
    """Convert x, y, width, height to xyxy. In these lists x + width is the last pixel inside, at most W - 1,
    and the public evaluator reads it so (PROTOCOL 5.6)."""
    try:
        x, y, width, height = map(float, text.split())
    except ValueError:
        raise DataError(f"{where} has {quoted(text)}, which is not x, y, width and height.") from None
    if not math.isfinite(x + width + y + height) or min(x, y, width, height) < 0:
        raise DataError(f"{where} has a box {text} that is inverted or begins outside the image.")
    box = int(x), int(y), int(x + width), int(y + height)
    check_box(box, read_image_size(image, upright=False), where)
    return box
