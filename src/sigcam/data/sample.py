"""Sample, the one annotated image; Samples, a list of them with class names; the readers that make them."""

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
    """One annotated image; a field that its data set cannot fill is None.

    Args:
        id: unique name, with `/`, used in messages and output files.
        open: decodes the picture: RGB, upright. Raises DataError naming the file when it cannot.
        label: class index, 0-based.
        boxes: xyxy in pixels of the original image; x1, y1 are the last pixel inside.
        open_mask: decodes the mask, (H, W) uint8: 1 object, 0 background, 255 ignored.
        size: width and height of the original image, where the file may be a smaller copy; None: as opened.
        path: the file that `open` reads, where it is one.
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
