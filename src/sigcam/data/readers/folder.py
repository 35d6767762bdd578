"""Pictures on disk: class folders, perhaps with a file of boxes; plain lists of files; the one door that
decodes every picture."""

from __future__ import annotations

import csv
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import is_image, list_images, open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box, is_whole_number, read_text, subfolders

if TYPE_CHECKING:
    pass

BOXES = "boxes.csv"
SPLIT_FOLDERS = {  # what to look for, in this order: many data sets have only one of val and test
    "train": ("train",),
    "val": ("val", "valid", "validation", "test"),
    "test": ("test", "val", "valid", "validation"),
}


def folder(root: str | Path, *, split: str = "train") -> Samples:
    """Pictures labelled by the folder they are in, root/<class>/<file>; classes are the sorted folder names.

    Where root holds train/ and val/ or test/ with class folders inside, `split` picks one and train/ names
    the classes of all; otherwise root is one split, whatever its name. A file boxes.csv beside the class
    folders, or beside train/, holds boxes: lines of image,x0,y0,x1,y1 or image,x0,y0,x1,y1,class, the image
    as a path from there, pixels as the picture is opened, x1 and y1 the last inside. A box of another class
    than the picture's is left out.
    """
    root = Path(root)
    names = subfolders(root)
    splits = [name for names_of in SPLIT_FOLDERS.values() for name in names_of if name in names]
    splits = [name for name in dict.fromkeys(splits) if _holds_class_folders(root / name)]
    if "train" not in splits or (len(splits) == 1 and len(names) > 1):
        return _with_boxes(_labelled(root, root, names), (root,))
    found = next((name for name in SPLIT_FOLDERS.get(split, (split,)) if name in splits), None)
    if found is None:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(splits)}.")
    samples = _labelled(root, root / found, subfolders(root / "train"))
    return _with_boxes(samples, (root / found, root))


def _labelled(root: Path, top: Path, classes: list[str]) -> Samples:
    """The pictures of the class folders in top, with ids relative to root."""
    found = subfolders(top)
    if not found:
        images = bool(list_images(top))
        hint = (
            "it holds pictures but no class folders"
            if images
            else "it holds no class folders and no pictures"
        )
        raise DataError(f"{top} is not a labelled set: {hint}. Put them in {top}/<class>/<file>.")
    items: list[Sample] = []
    for name in found:
        if name not in classes:
            raise DataError(f"{top / name} is not a class of {root / 'train'}: add it there or take it out.")
        files = list_images(top / name)
        if not files:
            raise DataError(f"class folder {top / name} holds no pictures: fill it or remove it.")
        label = classes.index(name)
        named = ((f.relative_to(root).as_posix(), f) for f in files)
        items += [Sample(id, partial(open_image, f), label, path=f) for id, f in named]
    return Samples(tuple(items), tuple(classes))


def _with_boxes(samples: Samples, homes: Sequence[Path]) -> Samples:
    """The samples with the boxes of the first boxes.csv that is there, None where it has none."""
    file = next((home / BOXES for home in homes if (home / BOXES).is_file()), None)
    if file is None:
        return samples
    labels = {name: label for label, name in enumerate(samples.classes)}
    known = {str(sample.path): sample for sample in samples}
    sizes, boxes = dict[str, ImageSize | None](), dict[str, list[Box]]()
    for line, image, box, name in _box_rows(file):
        where, path = f"{file} line {line}: image {image}", file.parent / image
        sample = known.get(str(path))
        if sample is None and (file.parent == homes[0] or not path.is_file()):
            raise DataError(f"{where} is not in {file.parent}: correct its path, or remove the line.")
        if name and name not in labels:
            raise DataError(f"{where} has a box of class {name!r}, and no class folder has that name.")
        if sample is None or (name and labels[name] != sample.label):
            continue  # of another split, or on another thing in the picture
        if str(path) not in sizes:
            sizes[str(path)] = read_image_size(path)
        check_box(box, sizes[str(path)], where)
        boxes.setdefault(sample.id, []).append(box)
    marked = (replace(s, boxes=tuple(boxes[s.id])) if s.id in boxes else s for s in samples)
    return Samples(tuple(marked), samples.classes)


def _box_rows(file: Path) -> Iterator[tuple[int, str, Box, str]]:
    """Line number, image, box, class name or nothing; a first line of column names is passed over."""
    reader = csv.reader(read_text(file).splitlines())
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(
            f"{file} line {reader.line_num}: {error}: look for a quote that is not closed."
        ) from error
    for line, row in rows:
        fields = [field.strip() for field in row]
        if not any(fields) or (line == 1 and fields[:2] == ["image", "x0"]):
            continue
        if len(fields) not in (5, 6) or not fields[0]:
            raise DataError(
                f"{file} line {line}: {','.join(row)!r} is not image,x0,y0,x1,y1 or with a class."
            )
        wrong = next((reprlib.repr(field) for field in fields[1:5] if not is_whole_number(field)), None)
        if wrong is not None:
            raise DataError(
                f"{file} line {line}: image {fields[0]} has {wrong} where x0,y0,x1,y1 are whole numbers."
            )
        x0, y0, x1, y1 = map(int, fields[1:5])
        if x1 < x0 or y1 < y0:
            box = (x0, y0, x1, y1)
            raise DataError(f"{file} line {line}: image {fields[0]} has an inverted box {box}.")
        yield line, fields[0], (x0, y0, x1, y1), "".join(fields[5:])


def _holds_class_folders(path: Path) -> bool:
    return bool(subfolders(path)) and not any(is_image(entry) for entry in path.iterdir())
