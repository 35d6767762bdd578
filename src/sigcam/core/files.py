"""Atomic writes, fingerprints of files and values, one-line error texts."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import ConfigError, DiskFull, causes

if TYPE_CHECKING:
    from PIL.Image import Image

FULL = (errno.ENOSPC, errno.EDQUOT)
DRAFTS = ".sigcam-{process}-{name}.part"  # short and hidden, whatever the name of the file


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a file to write to, which replaces `path` if the block succeeds; its folder must exist.

    Raises DiskFull if an error in the block comes from a lack of space.
    """
    process = os.getpid()  # not shared with other processes
    draft = path.with_name(DRAFTS.format(process=process, name=hash_of(path.name)[:12]))
    try:
        yield draft
        draft.replace(path)
    except Exception as error:
        raise_if_full(error, path.parent)
        raise
    finally:
        with suppress(OSError):
            draft.unlink()


def raise_if_full(error: Exception, folder: Path) -> None:
    """Raise DiskFull, with the folder's name, if the error comes from a lack of space."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in FULL:
            raise DiskFull(f"disk full: {folder} ({cause.strerror}). Free some space.") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write the whole file or nothing; its folder must exist."""
    with atomic_path(path) as draft:
        draft.write_bytes(data)


def write_text_atomic(path: Path, text: str) -> Path:
    """Write the whole text file or nothing, creating its folder if needed; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode(errors="backslashreplace"))  # a file's name may be no valid Unicode
    return path


def write_png(path: Path, image: Image) -> None:
    """Write the whole image or nothing; its folder must exist."""
    content = io.BytesIO()
    image.save(content, "PNG")
    write_atomic(path, content.getvalue())


def check_writable(folder: Path, advice: str = "Choose another --output.") -> None:
    """Raise ConfigError with advice, or DiskFull, if files cannot be written to it; leave no trace."""
    trial = folder / ".trial"
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"x" * 4096)
    except OSError as error:
        raise_if_full(error, folder)
        reason = f"{folder}: {error.strerror or error}"
        raise ConfigError(f"cannot write to the output folder {reason}. {advice}") from error
    finally:
        with suppress(OSError):
            trial.unlink()
        remove_empty(missing)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders, inner ones first, that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def file_stamp(path: Path) -> str:
    """Size and modification time, which change when the file is replaced; "gone" if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return "gone"
    return f"{stat.st_size} {stat.st_mtime_ns}"


def exact_stamp(path: Path) -> str:
    """Return file_stamp, inode and time of the last change of any kind, which a copied date does not hide.

    For work that is cheap to do again: they also change when a data set is unpacked on another machine.
    """
    try:
        stat = path.stat()
    except OSError:
        return "gone"
    return f"{file_stamp(path)} {stat.st_ino} {stat.st_ctime_ns}"


def hash_of(value: Any) -> str:
    """Return a hash of a value that JSON can write."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is not one, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def error_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, at most 300 characters of it."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"
