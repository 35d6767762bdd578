"""Types that several packages share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ImageSize(NamedTuple):
    """Size of an image, in Pillow's order."""

    width: int
    height: int


class GridSize(NamedTuple):
    """Size of the last two axes of a tensor."""

    height: int
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> GridSize:
        """Return the size of the tensor's last two axes."""
        return cls(tensor.shape[-2], tensor.shape[-1])


Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)
Skipped = tuple[str, str]  # id of an image that was skipped, and the reason
