"""Images that visitors can open: uploads and a gallery, checked before they are decoded."""

import io
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from PIL import Image

from sigcam.core.errors import DataError, MissingExtra, SigcamError
from sigcam.core.files import file_stamp, hash_of, write_atomic
from sigcam.data.images import images_from_paths, open_image
from sigcam.data.photographs import example_photographs
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Sample, Samples
from sigcam.ui.security import MAX_UPLOAD_BYTES

MAX_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow starts programs for some others
PHOTOGRAPHS_SHOWN = ("chelsea", "coffee", "motorcycle")  # the embedded classifier has classes for these
SHAPES_SHOWN = (42, 86, 58, 64, 73, 90)  # birds of the test split that the embedded classifier localizes


def open_upload(path: Path, uploads: Path) -> Image.Image:
    """Open an image in the folder `uploads`; DataError if it lies elsewhere, is too large or not an image.

    The file is kept: visitors who upload the same image share it.
    """
    name = path.name
    try:
        if not path.is_file() or not path.resolve().is_relative_to(uploads.resolve()):
            raise DataError(f"{name} was not uploaded to this page, so it is not opened.")
        if path.stat().st_size > MAX_UPLOAD_BYTES:
            raise DataError(f"{name} has more than {MAX_UPLOAD_BYTES >> 20} MB: make it smaller first.")
        return _open_checked(path, name, partial(open_image, path))
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or 'it is not an image'}.") from error


def _open_checked(path: Path, name: str, decode: Callable[[], Image.Image]) -> Image.Image:
    """Decode an image of a supported format that is not too large; errors give its name, not its path."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MAX_PIXELS is below Pillow's own limit
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        width = height = MAX_PIXELS
    except Exception as error:  # decoders raise nearly everything
        formats = "JPEG, PNG, WebP, GIF, BMP or TIFF"
        raise DataError(f"cannot read {name}: it is damaged, or not a {formats} image.") from error
    if width * height > MAX_PIXELS:
        raise DataError(f"{name} has more than {MAX_PIXELS // 1_000_000} megapixels: make it smaller first.")
    try:
        return decode()
    except DataError as error:
        raise DataError(str(error).replace(str(path), name)) from error


@dataclass(frozen=True)
class ImageGallery:
    """Images that a visitor chooses by index; none outside the folder `root` is opened."""

    samples: Samples
    root: Path | None = None
    credits: Mapping[str, str] = field(default_factory=dict)  # of examples, by name
    _thumbnail_lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: object) -> Sample:
        """Return the sample at `index`; DataError for anything else that a browser may send."""
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.samples):
            raise DataError(f"no such image: choose one of the {len(self.samples)} shown.")
        return self.samples[index]

    def example(self, index: object) -> str:
        """Return the name of an example, which links may hold; "" for a file of the folder."""
        return "" if self.root else self.sample(index).id

    def thumbnail(self, index: object, folder: Path) -> Path:
        """Return the file of a small copy of an image, grey if the image cannot be read.

        The file is written once and whole: gradio would write an image again for every visitor, while others
        load it. The copy of a replaced image is another file.
        """
        path = self.sample(index).path
        file = folder / f"{hash_of([index, path and file_stamp(path)])}.webp"
        try:
            os.utime(file)  # gradio removes old files
        except FileNotFoundError:
            data = io.BytesIO()
            self._small(index).save(data, "WEBP")
            with self._thumbnail_lock:
                folder.mkdir(exist_ok=True)
                write_atomic(file, data.getvalue())
        return file

    def _small(self, index: object) -> Image.Image:
        try:
            image = self.open(index)[1]
            image.thumbnail((128, 128))
        except (SigcamError, OSError):
            return Image.new("RGB", (128, 128), "#888888")
        return image

    def open(self, index: object) -> tuple[str, Image.Image]:
        """Return the name of the image at `index`, and the image."""
        sample = self.sample(index)
        if sample.path is None:
            return sample.id, sample.open()
        if not sample.path.is_file():  # also false for a loop of links, or a pipe, which would wait for ever
            raise DataError(f"{sample.id} is no longer a file in the folder: choose another image.")
        if self.root is not None and not sample.path.resolve().is_relative_to(self.root.resolve()):
            raise DataError(f"{sample.id} links to a file outside the folder, so it is not opened.")
        return sample.id, _open_checked(sample.path, sample.id, sample.open)


def _examples() -> ImageGallery:
    """Return photographs, or synthetic birds if there are none."""
    try:
        photographs = example_photographs(PHOTOGRAPHS_SHOWN)
    except MissingExtra:
        birds = shapes(max(SHAPES_SHOWN) + 1, split="test", size=320)
        empty_scene = scenes(SHAPES_SHOWN[0] + 1, size=320)[-1]  # the first example without its bird
        return ImageGallery(Samples((*(birds[i] for i in SHAPES_SHOWN), empty_scene), birds.classes))
    samples = (Sample(p.name, partial(open_image, p.path), path=p.path) for p in photographs)
    return ImageGallery(Samples(tuple(samples), ()), credits={p.name: p.credit for p in photographs})


def open_gallery(data: str, format: str | None) -> tuple[ImageGallery, bool]:
    """Return the images to choose from, and whether they have labels to fit a branch on."""
    if not data:
        return _examples(), False
    if data.partition(":")[0] == "shapes" and format in (None, "shapes"):
        return ImageGallery(open_dataset(data, format=format, split="test")), True
    labelled = True
    try:
        samples = open_dataset(data, format=format, split="test")
    except DataError:
        if format is not None:
            raise
        samples, labelled = images_from_paths([data]), False  # raises if there are no images either
    if not len(samples):
        raise DataError(f"{data} contains no images.")
    return ImageGallery(samples, Path(data)), labelled
