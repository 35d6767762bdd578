"""Decode samples into batches of tensors, in order; unreadable files are reported, not fatal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize, Skipped
from sigcam.data.sample import Sample, Samples

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Batch:
    """The readable images among `batch_size` consecutive samples.

    Args:
        images: (B, 3, H, W), as returned by the transform; (0, 3, 0, 0) without a transform, or when no
            image could be read.
        labels: (B,) int64; None when a sample of the batch has no label.
        indices: index of each image in the samples.
        skipped: (id, reason) of each sample that could not be read.
        sizes: width and height of each image as opened.
        pictures: the opened images, with `keep_pictures`; otherwise empty.
    """

    images: Tensor
    labels: Tensor | None
    indices: list[int]
    skipped: list[Skipped]
    sizes: list[ImageSize]
    pictures: list[Image.Image] = field(default_factory=list)


def load_batches(
    samples: Samples,
    transform: Callable[[Image.Image], Tensor] | None,
    *,
    batch_size: int,
    workers: int = 0,
    spawn: bool = False,
    seed: int = 0,
    keep_pictures: bool = False,
) -> Iterator[Batch]:
    """Yield one Batch per `batch_size` samples, in order. Samples that raise DataError are in `skipped`.

    Args:
        transform: returns a (3, H, W) float tensor, the same size for every image; must be picklable if there
            are workers. None only decodes.
        workers: number of decoding processes; 0 decodes in this one.
        spawn: spawn the workers instead of forking them, as CUDA requires.
        seed: random seed for transforms that run in workers.
        keep_pictures: also return the opened images, in `Batch.pictures`.
    """
    loader = DataLoader(
        _DecodedSamples(samples, transform, keep_pictures),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_collate,
        multiprocessing_context="spawn" if spawn and workers else None,
        generator=torch.Generator().manual_seed(seed),  # otherwise each loop draws from the global generator
    )
    yield from loader


@dataclass(frozen=True)
class _Decoded:
    """One sample after decoding: its tensor and image where requested, or the reason it was skipped."""

    index: int
    sample: Sample
    size: ImageSize | None = None
    tensor: Tensor | None = None
    picture: Image.Image | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _DecodedSamples(Dataset[_Decoded]):
    samples: Samples
    transform: Callable[[Image.Image], Tensor] | None
    keep_pictures: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> _Decoded:
        sample = self.samples[index]
        try:
            picture = sample.open()
        except (DataError, OSError) as error:
            return _Decoded(index, sample, reason=str(error))
        tensor = self.transform(picture) if self.transform else None
        kept = picture if self.keep_pictures else None
        return _Decoded(index, sample, ImageSize(*picture.size), tensor, kept)


def _collate(decoded: list[_Decoded]) -> Batch:
    read = [item for item in decoded if item.reason is None]
    tensors = [item.tensor for item in read if item.tensor is not None]
    labels = [item.sample.label for item in read if item.sample.label is not None]
    unlabelled = any(item.sample.label is None for item in decoded)
    return Batch(
        images=torch.stack(tensors) if tensors else torch.empty(0, 3, 0, 0),
        labels=None if unlabelled else torch.tensor(labels, dtype=torch.int64),
        indices=[item.index for item in read],
        skipped=[(item.sample.id, item.reason) for item in decoded if item.reason is not None],
        sizes=[item.size for item in read if item.size is not None],
        pictures=[item.picture for item in read if item.picture is not None],
    )
