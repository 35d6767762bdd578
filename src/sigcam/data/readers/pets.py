"""Oxford-IIIT Pet as published: cats and dogs of 37 breeds with trimaps.

The boxes in annotations/xmls are boxes of heads, not of animals, and are not used.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.images import open_image, open_levels
from sigcam.data.sample import Sample, Samples
from sigcam.data.text_files import MAX_CLASSES, check_inside, is_file, is_whole_number, numbered_lines, quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LISTS = {"train": "trainval.txt", "test": "test.txt"}
TRIMAP = (0, 1, 0, 255)  # mask value of the levels: 0 is none, 1 object, 2 background, 3 border


def pets(root: str | Path, *, split: str = "train") -> Samples:
    """Return the images of an official list, trainval.txt for train; masks are trimaps, borders ignored."""
    root = Path(root)
    home = root / "annotations"
    splits = [name for name, file in LISTS.items() if (home / file).is_file()]
    if split not in splits:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(splits) or 'no annotations'}.")
    breed_of, label_of = dict[int, str](), dict[str, int]()
    items = list[Sample]()
    for name in splits:
        file = home / LISTS[name]
        for line, id, label in _entries(file):
            where, breed = f"{file} line {line}: image {id}", id.rpartition("_")[0]
            if breed_of.setdefault(label, breed) != breed:
                raise DataError(f"{where} has class {label + 1}, which is {breed_of[label]} elsewhere.")
            if label_of.setdefault(breed, label) != label:
                raise DataError(f"{where} has class {label + 1}; {breed} is {label_of[breed] + 1} elsewhere.")
            if name != split:
                continue
            check_inside(id, where)
            image, trimap = root / "images" / f"{id}.jpg", home / "trimaps" / f"{id}.png"
            if not is_file(image):
                raise DataError(f"{where} is not in {root / 'images'}: add it, or remove the line.")
            mask = partial(open_trimap, trimap) if is_file(trimap) else None
            items.append(Sample(id, partial(open_image, image, upright=False), label, None, mask, path=image))
    if not items:
        raise DataError(f"{home / LISTS[split]} lists no images.")
    classes = tuple(breed_of.get(label, f"class {label + 1}") for label in range(max(breed_of) + 1))
    return Samples(tuple(items), classes)


def is_pets(root: str | Path) -> bool:
    """Return whether the lists of Oxford-IIIT Pet are there."""
    lists = (Path(root) / "annotations" / name for name in LISTS.values())
    return any(path.is_file() for path in lists) and (Path(root) / "images").is_dir()


def open_trimap(path: Path) -> NDArray[np.uint8]:
    """Return a mask, (H, W): 1 object, 0 background, 255 the border between them."""
    import numpy as np

    levels = open_levels(path)
    invalid = levels[(levels < 1) | (levels > 3)]
    if invalid.size:
        raise DataError(
            f"cannot read the mask {path}: a trimap has the values 1, 2 and 3, not {invalid.min()}."
        )
    return np.array(TRIMAP, np.uint8)[levels]


def _entries(path: Path) -> list[tuple[int, str, int]]:
    """Return (line number, image name, class from 0) of each line."""
    entries, line_of = list[tuple[int, str, int]](), dict[str, int]()
    for line, text in numbered_lines(path):
        if text.startswith("#"):
            continue
        fields = text.split()
        if len(fields) < 2 or not is_whole_number(fields[1]) or not 1 <= int(fields[1]) <= MAX_CLASSES:
            raise DataError(
                f"{path} line {line}: {quoted(text)} is not a name and a class from 1 to {MAX_CLASSES}."
            )
        if line_of.setdefault(fields[0], line) != line:
            raise DataError(f"{path} line {line}: image {fields[0]} is in line {line_of[fields[0]]} already.")
        entries.append((line, fields[0], int(fields[1]) - 1))
    return entries
