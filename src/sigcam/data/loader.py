"""From samples to batches of tensors, in order, with unreadable pictures named instead of fatal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Batch:
    """What could be read of `batch_size` neighbouring samples; images is (0, 3, 0, 0) when nothing could.

    Args:
        images: (B, 3, H, W), as the transform makes them.
        labels: (B,) int64; None when a sample of the batch has no label.
        indices: where each image is in the samples.
        skipped: (id, reason) of each sample that could not be read.
        sizes: width and height of each picture as opened.
    """

    images: Tensor
    labels: Tensor | None
    indices: list[int]
    skipped: list[tuple[str, str]]
    sizes: list[ImageSize]


def load_batches(
    samples: Samples,
    transform: Callable[[Image.Image], Tensor],
    *,
    batch_size: int,
    workers: int = 0,
    spawn: bool = False,
    seed: int = 0,
) -> Iterator[Batch]:
    """The samples in order, one Batch per `batch_size` of them; those that raise DataError are in `skipped`.

    Args:
        transform: gives a (3, H, W) float tensor, of one size for all; picklable if there are workers.
        workers: processes that decode; 0 decodes in this one.
        spawn: starts them afresh, as a process that uses CUDA must not be forked.
        seed: of what a random transform draws in the workers.
    """
    loader = DataLoader(
        _Readings(samples, transform),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_join,
        multiprocessing_context="spawn" if spawn and workers else None,
        generator=torch.Generator().manual_seed(seed),  # else every loop draws a seed from the caller's
    )
    yield from loader


_Reading = tuple[
    int, Sample, Tensor | str, ImageSize
]  # index, sample, its tensor or why there is none, its size


class _Readings(Dataset[_Reading]):
    def __init__(self, samples: Samples, transform: Callable[[Image.Image], Tensor]) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> _Reading:
        sample = self.samples[index]
        try:
            picture = sample.open()
        except (DataError, OSError) as error:
            return index, sample, str(error), ImageSize(0, 0)
        return index, sample, self.transform(picture), ImageSize(*picture.size)


def _join(readings: list[_Reading]) -> Batch:
    read = [(i, s, image, size) for i, s, image, size in readings if isinstance(image, Tensor)]
    labels = [sample.label for _, sample, _, _ in read if sample.label is not None]
    unlabelled = any(sample.label is None for _, sample, _, _ in readings)
    return Batch(
        images=torch.stack([image for _, _, image, _ in read]) if read else torch.empty(0, 3, 0, 0),
        labels=None if unlabelled else torch.tensor(labels, dtype=torch.int64),
        indices=[index for index, *_ in read],
        skipped=[(sample.id, reason) for _, sample, reason, _ in readings if isinstance(reason, str)],
        sizes=[size for *_, size in read],
    )
