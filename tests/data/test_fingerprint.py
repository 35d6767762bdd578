"""Fingerprints of data are those of earlier versions, so that stored results and manifests still match."""

from __future__ import annotations

import hashlib
from typing import Any

from PIL import Image

from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples, data_fingerprint


def test_a_named_size_has_the_fingerprint_of_a_plain_one() -> None:
    known: Any = {"id": "a", "open": Image.new, "label": 1, "boxes": ((1, 2, 3, 4),)}
    sizes: list[Any] = [(64, 32), ImageSize(64, 32)]
    prints = {data_fingerprint(Samples((Sample(**known, size=size),), ("x", "y"))) for size in sizes}
    expected = hashlib.blake2b(b'["x", "y"]a\x001 ((1, 2, 3, 4),) (64, 32)\n', digest_size=16).hexdigest()
    assert prints == {expected}
