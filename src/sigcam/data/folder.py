"""Pictures on disk: class folders, plain lists of files, and the one door that decodes every file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.data import Sample, Samples
from sigcam.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
SPLIT_FOLDERS = {  # what to look for, in this order: many data sets have only one of val and test
    "train": ("train",),
    "val": ("val", "valid", "validation", "test"),
    "test": ("test", "val", "valid", "validation"),
}


def folder(root: str | Path, *, split: str = "train") -> Samples:
    """Pictures labelled by the folder they are in, root/<class>/<file>; classes are the sorted folder names.

    Where root holds train/ and val/ or test/ with class folders inside, `split` picks one and train/ names
    the classes of all; otherwise root is one split, whatever its name.
    """
    root = Path(root)
    names = _subfolders(root)
    splits = [name for names_of in SPLIT_FOLDERS.values() for name in names_of if name in names]
    splits = [name for name in dict.fromkeys(splits) if _holds_class_folders(root / name)]
    if "train" not in splits or (len(splits) == 1 and len(names) > 1):
        return _labelled(root, root, names)
    found = next((name for name in SPLIT_FOLDERS.get(split, (split,)) if name in splits), None)
    if found is None:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(splits)}.")
    return _labelled(root, root / found, _subfolders(root / "train"))


def pictures(paths: Sequence[str | Path]) -> Samples:
    """Unlabelled pictures: files as given, and the pictures in and below folders, each folder sorted by name.

    Ids are paths below the deepest folder that holds them all, so they can name output files.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give picture files or folders of them.")
        inside = _list_pictures(path) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} holds no pictures: looked for {_extensions()}.")
        files += [file.parent.resolve() / file.name for file in inside]
    if not files:
        raise DataError("no pictures given: name at least one file or folder.")
    files = list(dict.fromkeys(files))
    top = Path(os.path.commonpath([file.parent for file in files]))
    return Samples(tuple(Sample(f.relative_to(top).as_posix(), partial(open_picture, f)) for f in files), ())


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
    found = _subfolders(top)
    if not found:
        images = bool(_list_pictures(top))
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
        files = _list_pictures(top / name)
        if not files:
            raise DataError(f"class folder {top / name} holds no pictures: fill it or remove it.")
        label = classes.index(name)
        items += [Sample(f.relative_to(root).as_posix(), partial(open_picture, f), label) for f in files]
    return Samples(tuple(items), tuple(classes))


def _subfolders(root: Path) -> list[str]:
    """Names of the visible folders in root, sorted."""
    try:
        return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        raise DataError(
            f"{root} does not exist: give a folder with one folder of pictures per class."
        ) from None
    except OSError as error:
        raise DataError(f"cannot list {root}: {error.strerror}. Give a folder of class folders.") from error


def _holds_class_folders(path: Path) -> bool:
    return bool(_subfolders(path)) and not any(_is_picture(entry) for entry in path.iterdir())


def _list_pictures(root: Path) -> list[Path]:
    """Visible pictures in and below root, sorted by path."""
    found: list[Path] = []
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for path in map(Path(at).joinpath, files) if _is_picture(path)]
    return sorted(found)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


def _extensions() -> str:
    return " ".join(sorted(extension.removeprefix(".") for extension in EXTENSIONS))
