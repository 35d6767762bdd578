"""Fingerprints of samples: their annotations, and the files they are read from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sigcam.core.files import file_stamp
from sigcam.data.sample import Samples


def data_fingerprint(samples: Samples) -> str:
    """Return a hash of the ids, labels, boxes, sizes and class names."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(list(samples.classes)).encode())
    for sample in samples:
        size = sample.size and tuple(sample.size)  # without the names of ImageSize, as in earlier versions
        digest.update(f"{sample.id}\0{sample.label} {sample.boxes} {size}\n".encode())
    return digest.hexdigest()


def files_fingerprint(samples: Samples) -> str:
    """Return a hash of the sizes and modification times of the image and mask files."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        mask_args: tuple[Any, ...] = getattr(sample.open_mask, "args", ())  # readers use partial(open, files)
        masks = [path for arg in mask_args for path in (arg if isinstance(arg, tuple) else (arg,))]
        for path in (sample.path, *masks):
            digest.update(f"{file_stamp(path)}\n".encode() if isinstance(path, Path) else b"\n")
    return digest.hexdigest()
