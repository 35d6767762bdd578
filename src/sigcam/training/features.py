"""From images to what enters the head, once per image and view, in memory or in the cache on disk."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, barrier, local_batches, rank, world_size
from sigcam.core.errors import AttachError, DataError
from sigcam.core.types import Progress
from sigcam.data.labels import match_classes
from sigcam.data.loader import load_batches
from sigcam.data.sample import Sample, Samples
from sigcam.models.preprocess import Preprocess, Transform
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.optimize import optimized
from sigcam.network.trace import chunks
from sigcam.training.feature_cache import DTYPES, IMAGES_PER_CHUNK, FeatureStore, check_space, find_store
from sigcam.training.loss import as_targets, check_labels

log = logging.getLogger("sigcam")
TrainingData = Samples | Sequence[Sample] | Dataset[Any] | DataLoader[Any]


@dataclass(frozen=True)
class Features:
    """What enters the head, of this process's share of the images; also something to fit on.

    Args:
        views: (n, ...) each, one tensor per view of the images.
        labels: (n,) class indices, -1 for none of them; or (n, C) zeros and ones.
        index: (n,) where each image is among all; None: these are all.
        skipped: (id, reason) of each image of any process that could not be read.
        seconds: where the time went.
    """

    views: tuple[Tensor, ...]
    labels: Tensor
    index: Tensor | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def placed(self) -> Tensor:
        """(n,) where each image is among all."""
        return torch.arange(len(self)) if self.index is None else self.index


def extract(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    *,
    transform: Transform | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    labelled: bool = True,
) -> Features:
    """The features of this process's share of the data, in the precision of the cache.

    Args:
        cache: folder of the cache; None keeps features in memory. Only `Samples` have names to be found by.
        labelled: False for images that show none of the classes: their labels are -1.
    """
    began, stage = time.perf_counter(), "features" if labelled else "negatives"
    linear = linear_layer(net) is not None
    if isinstance(data, Features):
        found = _given(net, data, config, linear, labelled)
    elif isinstance(data := as_samples(data, net), Samples):
        transform = transform or net.transform
        if transform is None:
            raise DataError("samples need preprocessing: set net.transform, or fit(..., transform=...).")
        labels = torch.full((len(data),), -1)
        if labelled:
            data = match_classes(data, net.classes, net.class_names)
            if any(sample.label is None for sample in data):
                raise DataError("fitting needs labelled samples.")
            labels = torch.tensor([sample.label for sample in data], dtype=torch.int64)
            check_labels(labels, net.classes)
        reader = _Reader(faster_copy(net), data, config, transform, linear, stage, progress)
        found = reader.read(cache)
        found = replace(found, labels=labels[found.placed()])
    else:
        if not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
            raise DataError(f"fit takes Samples, a torch Dataset or a DataLoader, not {type(data).__name__}.")
        found = _from_batches(faster_copy(net), data, config, linear, progress, stage, labelled)
    return replace(found, seconds={**found.seconds, stage: time.perf_counter() - began})


def as_samples(data: TrainingData, net: DualBranch) -> TrainingData:
    """`Samples` for a list of `Sample`; anything else as it is."""
    if isinstance(data, list | tuple) and data and all(isinstance(item, Sample) for item in data):
        most = max((item.label for item in data if item.label is not None), default=0)
        names = net.class_names or tuple(f"class {k}" for k in range(max(net.classes, 2, most + 1)))
        return Samples(tuple(data), names)
    return data


def linear_layer(net: DualBranch) -> nn.Module | None:
    """The branch's one layer, if its logits are that layer's weight times `pooled` (or the mean over the grid
    of it) plus a bias; None for any other head."""
    head, layer = net.sigmoid, net.last_layer("sigmoid")
    found, shape = linear_weight(layer), tuple(_example_pooled(net).shape[1:])
    if len(head.copies) > 1 or found is None or len(shape) not in (1, 3):
        return None
    weight, bias = (part.detach().double() for part in found)
    if weight.shape != (net.classes, shape[0]):
        return None
    generator = torch.Generator().manual_seed(0)
    pooled = torch.randn(3, *shape, generator=generator).to(net.device, next(head.parameters()).dtype)
    with torch.no_grad():
        logits = head.from_pooled(pooled).double()
        expected = reduced(pooled, linear=True).double() @ weight.T + bias
    close = 1e-4 if next(head.parameters()).dtype in (torch.float32, torch.float64) else 3e-2
    scale = expected.abs().max().clamp(min=1e-12)
    return layer if bool((logits - expected).abs().max() <= close * scale) else None


def faster_copy(net: DualBranch) -> DualBranch:
    """The network around a faster copy of its model, where a CPU runs it: what is lost is less than the
    rounding of the cache."""
    if net.device.type != "cpu" or net.model is not net.original or net.example is None:
        return net
    places = (net.split.layer, *net.split.heads, *net.split.last)
    try:
        return net.with_model(optimized(net.model, net.example.to(next(net.model.parameters())), keep=places))
    except AttachError:  # it cannot be copied
        return net


def reduced(pooled: Tensor, linear: bool) -> Tensor:
    """What is kept of (B, ...) `pooled`: for a linear head on maps, their mean over the grid is enough."""
    return pooled.mean((2, 3)) if linear and pooled.ndim == 4 else pooled


@torch.no_grad()
def _example_pooled(net: DualBranch) -> Tensor:
    assert net.example is not None
    pooled: Tensor = net(net.example.to(next(net.model.parameters()))).pooled
    return pooled


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed inside; the caller's go on after it as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def compute_pooled(net: DualBranch, images: Tensor, config: FitConfig, *, linear: bool, who: str) -> Tensor:
    """What enters the head for (B, 3, H, W) images, in the precision of the cache, on the CPU."""
    dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
    images = images.to(net.device, dtype, non_blocking=True)
    half = torch.bfloat16 if net.device.type == "cpu" else torch.float16
    with torch.autocast(net.device.type, dtype=half, enabled=config.autocast):
        exact = torch.cat([reduced(net(part).pooled, linear).float() for part in chunks(images)])
    rows = exact.to(DTYPES[config.precision]).cpu()
    if not bool(torch.isfinite(rows).all()):
        if bool(torch.isfinite(exact).all()):
            raise DataError(f"features of {who} are too large for float16: set precision to bfloat16.")
        raise DataError(f"features are not finite among {who}: check images and weights.")
    return rows


# ------------------------------------------------------------------------------------- images with names


class _InMemory:
    """What a Store is on disk, without a disk."""

    def __init__(self, images: int, shape: tuple[int, ...], config: FitConfig) -> None:
        self.features = torch.empty(images, torch.Size(shape).numel(), dtype=DTYPES[config.precision])

    def missing(self, chunks: Iterable[int]) -> list[int]:
        return list(chunks)

    def write(self, chunk: int, rows: Tensor) -> None:
        self.features[chunk * IMAGES_PER_CHUNK :][: len(rows)] = rows.flatten(1)

    def read(self) -> Tensor:
        return self.features


@dataclass(frozen=True)
class _Reader:
    """Features of samples, chunk by chunk; a process computes every n-th chunk and reads no other."""

    net: DualBranch
    samples: Samples
    config: FitConfig
    transform: Transform
    linear: bool
    stage: str
    progress: Progress | None

    def read(self, cache: Path | None) -> Features:
        """All of this process's share, what is not in the cache computed now."""
        if not len(self.samples):
            return Features((torch.empty(0),) * self.config.views, torch.empty(0))
        shape = tuple(reduced(_example_pooled(self.net), self.linear).shape[1:])
        stores = self._stores(cache, shape)
        own = list(local_batches(-(-len(self.samples) // IMAGES_PER_CHUNK)))
        missing = [set(store.missing(own)) | self._readable_again(store, own) for store in stores]
        skipped = self._fill(stores, shape, own, missing)
        index = torch.tensor([i for chunk in own for i in self._rows(chunk)], dtype=torch.int64)
        views = [store.read() if world_size() == 1 else store.read()[index] for store in stores]
        unread = torch.stack([view[:, 0].isnan() for view in views]).any(0)
        if bool(unread.any()):
            known = {name for name, _ in skipped}
            again = [self.samples[i] for i in index[unread].tolist()]
            reasons = [_unreadable(sample) for sample in again if sample.id not in known]
            skipped += [(name, why or f"{name} cannot always be read.") for name, why in reasons]
            index, views = index[~unread], [view[~unread] for view in views]
        parts = all_gather(skipped)
        place = {sample.id: i for i, sample in enumerate(self.samples)} if any(parts) else {}
        everyone = sorted((pair for part in parts for pair in part), key=lambda pair: place[pair[0]])
        return Features(
            tuple(view.view(-1, *shape) for view in views), torch.empty(0), index, tuple(everyone)
        )

    def _rows(self, chunk: int) -> range:
        return range(chunk * IMAGES_PER_CHUNK, min((chunk + 1) * IMAGES_PER_CHUNK, len(self.samples)))

    def _readable_again(self, store: FeatureStore | _InMemory, own: list[int]) -> set[int]:
        """Chunks with a picture that could not be read when they were made, and now can."""
        if isinstance(store, _InMemory):
            return set()
        unread = store.read()[:, 0].isnan().nonzero()[:, 0].tolist()
        local_batches, found = set(own), set[int]()
        for i in unread:
            if i // IMAGES_PER_CHUNK in local_batches - found and not isinstance(
                _unreadable(self.samples[i])[1], str
            ):
                found.add(i // IMAGES_PER_CHUNK)
        return found

    def _fill(
        self, stores: Sequence[Any], shape: tuple[int, ...], own: list[int], missing: list[set[int]]
    ) -> list[tuple[str, str]]:
        """Computes the missing chunks; (id, reason) of pictures that cannot be read."""
        samples, config = self.samples, self.config
        todo = sorted(set[int]().union(*missing))
        total = sum(len(self._rows(chunk)) for chunk in own)
        done = total - sum(len(self._rows(chunk)) for chunk in todo)
        if self.progress and done:
            self.progress(self.stage, done, total)
        some = Samples(tuple(samples[i] for chunk in todo for i in self._rows(chunk)), samples.classes)
        apart = self.net.device.type == "cuda"
        batches = load_batches(
            some, self.transform, batch_size=IMAGES_PER_CHUNK, workers=config.workers, spawn=apart
        )
        skipped = list[tuple[str, str]]()
        for number, (chunk, batch) in enumerate(zip(todo, batches, strict=True)):
            rows = self._rows(chunk)
            who = f"images {samples[rows[0]].id} to {samples[rows[-1]].id}"
            at = (
                torch.tensor(batch.indices, dtype=torch.int64) - number * IMAGES_PER_CHUNK
            )  # only the last is shorter
            skipped += batch.skipped
            for view, store in enumerate(stores):
                if chunk in missing[view]:
                    made = torch.full((len(rows), *shape), torch.nan, dtype=DTYPES[config.precision])
                    if len(at):  # what could not be read stays NaN
                        images = batch.images.flip(-1) if view else batch.images
                        made[at] = compute_pooled(self.net, images, config, linear=self.linear, who=who)
                    store.write(chunk, made)
            done += len(rows)
            if self.progress:
                self.progress(self.stage, done, total)
        return skipped

    def _stores(self, cache: Path | None, shape: tuple[int, ...]) -> Sequence[FeatureStore | _InMemory]:
        net, config, views = self.net, self.config, range(self.config.views)
        told = str(self.transform) if isinstance(self.transform, Preprocess) else None
        nameless = any(sample.path is None for sample in self.samples)
        if cache is None or told is None or nameless:
            if cache is not None and not nameless:
                log.warning("features stay in memory: a transform of your own has no name to find them by.")
            return [_InMemory(len(self.samples), shape, config) for _ in views]
        facts = {
            "model": type(net.model).__name__,
            "graph": hashlib.blake2b(repr(net.original).encode(), digest_size=8).hexdigest(),
            "weights": fingerprint(net.original),
            "layer": net.split.layer,
            "heads": list(net.split.heads),
            "transform": told,
            "autocast": config.autocast,
            "optimized": net.model is not net.original,
        }
        stores = [
            find_store(cache, self.samples, shape, config.precision, {**facts, "view": view})
            for view in views
        ]
        if rank() == 0:
            check_space(cache, sum(store.size for store in stores if not store.is_there()))
        barrier()
        for store in stores:
            store.create()
        barrier()
        return stores


def _unreadable(sample: Sample) -> tuple[str, str | None]:
    """Why a picture cannot be read; None if it can."""
    try:
        sample.open()
    except (DataError, OSError) as error:
        return sample.id, str(error)
    return sample.id, None


# ---------------------------------------------------------------------------------- tensors without names


def _given(net: DualBranch, data: Features, config: FitConfig, linear: bool, labelled: bool) -> Features:
    """This process's share of features that somebody else computed."""
    shape = tuple(reduced(_example_pooled(net), linear).shape[1:])
    if not data.views or any(tuple(view.shape[1:]) != shape for view in data.views):
        seen = tuple(data.views[0].shape) if data.views else "none"
        raise DataError(f"features must be {('n', *shape)} for this head, not {seen}.")
    if any(len(view) != len(data) for view in data.views):
        raise DataError(f"there are {len(data.views[0])} features with {len(data)} labels: give one each.")
    if len(data.views) < config.views:
        raise DataError(
            f"views={config.views} needs as many of the features, and there is {len(data.views)}."
        )
    if labelled:
        check_labels(data.labels, net.classes)
    index = torch.arange(rank(), len(data), world_size())
    views = tuple(view[index].to(DTYPES[config.precision]) for view in data.views[: config.views])
    if any(not bool(torch.isfinite(view).all()) for view in views):
        raise DataError(f"some of the features are not finite in {config.precision}.")
    return replace(data, views=views, labels=data.labels[index], index=index)


def _from_batches(
    net: DualBranch,
    data: Any,
    config: FitConfig,
    linear: bool,
    progress: Progress | None,
    stage: str,
    labelled: bool,
) -> Features:
    """Features of a torch Dataset or DataLoader; a process takes every n-th batch."""
    views: list[list[Tensor]] = [[] for _ in range(config.views)]
    labels, index, seen = list[Tensor](), list[Tensor](), 0
    total = length_of(data)
    for number, item in enumerate(batches_of(data, config)):
        images, targets = check_batch(item, net.classes, labelled=labelled)
        rows = torch.arange(seen, seen + len(images))
        seen += len(images)
        if number % world_size() != rank():
            continue
        who = f"images {seen - len(images)} to {seen - 1}"
        for view, kept in enumerate(views):
            flipped = images.flip(-1) if view else images
            kept.append(compute_pooled(net, flipped, config, linear=linear, who=who))
        labels.append(targets)
        index.append(rows)
        if progress:
            progress(stage, seen, max(total, seen))
    if not seen:
        return Features((torch.empty(0),) * config.views, torch.empty(0))
    if not labels:
        raise DataError(
            f"{seen} images in one batch are too few for {world_size()} processes: use smaller batches."
        )
    return Features(tuple(torch.cat(view) for view in views), torch.cat(labels), torch.cat(index))


def batches_of(data: Any, config: FitConfig, *, shuffle: bool = False) -> Iterable[Any]:
    """Batches of a torch Dataset, in random order where it has one to change; a DataLoader as it is."""
    if isinstance(data, DataLoader):
        return data
    own = torch.Generator()  # else every loop draws a seed from the caller's
    own.manual_seed(int(torch.randint(2**31, ())) if shuffle else 0)
    mixed = shuffle and hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return DataLoader(
        cast(Dataset[Any], data),
        batch_size=config.batch_size,
        shuffle=mixed,
        num_workers=config.workers,
        generator=own,
    )


def length_of(data: Any) -> int:
    """How many images there are; 0 if it cannot be told."""
    try:
        held: Any = data.dataset if isinstance(data, DataLoader) else data
        return len(held)
    except TypeError:  # an iterable data set has no length
        return 0


def check_batch(item: Any, classes: int, *, labelled: bool = True) -> tuple[Tensor, Tensor]:
    """One batch of the data as images (B, 3, H, W) and labels, (B,) or (B, C), on the CPU."""
    if not labelled:
        images = item[0] if isinstance(item, tuple | list) else item
        return images, torch.full((len(images),), -1)
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"the data must yield (images, labels), not {type(item).__name__}.")
    images, labels = item[0], item[1]
    if not isinstance(images, Tensor) or images.ndim != 4:
        seen = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"the data must yield images as (B, C, H, W) tensors, not {seen}.")
    try:
        labels = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"labels must be numbers, not {str(labels)[:60]}.") from None
    targets = as_targets(labels, classes)
    if len(targets) != len(images):
        raise DataError(f"the data yields {len(images)} images with {len(targets)} labels.")
    return images, labels.long() if labels.ndim == 1 else targets
