"""Hashes that tell one list of samples from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sigcam.core.files import file_stamp
from sigcam.data.sample import Samples


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
            digest.update(f"{file_stamp(path)}\n".encode() if isinstance(path, Path) else b"\n")
    return digest.hexdigest()
