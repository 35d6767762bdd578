"""Files: write them whole or not at all, tell them apart, describe what went wrong."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import DataError

if TYPE_CHECKING:
    pass

import os
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Writes the file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")  # of this process alone
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()


def error_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def write_text_atomic(path: Path, text: str) -> Path:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return path


def file_stamp(path: Path) -> str:
    """What tells a file from a later one of that name."""
    try:
        seen = path.stat()
    except OSError:
        return "gone"
    return f"{seen.st_size} {seen.st_mtime_ns}"


def check_writable(path: Path) -> None:
    """DataError before the work begins if nothing can be written to the folder; leaves no trace."""
    trial = path / ".trial"
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"x" * 4096)
        trial.unlink()
        for folder in made:
            folder.rmdir()
    except OSError as error:
        raise DataError(
            f"cannot write to the output folder {path}: {error.strerror or error}. Choose another with "
            "--output."
        ) from error


def hash_of(value: Any) -> str:
    """A name for a value that JSON can write."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
