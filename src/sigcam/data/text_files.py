"""What readers share: lines of text files, whole numbers, boxes, folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Box

if TYPE_CHECKING:
    pass

MOST_CLASSES = 100_000  # a label beyond it is a slip, and a name for each class before it fills the memory


MOST_DIGITS = 18  # of a whole number: it fits 64 bits


def read_text(path: Path) -> str:
    """The file's text: UTF-8, with a byte order mark or without."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with text on them, stripped, with their numbers from 1."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def is_whole_number(text: str) -> bool:
    """Whether it is a whole number, 0 or more, that fits 64 bits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def check_box(box: Box, size: ImageSize | None, where: str) -> None:
    """DataError, which begins with `where`, for a box that ends beyond a picture of `size`, where that is
    known; x1 = width and y1 = height are let through, as lists that count from 1 have them."""
    if size is not None and (box[2] > size[0] or box[3] > size[1]):
        raise DataError(f"{where} has a box {box} beyond its {size[0]} x {size[1]} pixels: correct it.")


def subfolders(root: Path) -> list[str]:
    """Names of the visible folders in root, sorted."""
    try:
        return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        raise DataError(
            f"{root} does not exist: give a folder with one folder of pictures per class."
        ) from None
    except OSError as error:
        raise DataError(f"cannot list {root}: {error.strerror}. Give a folder of class folders.") from error
