"""Pictures on disk: find them, and decode them to upright RGB."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples

if TYPE_CHECKING:
    from PIL import Image

IMAGE_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"})


def open_image(path: str | Path, *, upright: bool = True) -> Image.Image:
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


def read_image_size(path: Path, *, upright: bool = True) -> ImageSize | None:
    """Width and height as `open_picture` would give them, from the header; None where that is damaged."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                turned = upright and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                return ImageSize(*(image.size[::-1] if turned else image.size))
    except Exception:  # told of when it is opened
        return None


def images_from_paths(paths: Sequence[str | Path]) -> Samples:
    """Unlabelled pictures: files as given, and the pictures in and below folders, each folder sorted by name.

    Ids are paths below the deepest folder that holds them all, so they can name output files.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give picture files or folders of them.")
        inside = list_images(path) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} holds no pictures: looked for {_extensions()}.")
        files += [file.parent.resolve() / file.name for file in inside]
    if not files:
        raise DataError("no pictures given: name at least one file or folder.")
    files = list(dict.fromkeys(files))
    top = Path(os.path.commonpath([file.parent for file in files]))
    named = ((f.relative_to(top).as_posix(), f) for f in files)
    return Samples(tuple(Sample(id, partial(open_image, f), path=f) for id, f in named), ())


def list_images(root: Path) -> list[Path]:
    """Visible pictures in and below root, sorted by path."""
    found: list[Path] = []
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for path in map(Path(at).joinpath, files) if is_image(path)]
    return sorted(found)


def is_image(path: Path) -> bool:
    """Whether its name is that of a picture that is not hidden."""
    return path.suffix.lower() in IMAGE_EXTENSIONS and not path.name.startswith(".")


def _extensions() -> str:
    return " ".join(sorted(extension.removeprefix(".") for extension in IMAGE_EXTENSIONS))


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
