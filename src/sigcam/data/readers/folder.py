"""Pictures on disk: class folders, perhaps with a file of boxes; plain lists of files; the one door that
decodes every picture."""

from __future__ import annotations

import csv
import os
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.sample import Box, Sample, Samples, Size

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
BOXES = "boxes.csv"
MOST_CLASSES = 100_000  # a label beyond it is a slip, and a name for each class before it fills the memory
MOST_DIGITS = 18  # of a whole number: it fits 64 bits
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


def pictures(paths: Sequence[str | Path]) -> Samples:
    """Unlabelled pictures: files as given, and the pictures in and below folders, each folder sorted by name.

    Ids are paths below the deepest folder that holds them all, so they can name output files.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give picture files or folders of them.")
        inside = list_pictures(path) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} holds no pictures: looked for {_extensions()}.")
        files += [file.parent.resolve() / file.name for file in inside]
    if not files:
        raise DataError("no pictures given: name at least one file or folder.")
    files = list(dict.fromkeys(files))
    top = Path(os.path.commonpath([file.parent for file in files]))
    named = ((f.relative_to(top).as_posix(), f) for f in files)
    return Samples(tuple(Sample(id, partial(open_picture, f), path=f) for id, f in named), ())


def open_picture(path: str | Path, *, upright: bool = True) -> Image.Image:
    """The picture as RGB: upright by its EXIF tag, alpha laid on white, deep grey in 8 bits, first frame.

    Args:
        upright: False leaves the pixels as they are stored, for boxes that are in stored pixels.
    """
    from PIL import Image, UnidentifiedImageError

    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder, not a picture")
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata: the pixels decide whether a file is readable
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                return _rgb(_upright(image) if upright else image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        limit = Image.MAX_IMAGE_PIXELS
        raise DataError(
            f"cannot read {path}: it has more than {limit} pixels; make it smaller first."
        ) from error
    except UnidentifiedImageError as error:
        reason = (
            "it is not a picture, or of a kind that Pillow does not know"
            if path.stat().st_size
            else "it is empty"
        )
        raise DataError(f"cannot read {path}: {reason}.") from error
    except (
        Exception
    ) as error:  # on damaged files decoders raise nearly everything: struct.error, SyntaxError, ...
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"cannot read {path}: {reason.rstrip('.')}.") from error


def picture_size(path: Path, *, upright: bool = True) -> Size | None:
    """Width and height as `open_picture` would give them, from the header; None where that is damaged."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                turned = upright and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                return image.size[::-1] if turned else image.size
    except Exception:  # told of when it is opened
        return None


def check_box(box: Box, size: Size | None, where: str) -> None:
    """DataError, which begins with `where`, for a box that ends beyond a picture of `size`, where that is
    known; x1 = width and y1 = height are let through, as lists that count from 1 have them."""
    if size is not None and (box[2] > size[0] or box[3] > size[1]):
        raise DataError(f"{where} has a box {box} beyond its {size[0]} x {size[1]} pixels: correct it.")


def list_pictures(root: Path) -> list[Path]:
    """Visible pictures in and below root, sorted by path."""
    found: list[Path] = []
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for path in map(Path(at).joinpath, files) if is_picture(path)]
    return sorted(found)


def is_picture(path: Path) -> bool:
    """Whether its name is that of a picture that is not hidden."""
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


def subfolders(root: Path) -> list[str]:
    """Names of the visible folders in root, sorted."""
    try:
        return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        raise DataError(
            f"{root} does not exist: give a folder with one folder of pictures per class."
        ) from None
    except OSError as error:
        raise DataError(f"cannot list {root}: {error.strerror}. Give a folder of class folders.") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with text on them, stripped, with their numbers from 1."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def is_whole(text: str) -> bool:
    """Whether it is a whole number, 0 or more, that fits 64 bits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def read_text(path: Path) -> str:
    """The file's text: UTF-8, with a byte order mark or without."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken tag says nothing about the pixels
        return image


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Deep grey as mode L, 16-bit files by their full range.

    I and F have no full range: the least of 1 (F only), 255 and 65535 that holds all values, else their own.
    """
    import numpy as np
    from PIL import Image

    pixels = np.nan_to_num(np.asarray(image, dtype=np.float64))  # (H, W)
    low, high = float(pixels.min()), float(pixels.max())
    tops = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}.get(image.mode, (65535.0,))
    if low >= 0 and high <= tops[-1]:
        low, high = 0.0, next(top for top in tops if high <= top)
    scaled = (pixels - low) * (255 / max(high - low, 1e-12))
    return Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))


def _labelled(root: Path, top: Path, classes: list[str]) -> Samples:
    """The pictures of the class folders in top, with ids relative to root."""
    found = subfolders(top)
    if not found:
        images = bool(list_pictures(top))
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
        files = list_pictures(top / name)
        if not files:
            raise DataError(f"class folder {top / name} holds no pictures: fill it or remove it.")
        label = classes.index(name)
        named = ((f.relative_to(root).as_posix(), f) for f in files)
        items += [Sample(id, partial(open_picture, f), label, path=f) for id, f in named]
    return Samples(tuple(items), tuple(classes))


def _with_boxes(samples: Samples, homes: Sequence[Path]) -> Samples:
    """The samples with the boxes of the first boxes.csv that is there, None where it has none."""
    file = next((home / BOXES for home in homes if (home / BOXES).is_file()), None)
    if file is None:
        return samples
    labels = {name: label for label, name in enumerate(samples.classes)}
    known = {str(sample.path): sample for sample in samples}
    sizes, boxes = dict[str, Size | None](), dict[str, list[Box]]()
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
            sizes[str(path)] = picture_size(path)
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
        wrong = next((reprlib.repr(field) for field in fields[1:5] if not is_whole(field)), None)
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
    return bool(subfolders(path)) and not any(is_picture(entry) for entry in path.iterdir())


def _extensions() -> str:
    return " ".join(sorted(extension.removeprefix(".") for extension in EXTENSIONS))
