"""The feature cache on disk: what enters the head, computed once per image and view.

A cache is a folder named by a key over all that shapes the features: the classifier's weights, the layer,
the preprocessing, the view, the precision and the list of images. `features.bin` holds one row per image,
`sums.bin` a checksum per chunk of rows. A chunk's checksum is written after its rows and covers them, and the
size and date of its picture files: so after a kill, a flipped byte or a changed picture exactly the chunks
concerned are computed again. Many processes may fill one cache, each its own chunks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.files import file_stamp, write_atomic
from sigcam.data.sample import Sample, Samples

IMAGES_PER_CHUNK = 64  # rows: what is lost in a kill, and one pass of the backbone
SUM = 16  # bytes of a checksum
SPARE = 2**26  # bytes to leave free on a disk
Precision = Literal["float16", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def default_folder() -> Path:
    """$SIGCAM_CACHE, else sigcam in the user's cache folder."""
    own = os.environ.get("SIGCAM_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else home / "sigcam"


@dataclass(frozen=True)
class FeatureStore:
    """Features of all images of one view, (images, *shape), some of them perhaps still to be computed."""

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

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-len(self.samples) // IMAGES_PER_CHUNK)

    def is_there(self) -> bool:
        """Whether its space is taken; what is in it may be missing."""
        file = self.folder / "features.bin"
        return file.is_file() and file.stat().st_size == self.size

    def create(self) -> None:
        """Takes the space that it needs; what is there already stays."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.folder / "about.json"
            if not about.is_file():
                write_atomic(about, json.dumps(self.facts, indent=1).encode())
            for name, wanted in (("features.bin", self.size), ("sums.bin", self.chunks * SUM)):
                _reserve(self.folder / name, wanted)
        except OSError as error:
            raise DataError(
                f"cannot use the feature cache {self.folder.parent}: {error.strerror or error}. Choose "
                "another place with --cache, or $SIGCAM_CACHE."
            ) from error

    def rows(self, chunk: int) -> range:
        """Which images a chunk holds."""
        return range(chunk * IMAGES_PER_CHUNK, min((chunk + 1) * IMAGES_PER_CHUNK, len(self.samples)))

    def read(self) -> Tensor:
        """(images, width), a view of the file."""
        size = self.size // 2
        path, dtype = str(self.folder / "features.bin"), DTYPES[self.precision]
        return torch.from_file(path, shared=False, size=size, dtype=dtype).view(-1, self.width)

    def missing(self, chunks: Iterable[int]) -> list[int]:
        """Those of the chunks that are not there, are damaged, or whose pictures have changed."""
        data = memoryview(_bytes(self.read()))
        sums = (self.folder / "sums.bin").read_bytes()
        return [
            chunk
            for chunk in chunks
            if sums[chunk * SUM : (chunk + 1) * SUM] != self._sum(chunk, data[self._span(chunk)])
        ]

    def write(self, chunk: int, features: Tensor) -> None:
        """Puts a chunk's rows (n, ...) there; only then its checksum."""
        rows = features.reshape(len(features), self.width).cpu().to(DTYPES[self.precision])
        data, span = bytes(_bytes(rows.contiguous())), self._span(chunk)
        try:
            _write_at(self.folder / "features.bin", span.start, data)
            _write_at(self.folder / "sums.bin", chunk * SUM, self._sum(chunk, data))
        except OSError as error:
            raise DataError(
                f"cannot write to the feature cache {self.folder}: {error.strerror or error}. What is there "
                "stays; the same command goes on from it. Another place: --cache, or $SIGCAM_CACHE."
            ) from error

    def _span(self, chunk: int) -> slice:
        rows, size = self.rows(chunk), self.width * 2
        return slice(rows.start * size, rows.stop * size)

    def _sum(self, chunk: int, data: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(digest_size=SUM)
        for i in self.rows(chunk):
            digest.update(_stamp(self.samples[i]).encode())
        digest.update(data)
        return digest.digest()


def find_store(
    root: Path, samples: Samples, shape: tuple[int, ...], precision: Precision, facts: dict[str, Any]
) -> FeatureStore:
    """The store for these samples and facts, which may not be there yet; `facts` is all that shapes features
    besides the pictures."""
    facts = {
        **facts,
        "shape": list(shape),
        "precision": precision,
        "images": len(samples),
        "chunk": IMAGES_PER_CHUNK,
    }
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12)
    for sample in samples:
        key.update(f"{sample.id}\0".encode())
    return FeatureStore(root / key.hexdigest(), samples, shape, precision, facts)


def check_space(root: Path, needed: int) -> None:
    """DataError if `needed` bytes do not fit on the disk of the cache."""
    place = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed + SPARE > free:
        raise DataError(
            f"the feature cache needs {_size(needed)}, and {root} has {_size(max(free - SPARE, 0))} left: "
            "free some (`sigcam cache clear`), choose another place with --cache, or do without: --no-cache."
        )


@dataclass(frozen=True)
class CacheEntry:
    """One cache on disk, for listing."""

    folder: Path
    about: dict[str, Any]
    size: int
    used: float  # when, in seconds since 1970


def list_caches(root: Path) -> list[CacheEntry]:
    """What is in the cache folder, the latest used first."""
    found = list[CacheEntry]()
    for about in root.glob("*/about.json"):
        folder = about.parent
        if not re.fullmatch("[0-9a-f]{24}", folder.name) or not (folder / "sums.bin").is_file():
            continue  # somebody else's
        try:
            files = [file.stat() for file in folder.iterdir()]
            facts = json.loads(about.read_text())
        except (OSError, ValueError):
            facts, files = {}, []
        found.append(
            CacheEntry(
                folder, facts, sum(f.st_size for f in files), max((f.st_mtime for f in files), default=0)
            )
        )
    return sorted(found, key=lambda held: -held.used)


def clear_caches(root: Path, names: Iterable[str] = ()) -> list[CacheEntry]:
    """Removes the caches named, or all; nothing else that may be in the folder."""
    held, wanted = list_caches(root), list(names)
    known = {each.folder.name: each for each in held}
    strange = [name for name in wanted if name not in known]
    if strange:
        raise DataError(f"there is no cache {strange[0]} in {root}: see `sigcam cache list`.")
    gone = [known[name] for name in wanted] or held
    for each in gone:
        shutil.rmtree(each.folder)
    return gone


# ------------------------------------------------------------------------------------------------- bytes


def _bytes(rows: Tensor) -> Any:
    return rows.view(torch.uint8).reshape(-1).numpy().data


def _stamp(sample: Sample) -> str:
    """What tells a picture from a later one of that name."""
    return f"{sample.id}\0{file_stamp(sample.path) if sample.path else ''}"


def _reserve(path: Path, size: int) -> None:
    """Makes the file that long, and takes the space now rather than fail half-way."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(handle).st_size != size:
            os.ftruncate(handle, size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)


def _write_at(path: Path, offset: int, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        while data:
            written = os.pwrite(handle, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(handle)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
