"""Oxford-IIIT Pet as it is published: cats and dogs of 37 breeds with trimaps.

The boxes in annotations/xmls are of heads, not of the animals, and are left alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.images import open_image
from sigcam.data.masks import open_levels
from sigcam.data.sample import Sample, Samples
from sigcam.data.text_files import MOST_CLASSES, is_whole_number, numbered_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LISTS = {"train": "trainval.txt", "test": "test.txt"}
TRIMAP = {1: 1, 2: 0, 3: 255}  # object, background, border


def pets(root: str | Path, *, split: str = "train") -> Samples:
    """The pictures of one official list, trainval.txt for train; masks are trimaps, their border ignored."""
    root = Path(root)
    at = root / "annotations"
    found = [part for part, name in LISTS.items() if (at / name).is_file()]
    if split not in found:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(found) or 'no annotations'}.")
    names, numbers = dict[int, str](), dict[str, int]()
    items = list[Sample]()
    for part in found:
        file = at / LISTS[part]
        for line, name, label in _entries(file):
            where, breed = f"{file} line {line}: image {name}", name.rpartition("_")[0]
            if names.setdefault(label, breed) != breed:
                raise DataError(f"{where} has class {label + 1}, which is {names[label]} elsewhere.")
            if numbers.setdefault(breed, label) != label:
                raise DataError(f"{where} has class {label + 1}; {breed} is {numbers[breed] + 1} elsewhere.")
            if part != split:
                continue
            picture, trimap = root / "images" / f"{name}.jpg", at / "trimaps" / f"{name}.png"
            if not picture.is_file():
                raise DataError(f"{where} is not in {root / 'images'}: add it, or remove the line.")
            mask = partial(open_trimap, trimap) if trimap.is_file() else None
            open_ = partial(open_image, picture, upright=False)
            items.append(Sample(name, open_, label, None, mask, path=picture))
    if not items:
        raise DataError(f"{at / LISTS[split]} names no pictures.")
    classes = tuple(names.get(label, f"class {label + 1}") for label in range(max(names) + 1))
    return Samples(tuple(items), classes)


def holds_pets(root: str | Path) -> bool:
    """Whether the data set's own lists are there."""
    at = Path(root) / "annotations"
    return any((at / name).is_file() for name in LISTS.values()) and (Path(root) / "images").is_dir()


def open_trimap(path: Path) -> NDArray[np.uint8]:
    """(H, W): 1 object, 0 background, 255 the border between them, which is ignored."""
    import numpy as np

    levels = open_levels(path)
    wrong = sorted({int(value) for value in np.unique(levels)} - TRIMAP.keys())
    if wrong:
        raise DataError(f"cannot read the mask {path}: a trimap has the values 1, 2 and 3, not {wrong[0]}.")
    table = np.zeros(256, np.uint8)
    for level, meaning in TRIMAP.items():
        table[level] = meaning
    mask: NDArray[np.uint8] = table[levels]
    return mask


def _entries(path: Path) -> list[tuple[int, str, int]]:
    """Line number, name and 0-based class of each picture."""
    entries, seen = list[tuple[int, str, int]](), dict[str, int]()
    for line, text in numbered_lines(path):
        if text.startswith("#"):
            continue
        fields = text.split()
        if len(fields) < 2 or not is_whole_number(fields[1]) or not 1 <= int(fields[1]) <= MOST_CLASSES:
            raise DataError(
                f"{path} line {line}: {text!r} is not a name and a class, from 1 to {MOST_CLASSES}."
            )
        if fields[0] in seen:
            raise DataError(f"{path} line {line}: image {fields[0]} is in line {seen[fields[0]]} already.")
        seen[fields[0]] = line
        entries.append((line, fields[0], int(fields[1]) - 1))
    return entries
