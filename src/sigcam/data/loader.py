"""Decode samples into batches of tensors, in order; unreadable files are reported, not fatal."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize, Skipped
from sigcam.data.sample import Samples


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
    yield from DataLoader(
        cast("Dataset[int]", range(len(samples))),  # _decode opens the samples of a batch of indices
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=partial(_decode, samples, transform, keep_pictures),
        worker_init_fn=ignore_interrupts,
        multiprocessing_context="spawn" if spawn and workers else None,
        generator=torch.Generator().manual_seed(seed),  # otherwise each loop draws from the global generator
    )


def ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which reaches all processes of a terminal, to the process that started this worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _decode(
    samples: Samples, transform: Callable[[Image.Image], Tensor] | None, keep_pictures: bool, batch: list[int]
) -> Batch:
    tensors, read, skipped = list[Tensor](), list[int](), list[Skipped]()
    sizes, pictures = list[ImageSize](), list[Image.Image]()
    for index in batch:
        try:
            picture = samples[index].open()
        except (DataError, OSError) as error:
            skipped.append((samples[index].id, str(error)))
            continue
        read.append(index)
        sizes.append(ImageSize(*picture.size))
        tensors += [transform(picture)] if transform else []
        pictures += [picture] if keep_pictures else []
    images = torch.stack(tensors) if tensors else torch.empty(0, 3, 0, 0)
    unlabelled = any(samples[index].label is None for index in batch)
    labels = None if unlabelled else torch.tensor([samples[index].label for index in read], dtype=torch.int64)
    return Batch(images, labels, read, skipped, sizes, pictures)
