"""Sample, one annotated image, and Samples, a list of them with class names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

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
