"""extract: from images to what enters the head, computed once per image and view, or read from a file."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, rank, world_size
from sigcam.core.errors import DataError
from sigcam.core.files import error_line
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import ignore_interrupts
from sigcam.data.sample import Sample, Samples, match_classes, name_classes
from sigcam.data.text_files import MAX_CLASSES
from sigcam.models.preprocess import Transform
from sigcam.network.dual import DualBranch
from sigcam.training.background import classes_of
from sigcam.training.feature_cache import DTYPES
from sigcam.training.feature_reader import FeatureReader, HeadInputs, check_features
from sigcam.training.loss import as_targets, check_labels

MAX_UNPACKED, MAX_RATIO = 10**9, 20  # bytes; an archive that unpacks to more of them, and so much, is a trap
TrainingData = Samples | Sequence[Sample] | Dataset[Any] | DataLoader[Any]


@dataclass(frozen=True)
class Features:
    """What enters the sigmoid head, for the images of this process; `fit` takes it in place of images.

    Unlike `Branches.features`, these are not the maps F but the input of the head's first trainable layer,
    usually the (n, N) mean of F over the grid.

    Args:
        views: one (n, ...) tensor per view: the images, and with `views=2` their mirror images.
        labels: (n,) class indices, -1 for none of the classes; or (n, C) zeros and ones.
        index: (n,) position of each image in the whole data; None if these are all images, in order.
        skipped: (id, reason) of each image of any process that could not be read.
        seconds: duration of each stage.
        backgrounds: one (n, ...) tensor per view, of the images' backgrounds; infinite for an image that has
            too little of it. Empty if they were not computed.
        maps: one (n, N, P, Q) tensor per view, of F, from which `fit` computes backgrounds; empty if they
            were not kept.
    """

    views: tuple[Tensor, ...]
    labels: Tensor
    index: Tensor | None = None
    skipped: tuple[Skipped, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    backgrounds: tuple[Tensor, ...] = ()
    maps: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def positions(self) -> Tensor:
        """Return the (n,) position of each image in the whole data."""
        return torch.arange(len(self)) if self.index is None else self.index

    def gather_labels(self) -> tuple[Tensor, Tensor]:
        """Return positions (B,) and labels, (B,) or (B, C), of the images of all processes, in order."""
        parts = all_gather((self.positions(), self.labels))
        index, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        order = index.argsort()
        return index[order], labels[order]


def extract(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    *,
    inputs: HeadInputs | None = None,
    transform: Transform | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    labelled: bool = True,
    backgrounds: bool = False,
    zoom: float = 1.0,
    only: Tensor | None = None,
    maps: bool = False,
) -> Features:
    """Return the features of this process's share of the data, in the precision of the cache.

    Args:
        inputs: the head's inputs, if they are known already.
        cache: folder of the cache; None keeps features in memory, as for all data but `Samples` with paths.
        labelled: False for images that show none of the classes: their labels are -1.
        backgrounds: also compute the features of the images' backgrounds; for labelled data.
        zoom: enlargement of the images.
        only: sorted positions of the images to use; all by default.
        maps: also keep F of samples, within a budget, so that backgrounds need no second pass once the
            softmax head is trained.
    """
    began, stage = time.perf_counter(), "features" if labelled else "negatives"
    stage = stage if zoom == 1 else f"zoom {zoom:g}"
    inputs = inputs or HeadInputs(net)
    if isinstance(data, Features):
        features = _local_share(inputs, data, config, labelled, backgrounds)
    elif isinstance(data := match_labels(net, data) if labelled else as_samples(net, data), Samples):
        transform = preprocessing(net, transform)
        if only is not None:
            data = Samples(tuple(data[i] for i in only.tolist()), data.classes)
        labels = all_labels(net, data, config) if labelled else torch.full((len(data),), -1)
        if labelled:
            check_labels(labels, net.classes)
        features = Features((torch.empty(0),) * config.views, labels)
        if len(data):
            reader = FeatureReader(inputs, data, config, transform, stage, progress, backgrounds, zoom, maps)
            rows, index, skipped = reader.read(cache)
            others = rows[config.views :]
            features = Features(rows[: config.views], labels[index], index, skipped)
            features = replace(features, maps=others) if maps else replace(features, backgrounds=others)
    elif hasattr(data, "__getitem__") or hasattr(data, "__iter__"):
        reading = inputs, data, config, progress, stage
        features = _from_batches(*reading, labelled, backgrounds=backgrounds, zoom=zoom, only=only)
    else:
        raise DataError(f"fit takes Samples, a torch Dataset or a DataLoader, not {type(data).__name__}.")
    return replace(features, seconds={**features.seconds, stage: time.perf_counter() - began})


def read_features(path: Path) -> Features:
    """Read features from an .npz file with `plain` (n, N), optionally `mirrored`, and `labels`."""
    try:
        with ZipFile(path) as archive:  # the sizes it states are never exceeded
            unpacked, packed = sum(member.file_size for member in archive.infolist()), path.stat().st_size
        if unpacked > max(MAX_UNPACKED, MAX_RATIO * packed):
            raise ValueError(f"{packed} bytes unpack to {unpacked}")
        with np.load(path) as arrays:
            views = [torch.from_numpy(arrays[name]) for name in ("plain", "mirrored") if name in arrays]
            labels = arrays["labels"]
            if labels.dtype.kind not in "biuf" or labels.ndim not in (1, 2):
                raise ValueError(f"labels are {labels.dtype} of shape {labels.shape}")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except Exception as error:  # hostile files raise almost anything: TokenError, OverflowError, MemoryError
        sentence = "It must be an .npz file with arrays plain and labels."
        raise DataError(f"cannot read {path} as features: {error_line(error)}. {sentence}") from error
    if not views:
        raise DataError(f"{path} has no array named plain: the features of the unaltered images.")
    if not all(view.is_floating_point() and view.ndim > 1 for view in views):
        raise DataError(f"{path} has features that are not (n, ...) floats: save what enters the head.")
    if not bool((abs(labels.astype(np.float64)) < MAX_CLASSES).all()) or bool((labels % 1 != 0).any()):
        raise DataError(f"{path} has labels that are not class numbers.")
    return Features(tuple(views), torch.from_numpy(labels.astype(np.int64)))


def as_samples(net: DualBranch, data: TrainingData) -> TrainingData:
    """Return `Samples` for a list of `Sample`, and any other data as it is."""
    if isinstance(data, list | tuple) and data and all(isinstance(item, Sample) for item in data):
        return name_classes(data, net.classes, net.class_names)
    return data


def match_labels(net: DualBranch, data: TrainingData) -> TrainingData:
    """Return samples with the classifier's numbers as labels, and any other data as it is."""
    data = as_samples(net, data)
    if isinstance(data, Samples):
        data = match_classes(data, net.classes, net.class_names)
        if any(sample.label is None for sample in data):
            raise DataError("fitting needs labelled samples.")
    return data


def all_labels(net: DualBranch, data: TrainingData, config: FitConfig) -> Tensor:
    """Return all labels of labelled data, (B,) or (B, C)."""
    if isinstance(data, Samples):
        return torch.tensor([sample.label for sample in data], dtype=torch.int64)
    parts = [check_batch(item, net.classes)[1] for item in batches_of(data, config)]
    return torch.cat(parts) if parts else torch.empty(0)


def preprocessing(net: DualBranch, transform: Transform | None) -> Transform:
    """Return the given transform, or else the network's; samples cannot be read without one."""
    transform = transform or net.transform
    if transform is None:
        raise DataError("samples need preprocessing: set net.transform, or fit(..., transform=...).")
    return transform


def _local_share(
    inputs: HeadInputs, data: Features, config: FitConfig, labelled: bool, backgrounds: bool
) -> Features:
    """Check features that the caller computed; return every n-th row of them for one of n processes, with
    backgrounds where these are wanted and maps were kept."""
    if not data.views or any(tuple(view.shape[1:]) != inputs.shape for view in data.views):
        actual = tuple(data.views[0].shape) if data.views else "none"
        raise DataError(f"features must be {('n', *inputs.shape)} for this head, not {actual}.")
    if any(len(view) != len(data) for view in data.views):
        raise DataError(f"there are {len(data.views[0])} features with {len(data)} labels: give one each.")
    if len(data.views) < config.views:
        raise DataError(f"views={config.views} needs as many views of the features, not {len(data.views)}.")
    if labelled:
        check_labels(data.labels, inputs.net.classes)
    index = torch.arange(rank(), len(data), world_size())
    dtype = DTYPES[config.precision]
    views = tuple(view[index].to(dtype) for view in data.views[: config.views])
    if any(not bool(torch.isfinite(view).all()) for view in views):
        raise DataError(f"some of the features are not finite in {config.precision}.")
    alone = tuple(view[index].to(dtype) for view in data.backgrounds[: config.views])
    if backgrounds and not alone:
        shown = classes_of(data.labels[index], inputs.net.classes)
        alone = tuple(inputs.backgrounds_of(view[index], shown, config) for view in data.maps[: config.views])
    return replace(data, views=views, labels=data.labels[index], index=index, backgrounds=alone, maps=())


def _from_batches(
    inputs: HeadInputs,
    data: Any,
    config: FitConfig,
    progress: Progress | None,
    stage: str,
    labelled: bool,
    *,
    backgrounds: bool,
    zoom: float,
    only: Tensor | None,
) -> Features:
    """Return the features of a torch Dataset or DataLoader; each of n processes takes every n-th batch."""
    rows: list[list[Tensor]] = [[] for _ in range(config.views * (2 if backgrounds else 1))]
    check_features(length_of(data) * len(rows), inputs.shape)
    labels, index, count = list[Tensor](), list[Tensor](), 0
    if progress:
        progress(stage, 0, length_of(data))
    for number, item in enumerate(batches_of(data, config)):
        images, targets = check_batch(item, inputs.net.classes, labelled=labelled)
        first, count = count, count + len(images)
        if number % world_size() == rank():
            positions = torch.arange(first, count)
            if only is not None:
                chosen = torch.isin(positions, only)
                images, targets, positions = images[chosen], targets[chosen], positions[chosen]
            shown = classes_of(targets, inputs.net.classes) if backgrounds else None
            if len(images):
                who = f"images {first} to {count - 1}"
                for view in range(config.views):
                    mirrored = images.flip(-1) if view else images
                    computed = inputs.compute(mirrored, config, who, shown, zoom)
                    for kind, part in enumerate(computed):
                        rows[view + kind * config.views].append(part)
            labels.append(targets)
            index.append(positions)
            if progress:
                progress(stage, count, max(length_of(data), count))
    if not count:
        return Features((torch.empty(0),) * config.views, torch.empty(0))
    if not labels:
        raise DataError(f"one batch is too little for {world_size()} processes: use smaller batches.")
    kinds = [torch.cat(kind) if kind else torch.empty(0, *inputs.shape) for kind in rows]
    views, alone = tuple(kinds[: config.views]), tuple(kinds[config.views :])
    return Features(views, torch.cat(labels), torch.cat(index), backgrounds=alone)


def batches_of(data: Any, config: FitConfig, *, shuffle: bool = False) -> Iterable[Any]:
    """Return the batches of a torch Dataset, shuffled if it can be indexed; a DataLoader as it is."""
    if isinstance(data, DataLoader):
        return data
    seed = int(torch.randint(2**31, ())) if shuffle else 0
    return DataLoader(
        cast(Dataset[Any], data),
        batch_size=config.batch_size,
        shuffle=shuffle and hasattr(data, "__len__") and hasattr(data, "__getitem__"),
        num_workers=config.workers,
        worker_init_fn=ignore_interrupts,
        generator=torch.Generator().manual_seed(seed),  # otherwise each loop draws from the global one
    )


def length_of(data: Any) -> int:
    """Return the number of images; 0 if it is unknown, as for an iterable Dataset."""
    return length_hint(data.dataset if isinstance(data, DataLoader) else data)


def check_batch(item: Any, classes: int, *, labelled: bool = True) -> tuple[Tensor, Tensor]:
    """Return one batch of the data as images (B, 3, H, W) and labels, (B,) or (B, C), on the CPU."""
    if not labelled:
        images = item[0] if isinstance(item, tuple | list) else item
        return images, torch.full((len(images),), -1)
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"the data must yield (images, labels), not {type(item).__name__}.")
    images, labels = item[:2]
    if not isinstance(images, Tensor) or images.ndim != 4:
        actual = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"the data must yield images as (B, C, H, W) tensors, not {actual}.")
    try:
        labels = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"labels must be numbers, not {str(labels)[:60]}.") from None
    targets = as_targets(labels, classes)
    if len(targets) != len(images):
        raise DataError(f"the data yields {len(images)} images with {len(targets)} labels.")
    return images, labels.long() if labels.ndim == 1 else targets
