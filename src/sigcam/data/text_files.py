"""Helpers for readers: lines of text files, whole numbers, boxes."""

import errno
import re
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Box

MAX_CLASSES = 100_000  # a larger label is a mistake, and naming every class up to it would fill the memory
MAX_DIGITS = 18  # a whole number of this length fits 64 bits
MAX_SIDE = 10**9  # pixels: the area of a box fits 64 bits
MAX_LINE = 6000  # characters: a longer line is no line of a list


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, stripped text) of every line that is not blank."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        check_length(line, f"{path} line {number}")
        if line.strip():
            yield number, line.strip()


def check_length(line: str, where: str) -> None:
    """Raise DataError, starting with `where`, for a line that is too long to be repeated in a message."""
    if len(line) > MAX_LINE:
        raise DataError(f"{where} has {len(line)} characters: is this a list of images?")


def quoted(text: str) -> str:
    """Return the text in quotes for a message, with what is not printable escaped; at most the beginning."""
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}..."


def check_inside(name: str, where: str) -> None:
    """Raise DataError, starting with `where`, if a name leads out of the folder that it is looked for in."""
    if ".." in re.split(r"[/\\]", name) or Path(name).anchor:
        raise DataError(f"{where} is not a path below the folder of images.")


def is_file(path: Path) -> bool:
    """Return whether there is such a file; none has a name that is too long for the disk."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def is_whole_number(text: str) -> bool:
    """Return whether the text is a whole number, 0 or more, that fits 64 bits."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def whole_numbers(fields: Sequence[str], layout: str, where: str) -> list[int]:
    """Return the fields as numbers; raise DataError, starting with `where`, if one is not a whole number."""
    invalid = next((field for field in fields if not is_whole_number(field)), None)
    if invalid is not None:
        raise DataError(f"{where} has {reprlib.repr(invalid)} where {layout} has a whole number.")
    return [int(field) for field in fields]


def check_box(box: Box, size: ImageSize | None, where: str) -> None:
    """Raise DataError, starting with `where`, if the box is inverted or ends outside an image of this size.

    x1 = width and y1 = height are accepted, because lists that count pixels from 1 contain them.
    """
    if box[2] < box[0] or box[3] < box[1]:
        raise DataError(f"{where} has an inverted box {box}: write x0, y0, x1, y1.")
    shown = f"a box {str(box)[:200]}"
    if size is not None and (box[2] > size[0] or box[3] > size[1]):
        raise DataError(f"{where} has {shown} beyond its {size[0]} x {size[1]} pixels: correct it.")
    if max(box) > MAX_SIDE:
        raise DataError(f"{where} has {shown} beyond the pixels of any image: correct it.")
