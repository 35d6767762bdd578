"""Registry of data set layouts: how each one is read and recognized."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sigcam.core.errors import ConfigError, DataError
from sigcam.data.readers.cars import cars, is_cars
from sigcam.data.readers.cub import cub, is_cub
from sigcam.data.readers.folder import folder
from sigcam.data.readers.ilsvrc import ilsvrc, is_ilsvrc
from sigcam.data.readers.pets import is_pets, pets
from sigcam.data.readers.shapes import is_shapes, read_shapes
from sigcam.data.readers.wsol import is_wsol, wsol
from sigcam.data.sample import Samples


@dataclass(frozen=True)
class Reader:
    """A data set layout.

    Args:
        about: one line for the documentation: files, splits, annotations.
        read: called as `read(path, split="train")`; returns the samples of that split.
        detect: returns whether a path has this layout. Without it, the layout is only read by name.
    """

    about: str
    read: Callable[..., Samples]
    detect: Callable[[str | Path], bool] | None = None

    def __call__(self, path: str | Path, *, split: str = "train") -> Samples:
        """Return the samples of one split."""
        return self.read(path, split=split)


READERS: dict[str, Reader] = {  # layouts are detected in this order
    "shapes": Reader(
        "the word `shapes`, or `shapes:500` for 500 images: birds drawn in memory, without files; splits "
        "train, val, test; labels, boxes, masks",
        read_shapes,
        is_shapes,
    ),
    "folder": Reader(
        "anything else: `<class>/<file>`, or `train/<class>/<file>` and `val/` or `test/`; labels, and boxes "
        "from `boxes.csv`",
        folder,
    ),
    "wsol": Reader(
        "WSOL evaluator: `image_ids.txt` in `metadata/<split>/`, `<split>/` or "
        "`../../metadata/<name>/<split>/`; splits train, val, test; labels, boxes or masks",
        wsol,
        is_wsol,
    ),
    "cub": Reader(
        "CUB-200-2011: `images.txt`, `image_class_labels.txt`, `train_test_split.txt`; splits train, test; "
        "labels, one box, and masks from `segmentations/`",
        cub,
        is_cub,
    ),
    "cars": Reader(
        "Stanford Cars: `cars_train_annos.mat` in `devkit/`; splits train, test; labels, one box",
        cars,
        is_cars,
    ),
    "pets": Reader(
        "Oxford-IIIT Pet: `annotations/trainval.txt` and `images/`; splits train (trainval), test; labels, "
        "masks",
        pets,
        is_pets,
    ),
    "ilsvrc": Reader(
        "ImageNet: `train/` or `val/` with folders such as `n01440764`, also below `ILSVRC/Data/CLS-LOC`; "
        "splits train, val (= test); labels, and boxes from `Annotations/`",
        ilsvrc,
        is_ilsvrc,
    ),
}


def list_readers() -> list[str]:
    """Return the names of the data set layouts that `open_dataset` can read."""
    return list(READERS)


def guess_format(path: str | Path) -> str:
    """Return the first layout in READERS that detects its files in the path, else "folder"."""
    for name, reader in READERS.items():
        if isinstance(reader, Reader) and reader.detect and reader.detect(path):
            return name
    return "folder"


def open_dataset(path: str | Path, *, format: str | None = None, split: str = "train") -> Samples:
    """Return the samples of one split of a data set.

    Args:
        path: the folder of the data set, or "shapes" for synthetic images.
        format: its layout, one of `list_readers()`; None detects it.
        split: "train", "val" or "test", as far as the data set has them.
    """
    name = guess_format(path) if format is None else format
    if name not in READERS:
        raise ConfigError(f"there is no data format {name!r}: choose one of {', '.join(READERS)}.")
    return READERS[name](path, split=split)


def open_training_data(path: str | Path, format: str | None) -> Samples:
    """Return the training split; raise DataError unless it has two classes with two images each."""
    samples = open_dataset(path, format=format, split="train")
    if len(samples.classes) < 2:
        raise DataError(f"the data has one class ({samples.classes[0]}): at least two are needed.")
    counts = Counter(sample.label or 0 for sample in samples)
    few = next((name for label, name in enumerate(samples.classes) if counts[label] < 2), None)
    if few is not None:
        raise DataError(f"class {few!r} has one image: give each class at least two, or remove its folder.")
    return samples


def open_validation_data(path: str, format: str | None, train: Samples) -> Samples | None:
    """Return the val split; None if there is none, or if it is the test or the training split."""
    val = _other_split(path, format, "val", train)
    is_folder = (format or guess_format(path)) == "folder"  # which reads test/ if there is no val/
    if is_folder and val is not None and any(sample.id.startswith("test/") for sample in val):
        return None
    return val


def open_held_out_data(path: str, format: str | None, train: Samples) -> tuple[str, Samples] | None:
    """Return the val split or, if there is none, the test split, after its name; None if there is neither, or
    if it has no labels."""
    found = "val", open_validation_data(path, format, train)
    if found[1] is None:
        found = "test", _other_split(path, format, "test", train)
    name, samples = found
    return None if samples is None or any(sample.label is None for sample in samples) else (name, samples)


def _other_split(path: str, format: str | None, split: str, train: Samples) -> Samples | None:
    """Return a split; None if there is none, or if it has images of the training split."""
    try:
        samples = open_dataset(path, format=format, split=split)
    except DataError as error:
        if "has no split" in str(error):
            return None
        raise
    train_ids = {sample.id for sample in train}
    return None if any(sample.id in train_ids for sample in samples) else samples
