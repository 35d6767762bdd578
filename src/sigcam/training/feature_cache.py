"""The feature cache on disk: what enters the head, computed once per image and view.

A cache is a folder named after a hash of everything the features depend on: the classifier's weights, the
layer, the preprocessing, the view, the precision, the list of images, the versions of packages and of this
code, and what comes out for a test input. `features.bin` holds one row per image, `sums.bin` a checksum per
chunk of rows. A checksum covers the chunk's rows, the size and date of its image files and, for features of
backgrounds, the labels, and is written after the rows. After a kill, a flipped byte or a changed image,
exactly the affected chunks are computed again. Several processes may fill one cache, each its own chunks.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import file_stamp, parse_json, write_atomic
from sigcam.data.sample import Samples

IMAGES_PER_CHUNK = 64  # also the batch of the backbone, and what a kill loses
SUM = 16  # bytes of a checksum
SPARE = 2**26  # bytes to leave free on the disk
ELSEWHERE = "Choose another place with --cache, or $SIGCAM_CACHE."
Precision = Literal["float16", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def default_folder() -> Path:
    """Return $SIGCAM_CACHE, or `sigcam` in the user's cache folder."""
    if folder := os.environ.get("SIGCAM_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sigcam"


@dataclass(frozen=True)
class FeatureStore:
    """Features (images, *shape) of one view of all images; some chunks may not be computed yet."""

    folder: Path
    samples: Samples
    shape: tuple[int, ...]
    precision: Precision
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all features."""
        return len(self.samples) * self.width * 2

    @property
    def width(self) -> int:
        """Numbers per image."""
        return torch.Size(self.shape).numel()

    @cached_property
    def stamps(self) -> list[str]:
        """Id, size and date of each image file, taken before the first image is read: one that changes while
        features are computed is computed again by the next run. For backgrounds, the label too: it says where
        they are."""
        stamps = [f"{sample.id}\0{file_stamp(sample.path) if sample.path else ''}" for sample in self.samples]
        if "background" not in self.facts:
            return stamps
        return [f"{stamp}\0{sample.label}" for stamp, sample in zip(stamps, self.samples, strict=True)]

    def is_allocated(self) -> bool:
        """Return whether the files are there in full size; chunks may be missing all the same."""
        file = self.folder / "features.bin"
        return file.is_file() and file.stat().st_size == self.size and (self.folder / "sums.bin").is_file()

    def create(self) -> None:
        """Allocate the files; chunks that are there already stay."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.folder / "about.json"
            if not about.is_file():
                write_atomic(about, json.dumps(self.facts, indent=1).encode())
            _allocate(self.folder / "features.bin", self.size)
            _allocate(self.folder / "sums.bin", -(-len(self.samples) // IMAGES_PER_CHUNK) * SUM)
        except OSError as error:
            reason = f"{error.strerror or error}. {ELSEWHERE}"
            raise DataError(f"cannot use the feature cache {self.folder.parent}: {reason}") from error

    def read(self) -> Tensor:
        """Return all rows (images, width), mapped from the file."""
        path, dtype = str(self.folder / "features.bin"), DTYPES[self.precision]
        return torch.from_file(path, shared=False, size=self.size // 2, dtype=dtype).view(-1, self.width)

    def missing(self, chunks: Iterable[int]) -> list[int]:
        """Return those of the chunks that are absent or damaged, or whose image files have changed."""
        data, sums = _bytes(self.read()), (self.folder / "sums.bin").read_bytes()
        return [i for i in chunks if sums[i * SUM : (i + 1) * SUM] != self._sum(i, data[self._span(i)])]

    def write(self, chunk: int, features: Tensor) -> None:
        """Write a chunk's rows (n, ...), then its checksum."""
        rows = features.reshape(len(features), self.width).cpu().to(DTYPES[self.precision])
        data, span = bytes(_bytes(rows.contiguous())), self._span(chunk)
        try:
            _write_at(self.folder / "features.bin", span.start, data)
            _write_at(self.folder / "sums.bin", chunk * SUM, self._sum(chunk, data))
        except OSError as error:
            reason = f"{error.strerror or error}. The same command goes on from it. {ELSEWHERE}"
            raise DataError(f"cannot write to the feature cache {self.folder}: {reason}") from error

    def _span(self, chunk: int) -> slice:
        size = IMAGES_PER_CHUNK * self.width * 2
        return slice(chunk * size, (chunk + 1) * size)

    def _sum(self, chunk: int, data: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(digest_size=SUM)
        for stamp in self.stamps[chunk * IMAGES_PER_CHUNK : (chunk + 1) * IMAGES_PER_CHUNK]:
            digest.update(stamp.encode(errors="surrogateescape"))
        digest.update(data)
        return digest.digest()


def find_store(
    root: Path, samples: Samples, shape: tuple[int, ...], precision: Precision, facts: dict[str, Any]
) -> FeatureStore:
    """Return the store, which may not exist yet; `facts` are what features depend on besides the images."""
    facts = {**facts, "shape": list(shape), "precision": precision}
    facts |= {"images": len(samples), "chunk": IMAGES_PER_CHUNK}
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12)
    for sample in samples:
        key.update(f"{sample.id}\0".encode(errors="surrogateescape"))  # a name may be no valid Unicode
    return FeatureStore(root / key.hexdigest(), samples, shape, precision, facts)


def free_space(root: Path) -> int:
    """Return the bytes that the cache may still take on its disk; below zero if that is too full."""
    place = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return shutil.disk_usage(place).free - SPARE


def check_space(root: Path, needed: int) -> None:
    """Raise DataError if `needed` bytes do not fit on the disk of the cache."""
    free = free_space(root)
    if needed > free:
        raise DataError(
            f"the feature cache needs {_size(needed)}, and {root} has {_size(max(free, 0))} left: "
            "free some (`sigcam cache clear`), choose another place with --cache, or use --no-cache."
        )


@dataclass(frozen=True)
class CacheEntry:
    """One cache on disk, for listing."""

    folder: Path
    about: dict[str, Any]
    size: int
    used: float  # time of the last change, in seconds since 1970


def list_caches(root: Path) -> list[CacheEntry]:
    """Return the caches in the folder, the latest used first."""
    entries = list[CacheEntry]()
    for about in root.glob("*/about.json"):
        folder = about.parent
        if not re.fullmatch("[0-9a-f]{24}", folder.name) or not (folder / "sums.bin").is_file():
            continue  # not a feature cache
        try:
            files = [file.stat() for file in folder.iterdir()]
            facts = parse_json(about.read_bytes())
        except (OSError, ValueError):
            facts, files = None, []
        used = max((file.st_mtime for file in files), default=0)
        facts = facts if isinstance(facts, dict) else {}
        entries.append(CacheEntry(folder, facts, sum(file.st_size for file in files), used))
    return sorted(entries, key=lambda entry: -entry.used)


def clear_caches(root: Path, names: Iterable[str] = ()) -> list[CacheEntry]:
    """Delete the named caches, or all; other files in the folder stay. Return what was deleted."""
    entries = {entry.folder.name: entry for entry in list_caches(root)}
    names = list(names) or list(entries)
    for name in names:
        if name not in entries:
            raise ConfigError(f"there is no cache {name} in {root}: see `sigcam cache list`.")
    for name in names:
        shutil.rmtree(entries[name].folder)
    return [entries[name] for name in names]


def _bytes(rows: Tensor) -> Any:
    return rows.view(torch.uint8).reshape(-1).numpy().data


def _allocate(path: Path, size: int) -> None:
    """Give the file its size, and take the space on disk now rather than run out of it later."""
    with path.open("ab") as file:
        if path.stat().st_size != size:
            file.truncate(size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        while data:
            written = os.pwrite(file.fileno(), data, offset)
            data, offset = data[written:], offset + written


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
