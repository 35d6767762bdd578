"""Checkpoint: the state of unfinished work in one file, resumed only by exactly the same work."""

from __future__ import annotations

import hashlib
import io
import pickle
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sigcam.core.files import hash_of, write_atomic
from sigcam.core.manifest import versions


class Checkpoint:
    """The state of unfinished work, in a file.

    Args:
        path: the file; None disables saving and resuming.
        facts: everything the result depends on: settings, labels, files, weights. A file written for other
            facts, by other versions of the packages or by another version of this code is ignored.
    """

    def __init__(self, path: Path | None, facts: Any) -> None:
        self.path = path
        self.key = "" if path is None else hash_of([facts, versions(), code_fingerprint()])

    def load(self, map_location: Any = None) -> dict[str, Any] | None:
        """Return the state saved for the same work, or None if there is none or the file is damaged."""
        import torch

        if self.path is None or not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location=map_location, weights_only=True)
            return dict(content["state"]) if content["key"] == self.key else None
        except (RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError, OSError):
            return None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file. The state holds tensors, numbers, strings, and lists and dicts of them."""
        import torch

        if self.path is None:
            return
        buffer = io.BytesIO()
        torch.save({"key": self.key, "state": state}, buffer)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, buffer.getvalue())

    def remove(self) -> None:
        """Delete the file once the work is done."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()


@cache
def code_fingerprint() -> str:
    """Return a hash of sigcam's source files, so that results of different versions are never mixed."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(str(files("sigcam")))
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
