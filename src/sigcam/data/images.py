"""Find image files, and decode images and masks; mask values are 1 object, 0 background, 255 ignored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
ORIENTATION = 0x0112  # EXIF tag
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270"}
TURNS |= {7: "TRANSVERSE", 8: "ROTATE_90"}  # by orientation
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
Tags = dict[int, Any]
COMMON_MASK_SIZE = (224, 224)  # (height, width) for the masks of one image when their sizes differ


def open_image(path: str | Path, *, upright: bool = True) -> Image.Image:
    """Decode the first frame as RGB: alpha on white, 16-bit and float grey scaled to 8 bits.

    Args:
        upright: rotate the image as its EXIF tag says; False keeps the stored pixels, for annotations that
            refer to them.
    """
    from PIL import Image

    with decoded(Path(path), "") as (image, tags):
        turn = TURNS.get(tags[ORIENTATION]) if upright else None
        return _to_rgb(image.transpose(Image.Transpose[turn]) if turn else image, tags)


@contextmanager
def decoded(path: Path, what: str) -> Iterator[tuple[Image.Image, Tags]]:
    """Yield the first frame and some of its tags; an error meanwhile becomes "cannot read WHAT PATH"."""
    from PIL import Image, UnidentifiedImageError

    failed = f"cannot read {what}{path}"
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder, not an image")
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata does not matter if the pixels can be read
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                written = getattr(image, "tag_v2", {})
                tags = {tag: written.get(tag) for tag in (BITS, PHOTOMETRIC, SAMPLE_FORMAT)}
                tags[ORIENTATION] = _orientation(image)
                image.load()
                yield image, tags
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        limit = f"more than {Image.MAX_IMAGE_PIXELS} pixels"
        raise DataError(f"{failed}: it has {limit}; make it smaller first.") from error
    except UnidentifiedImageError as error:
        reason = "it is not an image that Pillow can read" if path.stat().st_size else "it is empty"
        raise DataError(f"{failed}: {reason}.") from error
    except Exception as error:  # decoders raise almost anything on damaged files: struct.error, SyntaxError
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"{failed}: {' '.join(reason.split()).rstrip('.')[:300]}.") from error


def read_image_size(path: Path, *, upright: bool = True) -> ImageSize | None:
    """Return the size that `open_image` would return, from the file's header; None if it is damaged."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                turned = upright and _orientation(image) in (5, 6, 7, 8)
                return ImageSize(*(image.size[::-1] if turned else image.size))
    except Exception:  # open_image reports it
        return None


def _orientation(image: Image.Image) -> int:
    """Return the orientation in EXIF, before the pixels are loaded; 1, as stored, if there is none."""
    if image.format == "TIFF":
        return 1  # Pillow turns it by itself
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a broken EXIF tag says nothing about the pixels
        return 1


def images_from_paths(paths: Sequence[str | Path]) -> Samples:
    """Return unlabelled samples: the given files, and all images below the given folders, sorted by path.

    Ids are paths relative to the deepest common folder, so they can name output files. Overlays that
    `explain` wrote into a folder are left out: a second run reads what the first one did.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give image files or folders of them.")
        inside = [file for file in list_images(path) if not _is_overlay(file)] if path.is_dir() else [path]
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
    for parent, folders, files in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        images += [path for path in map(Path(parent).joinpath, files) if is_image(path)]
    return sorted(images)


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}.") from error


def _is_overlay(path: Path) -> bool:
    """Return whether `explain` wrote the image: `photo.map.png` beside `photo.map.npy`."""
    return path.name.endswith(".map.png") and path.with_suffix(".npy").is_file()


def is_image(path: Path) -> bool:
    """Return whether the name is that of a visible image file."""
    return path.suffix.lower() in IMAGE_EXTENSIONS and not path.name.startswith(".")


def _to_rgb(image: Image.Image, tags: Tags) -> Image.Image:
    from PIL import Image

    if _is_deep(image):
        return Image.fromarray(_to_8_bits(image, tags)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _is_deep(image: Image.Image) -> bool:
    """Return whether the image is grey of more than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def _to_8_bits(image: Image.Image, tags: Tags) -> NDArray[np.uint8]:
    """Scale deep grey to (H, W) levels from 0 to 255: 12 and 16 bits by their full range; whole numbers of 32
    bits by 255 or 65535, floats by 1, 255 or 65535, whichever is the first to hold all values. Values that
    are negative, larger, or much smaller than that range are scaled by their own; NaN is black."""
    import numpy as np

    stored = np.asarray(image)  # (H, W)
    if image.mode == "I" and tags[BITS] == (32,) and tags[SAMPLE_FORMAT] in (None, (1,)):
        stored = stored.view(np.uint32)  # Pillow takes them for signed numbers
    finite = np.isfinite(stored)
    first = stored.flat[finite.argmax()] if finite.any() else 0
    low, high = (float(end(stored, where=finite, initial=first)) for end in (np.min, np.max))
    full = 4095.0 if tags[BITS] == (12,) else 65535.0
    ranges = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}.get(image.mode, (full,))
    if low >= 0 and high <= ranges[-1]:
        top = next(top for top in ranges if high <= top)
        low, high = 0.0, top if top == ranges[0] or high * 16 > top else high
    levels = np.empty(stored.shape, np.uint8)
    for rows in range(0, len(stored), 256):  # in parts: an image of 89 megapixels takes 700 MB as float64
        part = np.nan_to_num(stored[rows : rows + 256].astype(np.float64), nan=low, posinf=high, neginf=low)
        levels[rows : rows + 256] = ((part - low) * (255 / max(high - low, 1e-12))).round().clip(0, 255)
    return 255 - levels if tags[PHOTOMETRIC] == 0 else levels  # 0: the lowest value is white


def open_masks(objects: Sequence[Path], ignored: Sequence[Path]) -> NDArray[np.uint8]:
    """Combine mask files, (H, W): 1 in any object mask, else 255 in any ignore mask (PROTOCOL 5.5)."""
    import numpy as np

    masks = [_open_grey(path, deep=True) for path in (*objects, *ignored)]
    if len({mask.shape for mask in masks}) > 1:
        masks = [resize_mask(mask, COMMON_MASK_SIZE) for mask in masks]
    combined = np.zeros(masks[0].shape, np.uint8)
    for index, mask in reversed(list(enumerate(masks))):  # objects last, so that they win
        combined[mask > 0] = 1 if index < len(objects) else 255
    return combined


def open_levels(path: Path) -> NDArray[np.uint8]:
    """Return the values of a mask file as stored, (H, W), at most 255; for a palette image, its indices."""
    import numpy as np

    return _open_grey(path, deep=True, palette=True).clip(0, 255).astype(np.uint8)


def open_brightness(path: Path) -> NDArray[np.uint8]:
    """Return the brightness of a mask file, (H, W) from 0 to 255; that of deep grey as in `open_image`."""
    return _open_grey(path)


def resize_mask(mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize an (H, W) mask to (height, width) by nearest neighbour, bit-equal to OpenCV."""
    import numpy as np

    rows, columns = (  # these two divisions round as in OpenCV; i * H // height differs for some sizes
        np.minimum((np.arange(new) * (1 / (new / old))).astype(np.int64), old - 1)
        for new, old in zip(size, mask.shape, strict=True)
    )
    resized: NDArray[Any] = mask[rows[:, None], columns]
    return resized


def _open_grey(path: Path, *, deep: bool = False, palette: bool = False) -> NDArray[Any]:
    """Return an image as 8-bit grey, (H, W); `deep` grey and indices into a `palette` as stored, NaN as 0."""
    import numpy as np

    with decoded(path, "the mask ") as (image, tags):
        if _is_deep(image):
            return np.nan_to_num(np.asarray(image)) if deep else _to_8_bits(image, tags)
        if image.mode == "LAB":
            image = image.convert("RGB")  # which has no way to grey of its own
        return np.asarray(image if palette and image.mode == "P" else image.convert("L"))
