"""Find image files and decode them as upright RGB."""

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
EXIF_ORIENTATION = 0x0112


def open_image(path: str | Path, *, upright: bool = True) -> Image.Image:
    """Decode the first frame as RGB: alpha on white, 16-bit and float grey scaled to 8 bits.

    Args:
        upright: rotate the image as its EXIF tag says; False keeps the stored pixels, for annotations that
            refer to them.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder, not an image")
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata does not matter if the pixels can be read
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                try:
                    turned = ImageOps.exif_transpose(image) if upright else image
                except Exception:  # a broken EXIF tag says nothing about the pixels
                    turned = image
                return _to_rgb(turned)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        limit = Image.MAX_IMAGE_PIXELS
        raise DataError(
            f"cannot read {path}: it has more than {limit} pixels; make it smaller first."
        ) from error
    except UnidentifiedImageError as error:
        reason = "it is not an image that Pillow can read" if path.stat().st_size else "it is empty"
        raise DataError(f"cannot read {path}: {reason}.") from error
    except Exception as error:  # decoders raise almost anything on damaged files: struct.error, SyntaxError
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"cannot read {path}: {reason.rstrip('.')}.") from error


def read_image_size(path: Path, *, upright: bool = True) -> ImageSize | None:
    """Return the size that `open_image` would return, from the file's header; None if it is damaged."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                turned = upright and image.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
                return ImageSize(*(image.size[::-1] if turned else image.size))
    except Exception:  # open_image reports it
        return None


def images_from_paths(paths: Sequence[str | Path]) -> Samples:
    """Return unlabelled samples: the given files, and all images below the given folders, sorted by path.

    Ids are paths relative to the deepest common folder, so they can name output files.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give image files or folders of them.")
        inside = list_images(path) if path.is_dir() else [path]
        if not inside:
            extensions = " ".join(sorted(extension.removeprefix(".") for extension in IMAGE_EXTENSIONS))
            raise DataError(f"{path} holds no images: looked for {extensions}.")
        files += [file.parent.resolve() / file.name for file in inside]
    if not files:
        raise DataError("no images given: name at least one file or folder.")
    files = list(dict.fromkeys(files))
    top = Path(os.path.commonpath([file.parent for file in files]))
    samples = (Sample(f.relative_to(top).as_posix(), partial(open_image, f), path=f) for f in files)
    return Samples(tuple(samples), ())


def list_images(root: Path) -> list[Path]:
    """Return the image files in and below root, sorted by path; hidden files and folders are left out."""
    images: list[Path] = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        images += [path for path in map(Path(parent).joinpath, files) if is_image(path)]
    return sorted(images)


def is_image(path: Path) -> bool:
    """Return whether the name is that of a visible image file."""
    return path.suffix.lower() in IMAGE_EXTENSIONS and not path.name.startswith(".")


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return _to_8_bits(image).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale deep grey to mode L: 16-bit images by their full range, I and F images by the smallest of the
    ranges up to 1 (F only), 255 and 65535 that holds all values, else by their own."""
    import numpy as np
    from PIL import Image

    pixels = np.nan_to_num(np.asarray(image, dtype=np.float64))  # (H, W)
    low, high = float(pixels.min()), float(pixels.max())
    ranges = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}.get(image.mode, (65535.0,))
    if low >= 0 and high <= ranges[-1]:
        low, high = 0.0, next(top for top in ranges if high <= top)
    scaled = (pixels - low) * (255 / max(high - low, 1e-12))
    return Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
