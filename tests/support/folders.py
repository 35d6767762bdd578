"""Folders of small pictures, and a network for them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sigcam.core.config import FitConfig
from sigcam.data.readers.folder import folder
from sigcam.data.sample import Samples
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.tiny import Gap, images

CLASSES = ("a", "b", "c", "d")


GIVEN = FitConfig(l2=0.1)


def tree(root: Path, count: int = 150) -> Samples:
    """A folder of small pictures, each class of its own colour."""
    random = np.random.default_rng(0)
    for i in range(count):
        place = root / CLASSES[i % 4] / f"{i:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 120, (16, 16, 3)) + np.eye(4, 3, dtype=int)[i % 4] * 130
        Image.fromarray(pixels.astype(np.uint8)).save(place)
    return folder(root)


def network() -> DualBranch:
    torch.manual_seed(0)
    net = attach(Gap(), example=images(1))
    net.transform = Preprocess(16, 16)
    return net


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be of any size."""
    parts = (
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0),
        b"IDAT" + zlib.compress(b"\0"),
        b"IEND",
    )
    chunks = (struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
