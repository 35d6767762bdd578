"""Atomic writes, fingerprints of files and values, one-line error texts."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sigcam.core.errors import ConfigError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a file to write to, which replaces `path` if the block succeeds; its folder must exist."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")  # not shared with other processes
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_atomic(path: Path, data: bytes) -> None:
    """Write the whole file or nothing; its folder must exist."""
    with atomic_path(path) as draft:
        draft.write_bytes(data)


def write_text_atomic(path: Path, text: str) -> Path:
    """Write the whole text file or nothing, creating its folder if needed; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return path


def check_writable(folder: Path) -> None:
    """Raise ConfigError if files cannot be written to the folder; leave no trace."""
    trial = folder / ".trial"
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"x" * 4096)
        trial.unlink()
        for parent in missing:
            parent.rmdir()
    except OSError as error:
        reason = f"{folder}: {error.strerror or error}"
        raise ConfigError(f"cannot write to the output folder {reason}. Choose another --output.") from error


def file_stamp(path: Path) -> str:
    """Size and modification time, which change when the file is replaced; "gone" if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return "gone"
    return f"{stat.st_size} {stat.st_mtime_ns}"


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
