"""Find image files, and decode images and masks; mask values are 1 object, 0 background, 255 ignored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

IMAGE_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
EXIF_ORIENTATION = 0x0112
COMMON_MASK_SIZE = (224, 224)  # (height, width) for the masks of one image when their sizes differ


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
        limit = f"more than {Image.MAX_IMAGE_PIXELS} pixels"
        raise DataError(f"cannot read {path}: it has {limit}; make it smaller first.") from error
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


def open_masks(objects: Sequence[Path], ignored: Sequence[Path]) -> NDArray[np.uint8]:
    """Combine mask files, (H, W): 1 in any object mask, else 255 in any ignore mask (PROTOCOL 5.5)."""
    import numpy as np

    deep = ("I", "I;16", "I;16L", "I;16B", "I;16N")
    masks = [_open_grey(path, as_stored=deep) for path in (*objects, *ignored)]
    if len({mask.shape for mask in masks}) > 1:
        masks = [resize_mask(mask, COMMON_MASK_SIZE) for mask in masks]
    combined = np.zeros(masks[0].shape, np.uint8)
    for index, mask in reversed(list(enumerate(masks))):  # objects last, so that they win
        combined[mask > 0] = 1 if index < len(objects) else 255
    return combined


def open_levels(path: Path) -> NDArray[np.uint8]:
    """Return the values of a mask file as stored, (H, W); for a palette image, its indices."""
    import numpy as np

    return _open_grey(path, as_stored=("L", "P")).astype(np.uint8)


def resize_mask(mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize an (H, W) mask to (height, width) by nearest neighbour, bit-equal to OpenCV."""
    import numpy as np

    rows, columns = (  # these two divisions round as in OpenCV; i * H // height differs for some sizes
        np.minimum((np.arange(new) * (1 / (new / old))).astype(np.int64), old - 1)
        for new, old in zip(size, mask.shape, strict=True)
    )
    resized: NDArray[Any] = mask[rows[:, None], columns]
    return resized


def _open_grey(path: Path, as_stored: Collection[str]) -> NDArray[Any]:
    """Return the pixels of an image of one of these modes as stored, of any other mode as 8-bit grey."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image if image.mode in as_stored else image.convert("L"))
    except Exception as error:  # decoders raise almost anything on damaged files
        raise DataError(f"cannot read the mask {path}: {error}.") from error
