"""Sample, one annotated image, and Samples, a list with class names; their fingerprints and labels."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from sigcam.core.errors import DataError
from sigcam.core.files import file_stamp
from sigcam.core.types import ImageSize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Sample:
    """One annotated image; annotations that its data set does not have are None.

    Args:
        id: unique name, with `/` as separator, used in messages and output files.
        open: decodes the image as upright RGB; raises DataError with the file name if it cannot.
        label: class index from 0.
        boxes: xyxy in pixels of the original image; x1 and y1 are the last pixel inside.
        open_mask: decodes the mask, (H, W) uint8: 1 object, 0 background, 255 ignored.
        size: width and height of the original image if the file may be a smaller copy; None: as opened.
        path: the image file, if there is one.
    """

    id: str
    open: Callable[[], Image.Image]
    label: int | None = None
    boxes: tuple[Box, ...] | None = None
    open_mask: Callable[[], NDArray[np.uint8]] | None = None
    size: ImageSize | None = None
    path: Path | None = None


@dataclass(frozen=True)
class Samples(Sequence[Sample]):
    """An immutable list of samples and the names of their classes."""

    items: tuple[Sample, ...]
    classes: tuple[str, ...]

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        return Samples(self.items[index], self.classes) if isinstance(index, slice) else self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.items)


def name_classes(items: Iterable[Sample], classes: int = 0, names: Sequence[str] | None = None) -> Samples:
    """Return Samples with the classifier's class names, or with numbers for at least `classes` of them."""
    items = tuple(items)
    highest = max((item.label for item in items if item.label is not None), default=0)
    return Samples(items, tuple(names or (f"class {k}" for k in range(max(classes, 2, highest + 1)))))


def data_fingerprint(samples: Samples) -> str:
    """Return a hash of the ids, labels, boxes, sizes and class names."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(list(samples.classes)).encode())
    for sample in samples:
        size = sample.size and tuple(sample.size)  # without the names of ImageSize, as in earlier versions
        text = f"{sample.id}\0{sample.label} {sample.boxes} {size}\n"
        digest.update(text.encode(errors="surrogateescape"))  # a file's name may be no valid Unicode
    return digest.hexdigest()


def files_fingerprint(samples: Samples) -> str:
    """Return a hash of what images and masks are decoded from: size and date of their files, else pixels."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        image = file_stamp(sample.path) if sample.path else source_stamp(sample.open)
        mask = source_stamp(sample.open_mask) if sample.open_mask else ""
        digest.update(f"{image}\n{mask}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def source_stamp(opener: Callable[[], Any]) -> str:
    """Return what changes with the pixels that an opener returns: the stamps of the files that a `partial`
    names, its arguments if it draws by a function of ours, and a hash of the pixels for any other."""
    import numpy as np

    if isinstance(opener, partial):
        arguments = [*opener.args, *opener.keywords.values()]
        stamps = list[str]()
        stamped = _stamped(arguments, stamps)
        if stamps or str(opener.func.__module__).startswith("sigcam."):
            return stamped
    try:
        pixels = np.ascontiguousarray(opener())
    except (DataError, OSError) as error:
        return f"unreadable: {error}"
    return f"{pixels.shape} {pixels.dtype} {hashlib.blake2b(pixels.data, digest_size=16).hexdigest()}"


def _stamped(value: Any, stamps: list[str]) -> str:
    """Return arguments as text, with the stamps of files in place of their paths; add these to `stamps`."""
    if isinstance(value, Path):
        stamps.append(file_stamp(value))
        return stamps[-1]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_stamped(part, stamps) for part in value)}]"
    return repr(value)


def match_classes(samples: Samples, classes: int, names: Sequence[str] | None) -> Samples:
    """Return the samples with the classifier's labels.

    Classes are matched by name if the classifier has all of the names, otherwise by position: if the names
    differ only in spelling, or if none of them is the classifier's and the counts agree.
    """
    count = len(samples.classes)
    invalid = next((s for s in samples if s.label is not None and not 0 <= s.label < count), None)
    if invalid is not None:
        raise DataError(f"image {invalid.id} has label {invalid.label}, but there are {count} classes.")
    if names and set(samples.classes) <= set(names):
        label_of = {name: label for label, name in enumerate(names)}
        labels = [None if s.label is None else label_of[samples.classes[s.label]] for s in samples]
        items = (replace(sample, label=label) for sample, label in zip(samples, labels, strict=True))
        return Samples(tuple(items), tuple(names))
    if names and len(names) == count and all(map(_same_name, samples.classes, names)):
        return samples
    unknown = [name for name in samples.classes if names and name not in names]
    if 0 < len(unknown) < count:  # probably a typo: matching by position would give wrong labels
        wrong = f"{len(unknown)} of {count} class names are not the classifier's: {', '.join(unknown[:3])}"
        if 2 * len(unknown) > count:
            raise DataError(f"{wrong}. Train a head for yours with `sigcam train-classifier --probe`.")
        raise DataError(f"{wrong}. Rename or remove their folders.")
    if count == max(classes, 2):
        return samples
    known = f" ({', '.join(list(names)[:3])}, ...)" if names else ""
    raise DataError(
        f"the data has {count} classes ({', '.join(samples.classes[:3])}, ...), the classifier "
        f"{classes}{known}: name the folders after its classes, or train a head for yours with "
        "`sigcam train-classifier --probe`."
    )


def check_disjoint(samples: Samples, others: Samples, why: str) -> None:
    """Raise DataError, ending with `why`, if an image is in both."""
    known = {sample.path or sample.id for sample in others}
    shared = [sample.id for sample in samples if (sample.path or sample.id) in known]
    if shared:
        raise DataError(f"{len(shared)} of {len(samples)} images, the first {shared[0]}, {why}")


def _same_name(ours: str, theirs: str) -> bool:
    """Return whether two class names differ only in case, underscores or the WordNet id of a homonym."""
    ours, theirs = (name.replace("_", " ").casefold() for name in (ours, theirs))
    without_id = re.sub(r" n\d{8}$", "", ours)
    return ours == theirs or (without_id != ours and theirs.startswith(without_id))
