"""Class folders of images, optionally with boxes in boxes.csv."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from sigcam.core.errors import DataError
from sigcam.data.images import is_image, list_images, open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box, check_length, is_file, quoted, read_text, whole_numbers

BOXES_CSV = "boxes.csv"
SPLIT_FOLDERS = {  # folder names to try, in order: many data sets have only one of val and test
    "train": ("train",),
    "val": ("val", "valid", "validation", "test"),
    "test": ("test", "val", "valid", "validation"),
}


def folder(root: str | Path, *, split: str = "train") -> Samples:
    """Return images labelled by their folder, root/<class>/<file>; classes are the sorted folder names.

    If root holds train/ and val/ or test/ with class folders inside, `split` selects one of them and train/
    defines the classes of all; otherwise root is a single split, whatever its name. A file boxes.csv beside
    the class folders, or beside train/, holds boxes: lines of image,x0,y0,x1,y1 or image,x0,y0,x1,y1,class,
    with the image as a path relative to the file, and pixels of the upright image; x1 and y1 are the last
    pixel inside. Boxes of another class than the image's are left out.
    """
    root = Path(root)
    names = _subfolders(root)
    candidates = dict.fromkeys(name for group in SPLIT_FOLDERS.values() for name in group)
    splits = [name for name in candidates if name in names and _holds_class_folders(root / name)]
    if "train" not in splits or (len(splits) == 1 and len(names) > 1):
        return _with_boxes(_labelled_images(root, root, names), (root,))
    name = next((name for name in SPLIT_FOLDERS.get(split, (split,)) if name in splits), None)
    if name is None:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(splits)}.")
    samples = _labelled_images(root, root / name, _subfolders(root / "train"))
    return _with_boxes(samples, (root / name, root))


def _labelled_images(root: Path, top: Path, classes: list[str]) -> Samples:
    """Return the images of the class folders in top, with ids relative to root."""
    names = _subfolders(top)
    if not names:
        content = "images but no class folders" if list_images(top) else "no class folders and no images"
        raise DataError(f"{top} is not a labelled set: it holds {content}. Put them in {top}/<class>/<file>.")
    items: list[Sample] = []
    for name in names:
        if name not in classes:
            raise DataError(f"{top / name} is not a class of {root / 'train'}: add it there or remove it.")
        files = list_images(top / name)
        if not files:
            raise DataError(f"class folder {top / name} holds no images: fill it or remove it.")
        paths = ((f.relative_to(root).as_posix(), f) for f in files)
        items += [Sample(id, partial(open_image, f), classes.index(name), path=f) for id, f in paths]
    return Samples(tuple(items), tuple(classes))


def _with_boxes(samples: Samples, homes: Sequence[Path]) -> Samples:
    """Add the boxes of the first boxes.csv in these folders."""
    file = next((home / BOXES_CSV for home in homes if (home / BOXES_CSV).is_file()), None)
    if file is None:
        return samples
    labels = {name: label for label, name in enumerate(samples.classes)}
    sample_of = {str(sample.path): sample for sample in samples}
    boxes = dict[str, list[Box]]()
    size_of = cache(read_image_size)
    for line, image, box, name in _box_rows(file):
        where, path = f"{file} line {line}: image {image}", file.parent / image
        sample = sample_of.get(str(path))
        if sample is None and (file.parent == homes[0] or not is_file(path)):
            raise DataError(f"{where} is not in {file.parent}: correct its path, or remove the line.")
        if name and name not in labels:
            raise DataError(f"{where} has a box of class {quoted(name)}, and no class folder has that name.")
        if sample is None or (name and labels[name] != sample.label):
            continue  # of another split, or of another object in the image
        check_box(box, size_of(path), where)
        boxes.setdefault(sample.id, []).append(box)
    items = (replace(s, boxes=tuple(boxes[s.id])) if s.id in boxes else s for s in samples)
    return Samples(tuple(items), samples.classes)


def _box_rows(file: Path) -> Iterator[tuple[int, str, Box, str]]:
    """Yield (line number, image, box, class name or "") of each line; a header line is skipped."""
    reader = csv.reader(io.StringIO(read_text(file)))
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(f"{file} line {reader.line_num}: {error}: look for an open quote.") from error
    for line, row in rows:
        text = ",".join(row)
        check_length(text, f"{file} line {line}")
        if "\n" in text:
            raise DataError(f"{file} line {line}: {quoted(text)} is several lines: look for an open quote.")
        fields = [field.strip() for field in row]
        if not any(fields) or (line == 1 and fields[:2] == ["image", "x0"]):
            continue
        if len(fields) not in (5, 6) or not fields[0]:
            raise DataError(f"{file} line {line}: {quoted(text)} is not image,x0,y0,x1,y1[,class].")
        x0, y0, x1, y1 = whole_numbers(fields[1:5], "x0,y0,x1,y1", f"{file} line {line}: image {fields[0]}")
        yield line, fields[0], (x0, y0, x1, y1), "".join(fields[5:])


def _subfolders(root: Path) -> list[str]:
    """Return the names of the visible folders in root, sorted."""
    try:
        return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        raise DataError(f"{root} does not exist: give a folder with one folder per class.") from None
    except OSError as error:
        raise DataError(f"cannot list {root}: {error.strerror}. Give a folder of class folders.") from error


def _holds_class_folders(path: Path) -> bool:
    return bool(_subfolders(path)) and not any(is_image(entry) for entry in path.iterdir())
