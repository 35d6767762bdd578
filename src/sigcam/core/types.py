"""Types that every package shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ImageSize(NamedTuple):
    """Size of a picture in Pillow's order."""

    width: int
    height: int


class GridSize(NamedTuple):
    """Size of a tensor's last two axes, rows first."""

    height: int
    width: int


Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)
Skipped = tuple[str, str]  # id of an image that was left out, and why
