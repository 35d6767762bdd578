"""Annotated samples that are made in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.data.sample import Sample, Samples
from sigcam.models.preprocess import Preprocess
from sigcam.network.dual import DualBranch
from support.tiny import SIZE, attached

CLASSES = ("a", "b", "c", "d")


COUNT = 12


FIT = Preprocess(SIZE, SIZE)


def picture(index: int) -> Image.Image:
    pixels = np.random.default_rng(index).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((40, 30)).reduce(1 + index % 2).resize((40, 30))


def mask(index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = np.zeros((30, 40), np.uint8)
    found[5:20, 10 : 20 + index], found[0:3] = 1, 255
    return found


def sample(index: int, **changed: Any) -> Sample:
    boxes = ((2 * index, 3, 30, 25), (0, 0, 5 + index, 29))
    whole = Sample(
        f"x/{index}.png", partial(picture, index), index % 4, boxes[: 1 + index % 2], partial(mask, index)
    )
    return replace(whole, **changed)


@pytest.fixture
def samples() -> Samples:
    return Samples(tuple(sample(index) for index in range(COUNT)), CLASSES)


def prepared(model: torch.nn.Module) -> DualBranch:
    net = attached(model)
    net.transform = FIT
    return net
