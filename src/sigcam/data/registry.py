"""READERS: every data set layout that can be read, and `open_dataset`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples

if TYPE_CHECKING:
    pass


def open_dataset(path: str | Path, *, format: str | None = None, split: str = "train") -> Samples:
    """The samples of one split of a data set, read by `READERS[format]`; None guesses the format."""
    name = guess_format(path) if format is None else format
    if name not in READERS:
        raise DataError(f"there is no data format {name!r}: choose one of {', '.join(READERS)}.")
    return READERS[name](path, split=split)


def open_training_data(path: str | Path, format: str | None) -> Samples:
    """The training split of a data set; DataError unless it has two classes with two images each."""
    samples = open_dataset(path, format=format, split="train")
    if len(samples.classes) < 2:
        raise DataError(
            f"the data has one class ({samples.classes[0]}): at least two are needed to tell them apart."
        )
    counts = Counter(sample.label or 0 for sample in samples)
    few = next((name for label, name in enumerate(samples.classes) if counts[label] < 2), None)
    if few is not None:
        raise DataError(f"class {few!r} has one image: give each class at least two, or remove its folder.")
    return samples


def open_validation_data(path: str, format: str | None, train: Samples) -> Samples | None:
    """The val split of a data set; None if it has none of its own: its test split or training images."""
    try:
        val = open_dataset(path, format=format, split="val")
    except DataError as error:
        if "has no split" in str(error):
            return None
        raise
    train_ids = {sample.id for sample in train}
    is_folder = (format or guess_format(path)) == "folder"  # which reads test/ if there is no val/
    if any(sample.id in train_ids or (is_folder and sample.id.startswith("test/")) for sample in val):
        return None
    return val


def guess_format(path: str | Path) -> str:
    """The reader that fits: the words `shapes` and `shapes:COUNT`, not paths, name the synthetic set; lists
    of image ids the layout of the WSOL evaluator; a data set's own files its own; the rest is class
    folders."""
    from sigcam.data.readers.cars import holds_cars
    from sigcam.data.readers.cub import holds_cub
    from sigcam.data.readers.ilsvrc import holds_ilsvrc
    from sigcam.data.readers.pets import holds_pets
    from sigcam.data.readers.wsol import holds_metadata

    if isinstance(path, str) and path.partition(":")[0] == "shapes":
        return "shapes"
    tests = {
        "wsol": holds_metadata,
        "cub": holds_cub,
        "cars": holds_cars,
        "pets": holds_pets,
        "ilsvrc": holds_ilsvrc,
    }
    return next((name for name, fits in tests.items() if fits(path)), "folder")


def read_shapes(path: str | Path, *, split: str = "train") -> Samples:
    """The synthetic birds: `shapes` for the default count, `shapes:500` for 500."""
    from sigcam.data.readers.shapes import shapes

    word, colon, count = str(path).partition(":")
    if word != "shapes" or (colon and not count.isdecimal()):
        raise DataError(f"cannot read {str(path)!r} as shapes: write shapes, or shapes:500 for a count.")
    return shapes(int(count), split=split) if colon else shapes(split=split)


def read_folder(path: str | Path, *, split: str = "train") -> Samples:
    """Class folders of pictures, and boxes.csv."""
    from sigcam.data.readers.folder import folder

    return folder(path, split=split)


def read_wsol(path: str | Path, *, split: str = "train") -> Samples:
    """Pictures with boxes or masks, listed in the layout of the WSOL evaluator."""
    from sigcam.data.readers.wsol import wsol

    return wsol(path, split=split)


def read_cub(path: str | Path, *, split: str = "train") -> Samples:
    """CUB-200-2011 as published."""
    from sigcam.data.readers.cub import cub

    return cub(path, split=split)


def read_cars(path: str | Path, *, split: str = "train") -> Samples:
    """Stanford Cars as published."""
    from sigcam.data.readers.cars import cars

    return cars(path, split=split)


def read_pets(path: str | Path, *, split: str = "train") -> Samples:
    """Oxford-IIIT Pet as published."""
    from sigcam.data.readers.pets import pets

    return pets(path, split=split)


def read_ilsvrc(path: str | Path, *, split: str = "train") -> Samples:
    """ImageNet ILSVRC as published."""
    from sigcam.data.readers.ilsvrc import ilsvrc

    return ilsvrc(path, split=split)


READERS: dict[str, Callable[..., Samples]] = {
    "shapes": read_shapes,
    "folder": read_folder,
    "wsol": read_wsol,
    "cub": read_cub,
    "cars": read_cars,
    "pets": read_pets,
    "ilsvrc": read_ilsvrc,
}  # (path, split=) -> Samples
