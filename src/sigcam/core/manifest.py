"""manifest.json: what made an output folder, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples
from sigcam.models.state_dict import write_whole

PACKAGES = ("sigcam", "torch", "torchvision", "timm", "torchmetrics", "numpy", "numba", "pillow")


def try_folder(path: Path) -> None:
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


def data_fingerprint(samples: Samples) -> str:
    """A hash of the samples' ids, labels, boxes, sizes and class names."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(list(samples.classes)).encode())
    for sample in samples:
        digest.update(f"{sample.id}\0{sample.label} {sample.boxes} {sample.size}\n".encode())
    return digest.hexdigest()


def files_fingerprint(samples: Samples) -> str:
    """A hash of the sizes and dates of the files that pictures and masks are read from: it tells them from
    later ones of the same names, and is another for a copy."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        bound: tuple[Any, ...] = getattr(sample.open_mask, "args", ())  # a reader binds the files of a mask
        masks = [path for each in bound for path in (each if isinstance(each, tuple) else (each,))]
        for path in (sample.path, *masks):
            digest.update(f"{stamp(path)}\n".encode() if isinstance(path, Path) else b"\n")
    return digest.hexdigest()


def stamp(path: Path) -> str:
    """What tells a file from a later one of that name."""
    try:
        seen = path.stat()
    except OSError:
        return "gone"
    return f"{seen.st_size} {seen.st_mtime_ns}"


def versions() -> dict[str, str]:
    """Python and the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def how_made() -> dict[str, str]:
    """The command and the time, in words."""
    return {
        "command": shlex.join(["sigcam", *sys.argv[1:]]),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_manifest(folder: Path, **facts: Any) -> Path:
    """Writes manifest.json with the command, versions, time, and the given facts."""
    about = {
        "command": ["sigcam", *sys.argv[1:]],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **facts,
    }
    return write_text(folder / "manifest.json", json.dumps(about, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    return path
