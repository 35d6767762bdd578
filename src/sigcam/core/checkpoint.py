"""Checkpoint: the state of unfinished work in one file, resumed only by exactly the same work."""

import hashlib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from sigcam.core.files import atomic_path, hash_of
from sigcam.core.manifest import versions

CHECKSUM = 16  # bytes at the end of a file


class Checkpoint:
    """The state of unfinished work, in a file.

    Args:
        path: the file; None disables saving and resuming.
        facts: everything the result depends on: settings, labels, files, weights. A file written for other
            facts, by other versions of the packages or by another version of this code is ignored.
    """

    def __init__(self, path: Path | None, facts: Any) -> None:
        self.path = path
        self._facts = dict[str, str]()
        if path is not None:
            named = facts if isinstance(facts, dict) else {"facts": facts}
            named = {**named, "versions": versions(), "code": code_fingerprint()}
            self._facts = {name: hash_of(value) for name, value in named.items()}

    def load(self, map_location: Any = None) -> dict[str, Any] | None:
        """Return the state saved for the same work, or None if there is none or the file is damaged."""
        facts, state = self._read(map_location)
        return state if facts == self._facts else None

    def differences(self) -> list[str]:
        """Return the names of the facts that differ in an existing file; ["content"] if it is damaged."""
        if self.path is None or not self.path.exists():
            return []
        facts, _ = self._read("meta")
        if facts is None:
            return ["content"]
        return [name for name in {**self._facts, **facts} if facts.get(name) != self._facts.get(name)]

    def _read(self, map_location: Any) -> tuple[dict[str, str] | None, dict[str, Any] | None]:
        import torch

        if self.path is None or not self.path.is_file():
            return None, None
        try:
            with self.path.open("rb") as file:
                if not _is_whole(file):  # torch.load takes flipped bytes as they are
                    return None, None
                content = torch.load(file, map_location=map_location, weights_only=True)
            return dict(content["facts"]), dict(content["state"])
        except Exception:  # a damaged pickle raises almost anything
            return None, None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file. The state holds tensors, numbers, strings, and lists and dicts of them."""
        import torch

        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as draft, draft.open("w+b") as file:
            torch.save({"facts": self._facts, "state": state}, file)  # given a path, it hides the cause
            file.write(_checksum(file, file.tell()))

    def remove(self) -> None:
        """Delete the file once the work is done."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()


def _is_whole(file: BinaryIO) -> bool:
    """Return whether the file ends in the checksum of what is before; go back to its beginning."""
    size = file.seek(0, os.SEEK_END) - CHECKSUM
    whole = size > 0 and _checksum(file, size) == file.read()
    file.seek(0)
    return whole


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Return a hash of the first bytes of a file; stop behind them."""
    digest = hashlib.blake2b(digest_size=CHECKSUM)
    file.seek(0)
    while size and (block := file.read(min(size, 2**20))):
        digest.update(block)
        size -= len(block)
    return digest.digest()


def work_key(facts: Any) -> str:
    """Return a hash of the facts, the versions of the packages and the code, to name a file of results."""
    return hash_of([facts, versions(), code_fingerprint()])


@cache
def code_fingerprint() -> str:
    """Return a hash of sigcam's source files, so that results of different versions are never mixed."""
    root = Path(__file__).parents[1]
    return hash_of([[path.relative_to(root), path.read_text("utf-8")] for path in sorted(root.rglob("*.py"))])
