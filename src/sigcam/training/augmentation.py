"""Training views of images: the paper's random crop and flip, drawn from explicit seeds."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.data.sample import Sample
from sigcam.models.preprocess import Preprocess, Transform

RESIZE_RATIO = 256 / 224  # image size before the crop, relative to the input size (PROTOCOL 3)
SEED_KEY = "sigcam view"  # entry of Image.info that holds the seed of the image's random crop


@dataclass(frozen=True)
class RandomCropFlip:
    """Resize to slightly more than the input size, crop at random, flip at random (PROTOCOL 3)."""

    plain: Preprocess

    def __call__(self, image: Any) -> Tensor:
        from torchvision.transforms import v2

        height, width = self.plain.height, self.plain.width
        resized = replace(
            self.plain, height=round(height * RESIZE_RATIO), width=round(width * RESIZE_RATIO), resize=None
        )
        view: Tensor = v2.RandomHorizontalFlip()(v2.RandomCrop((height, width))(resized(image)))
        return view


def augmented(transform: Transform) -> Transform:
    """Return the training view of a `Preprocess`; a transform of the user's own stays as it is."""
    return RandomCropFlip(transform) if isinstance(transform, Preprocess) else transform


@dataclass(frozen=True)
class SeededTransform:
    """A random transform that draws from the seed attached to each image, in whichever process it runs."""

    transform: Transform

    def __call__(self, image: Image.Image) -> Tensor:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(image.info[SEED_KEY])
            return self.transform(image)


def with_seed(sample: Sample, seed: int) -> Sample:
    """Return the sample with a seed attached to its image, for `SeededTransform`."""
    return replace(sample, open=partial(_open_with_seed, sample.open, seed))


def _open_with_seed(open: Callable[[], Image.Image], seed: int) -> Image.Image:
    image = open()
    image.info[SEED_KEY] = seed
    return image


def seed_of(*parts: int | str) -> int:
    """Return a seed for torch's generators that depends on all the parts."""
    text = json.dumps(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
