"""Images and labels in the batches that a training loop uses: tuples, lists or dicts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sigcam.core.errors import DataError
from sigcam.network.dataflow import tensors_in

LABELS = ("labels", "label")  # the names that the Hugging Face Trainer knows


def images_of(batch: Any) -> Tensor:
    """Return the first (B, C, H, W) tensor of floats in a batch."""
    for tensor in tensors_in(batch):
        if tensor.ndim == 4 and tensor.is_floating_point():
            return tensor
    kind = type(batch).__name__
    raise DataError(f"this {kind} of a batch holds no (B, C, H, W) tensor of floats: give images=.")


def labels_of(batch: Any) -> Tensor:
    """Return the labels of a batch: the second of a pair, or those named so."""
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in LABELS if name in batch), None)
    else:
        found = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if found is None:
        raise DataError(f"this {type(batch).__name__} of a training batch holds no labels: give data=.")
    return torch.as_tensor(found)


class LoaderPairs(Dataset[tuple[Tensor, Tensor]]):
    """The (image, label) pairs of a DataLoader's dataset, in its order, made by its collate_fn.

    A pass over the loader itself would be shuffled, and one of several processes would see its share only.
    """

    def __init__(self, loader: Any) -> None:
        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not indexed or (loader.batch_size is None and loader.batch_sampler is None):
            raise DataError(
                f"images are taken from a DataLoader of an indexed dataset, not from this "
                f"{type(loader).__name__}: give images=, and data= to fit on."
            )
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = self.loader.collate_fn([self.loader.dataset[index]])
        return images_of(batch)[0], labels_of(batch)[0]
