"""HeadInputs computes what enters the sigmoid head; FeatureReader does so for samples, with the cache."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.checkpoint import work_key
from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, barrier, local_batches, rank, world_size
from sigcam.core.errors import AttachError, DataError
from sigcam.core.memory import check_memory, free_memory, size_text
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.sample import Sample, Samples
from sigcam.models.preprocess import Preprocess, Transform
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.identity import hash_of_tensors, machine_facts, noise_input, transform_facts
from sigcam.network.image_errors import blame_images
from sigcam.network.optimize import optimized
from sigcam.network.trace import chunks
from sigcam.network.zoom import zoomed
from sigcam.training.background import KeptMaps, background_inputs, classes_of, suffices_f
from sigcam.training.feature_cache import (
    DTYPES,
    IMAGES_PER_CHUNK,
    FeatureStore,
    check_space,
    find_store,
    free_space,
)

log = logging.getLogger("sigcam")
MAX_MAPS = 2 * 10**9  # bytes of maps F that are kept: 16,000 images of 7 x 7 cells and 1,280 channels


class HeadInputs:
    """The input of a network's sigmoid head, found with one pass of the example image.

    Attributes:
        linear: whether the head is one linear layer.
        layer: the output layer, if the branch's logits are its weight times the stored features plus a
            bias; None for any other head.
        shape: of the features stored per image. For a linear head on maps, the mean over the grid suffices.
        suffices_f: whether backgrounds need no more of a pass than F.
    """

    def __init__(self, net: DualBranch) -> None:
        assert net.example is not None
        self.example = net.example.to(next(net.model.parameters()))
        with torch.no_grad():
            shape = tuple(net(self.example).pooled.shape[1:])
        layer = net.last_layer("sigmoid")
        self.net, self.linear = net, _is_linear(net, layer, shape)
        self.layer: nn.Module | None = layer if self.linear else None
        self.shape: tuple[int, ...] = shape[:1] if self.linear else shape
        self.suffices_f = suffices_f(net)

    @cached_property
    def fast_net(self) -> DualBranch:
        """The network around an optimised copy of its model, on a CPU; the difference in its features is
        smaller than the rounding of the cache."""
        net = self.net
        if net.device.type != "cpu" or net.model is not net.original:
            return net
        names = (net.split.layer, *net.split.heads, *net.split.last)
        try:
            return net.with_model(optimized(net.model, self.example, keep=names))
        except AttachError:  # the model cannot be copied
            return net

    def compute(
        self,
        images: Tensor,
        config: FitConfig,
        who: str,
        classes: Tensor | None = None,
        zoom: float = 1.0,
        maps: bool = False,
    ) -> list[Tensor]:
        """Return the head's input (B, ...) for images (B, 3, H, W), on the CPU, in the cache's precision and,
        given the (B, K) `classes` that they show, that for their backgrounds: infinite where there is none.
        With `maps`, then F. Errors call the images `who`."""
        exact, *others = self.exact(images, config, classes, zoom, maps)
        stored = [kind.to(DTYPES[config.precision]).cpu() for kind in (exact, *others)]
        if not bool(torch.isfinite(stored[0]).all()):
            if bool(torch.isfinite(exact).all()):
                raise DataError(f"features of {who} are too large for float16: set precision to bfloat16.")
            raise DataError(f"features are not finite among {who}: check images and weights.")
        return stored

    @torch.no_grad()
    def exact(
        self,
        images: Tensor,
        config: FitConfig,
        classes: Tensor | None = None,
        zoom: float = 1.0,
        maps: bool = False,
    ) -> list[Tensor]:
        """Return what `compute` does before it is rounded to the cache's precision; F is rounded to it, so
        that backgrounds are the same from maps that were kept."""
        net = self.fast_net
        dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
        images = images.to(net.device, dtype, non_blocking=True)
        net, images = zoomed(net, images, zoom)
        half = torch.bfloat16 if net.device.type == "cpu" else torch.float16
        stored = DTYPES[config.precision]
        grad, rows = classes is not None and "softmax" not in net.linear, list[list[Tensor]]()
        batches = chunks(images)
        shown = [None] * len(batches) if classes is None else classes.split([len(part) for part in batches])
        with torch.autocast(net.device.type, dtype=half, enabled=config.autocast):
            for part, index in zip(batches, shown, strict=True):
                with blame_images(net, part):
                    forward_pass = net.run(part, grad=grad)
                rows.append([_reduced(forward_pass.pooled.detach(), self.linear).float()])
                if index is not None:
                    source = KeptMaps.of(forward_pass, stored) if self.suffices_f else forward_pass
                    background = background_inputs(net, source, index.to(net.device), config)
                    rows[-1].append(_reduced(background, self.linear).float())
                if maps:
                    rows[-1].append(KeptMaps.of(forward_pass, stored).features)
        return [torch.cat(kind) for kind in zip(*rows, strict=True)]

    @torch.no_grad()
    def maps_shape(self, transform: Transform) -> tuple[int, ...] | None:
        """Return the shape of F of an image; None if backgrounds need more than F, or if it is not known."""
        if not self.suffices_f or not isinstance(transform, Preprocess):
            return None
        channels = self.example.shape[1]
        image = self.example.new_zeros(1, channels, transform.height, transform.width)
        return tuple(self.net(image).features.shape[1:])

    @torch.no_grad()
    def backgrounds_of(self, maps: Tensor, classes: Tensor, config: FitConfig) -> Tensor:
        """Return what `compute` does for backgrounds, given F (B, N, P, Q) that it returned."""
        net, rows = self.fast_net, list[Tensor]()
        half = torch.bfloat16 if net.device.type == "cpu" else torch.float16
        with torch.autocast(net.device.type, dtype=half, enabled=config.autocast):
            for part, index in zip(chunks(maps), chunks(classes), strict=True):
                kept = KeptMaps(part.to(net.device))
                rows.append(background_inputs(net, kept, index.to(net.device), config).float())
        return torch.cat(rows).to(DTYPES[config.precision]).cpu()


def _reduced(pooled: Tensor, linear: bool) -> Tensor:
    return pooled.mean((2, 3)) if linear and pooled.ndim == 4 else pooled


@torch.no_grad()
def _is_linear(net: DualBranch, layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether the branch's logits are the layer applied to its input, or to the mean over the grid."""
    head, parameters = net.sigmoid, linear_weight(layer)
    if len(head.copies) > 1 or parameters is None or len(shape) not in (1, 3):
        return False
    weight, bias = (part.detach().double() for part in parameters)
    if weight.shape != (net.classes, shape[0]):
        return False
    dtype = next(head.parameters()).dtype
    pooled = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(net.device, dtype)
    logits = head.from_pooled(pooled).double()
    expected = _reduced(pooled, linear=True).double() @ weight.T + bias
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-12))


def check_features(images: int, shape: tuple[int, ...]) -> None:
    """ConfigError if the features of so many images do not fit into memory."""
    needed, shown = 2 * images * torch.Size(shape).numel(), f"keeping features of {images} images"
    check_memory(
        needed, shown, "cache them on disk (--cache, or cache= and samples with paths), or use fewer"
    )


class MemoryStore:
    """A `FeatureStore` without a disk."""

    def __init__(self, images: int, shape: tuple[int, ...], config: FitConfig) -> None:
        self.shape = shape
        self.features = torch.empty(images, torch.Size(shape).numel(), dtype=DTYPES[config.precision])

    def missing(self, chunks: Iterable[int]) -> list[int]:
        return list(chunks)

    def write(self, chunk: int, rows: Tensor) -> None:
        self.features[chunk * IMAGES_PER_CHUNK :][: len(rows)] = rows.flatten(1)

    def read(self) -> Tensor:
        return self.features


@dataclass(frozen=True)
class FeatureReader:
    """Computes the features of samples. Of n processes, each computes and reads every n-th chunk.

    Args:
        backgrounds: also compute the features of each view's background, which depend on the labels.
        zoom: enlargement of the images.
        maps: also keep F, for backgrounds of a head that is yet to be trained: where `backgrounds_of` can use
            it and it takes at most `MAX_MAPS` bytes.
    """

    inputs: HeadInputs
    samples: Samples
    config: FitConfig
    transform: Transform
    stage: str
    progress: Progress | None
    backgrounds: bool = False
    zoom: float = 1.0
    maps: bool = False

    def read(self, cache: Path | None) -> tuple[tuple[Tensor, ...], Tensor, tuple[Skipped, ...]]:
        """Return one (n, ...) tensor per view, then one per view's backgrounds, or maps if they are kept; the
        (n,) positions of this process's readable images; and the unreadable images of all processes. Chunks
        that are not in the cache are computed."""
        stores, kept = self._open_stores(cache)
        local = local_batches(-(-len(self.samples) // IMAGES_PER_CHUNK))
        missing = [set(store.missing(local)) | self._readable_again(store, local) for store in stores]
        for view, maps in enumerate(kept):
            self._add_backgrounds(stores, missing, view, maps)
        skipped = self._compute_missing(stores, local, missing)
        index = torch.tensor([i for chunk in local for i in self._rows(chunk)], dtype=torch.int64)
        views = [store.read() if world_size() == 1 else store.read()[index] for store in stores]
        unread = torch.stack([view[:, 0].isnan() for view in views]).any(0)
        if bool(unread.any()):
            for i in index[unread].tolist():
                sample = self.samples[i]
                if sample.id not in skipped:
                    skipped[sample.id] = _read_error(sample) or f"{sample.id} cannot always be read."
            index, views = index[~unread], [view[~unread] for view in views]
        by_all = {name: reason for part in all_gather(skipped) for name, reason in part.items()}
        in_order = tuple((s.id, by_all[s.id]) for s in self.samples if s.id in by_all) if by_all else ()
        rows = tuple(view.view(-1, *store.shape) for view, store in zip(views, stores, strict=True))
        return rows, index, in_order

    def _rows(self, chunk: int) -> range:
        return range(chunk * IMAGES_PER_CHUNK, min((chunk + 1) * IMAGES_PER_CHUNK, len(self.samples)))

    def _readable_again(self, store: FeatureStore | MemoryStore, local: range) -> set[int]:
        """Return the chunks with an image that was unreadable when they were computed, and no longer is."""
        if isinstance(store, MemoryStore):
            return set()
        unread = store.read()[:, 0].isnan().nonzero()[:, 0].tolist()
        chunks = ((i, i // IMAGES_PER_CHUNK) for i in unread)
        return {chunk for i, chunk in chunks if chunk in local and _read_error(self.samples[i]) is None}

    def _add_backgrounds(
        self,
        stores: Sequence[FeatureStore | MemoryStore],
        missing: list[set[int]],
        view: int,
        maps: FeatureStore,
    ) -> None:
        """Compute the missing backgrounds of a view from maps that were kept, where there are some."""
        kind = view + self.config.views
        for chunk in sorted(missing[kind] - missing[view] - set(maps.missing(missing[kind]))):
            rows = self._rows(chunk)
            part, labels = maps.read()[rows.start : rows.stop], [self.samples[i].label for i in rows]
            found = torch.full((len(rows), *self.inputs.shape), torch.nan, dtype=part.dtype)
            read = ~part[:, 0].isnan()
            if bool(read.any()):
                shown = classes_of(torch.tensor(labels)[read], self.inputs.net.classes)
                features = part[read].view(-1, *maps.shape)
                found[read] = self.inputs.backgrounds_of(features, shown, self.config)
            stores[kind].write(chunk, found)
            missing[kind].discard(chunk)

    def _compute_missing(
        self, stores: Sequence[FeatureStore | MemoryStore], local: range, missing: list[set[int]]
    ) -> dict[str, str]:
        """Compute the chunks that a store misses; return why which image is unreadable: its row is NaN."""
        samples, config, dtype = self.samples, self.config, DTYPES[self.config.precision]
        todo = sorted(set[int]().union(*missing))
        total = sum(len(self._rows(chunk)) for chunk in local)
        done = total - sum(len(self._rows(chunk)) for chunk in todo)
        if self.progress:
            self.progress(self.stage, done, total)
        self.inputs.fast_net = self.inputs.fast_net.for_many(total - done)
        batches = load_batches(
            Samples(tuple(samples[i] for chunk in todo for i in self._rows(chunk)), samples.classes),
            self.transform,
            batch_size=IMAGES_PER_CHUNK,
            workers=config.workers,
            spawn=self.inputs.net.device.type == "cuda",
        )
        skipped = dict[str, str]()
        for number, (chunk, batch) in enumerate(zip(todo, batches, strict=True)):
            rows = self._rows(chunk)
            who = f"images {samples[rows[0]].id} to {samples[rows[-1]].id}"
            readable = torch.tensor(batch.indices, dtype=torch.int64) - number * IMAGES_PER_CHUNK
            skipped.update(batch.skipped)
            shown = None
            if self.backgrounds and batch.labels is not None:
                shown = classes_of(batch.labels, self.inputs.net.classes)
            for view in range(config.views):
                kinds = range(view, len(stores), config.views)  # the view, and its backgrounds
                if any(chunk in missing[kind] for kind in kinds):
                    shapes = [stores[kind].shape for kind in kinds]
                    features = [torch.full((len(rows), *shape), torch.nan, dtype=dtype) for shape in shapes]
                    if len(readable):
                        images = batch.images.flip(-1) if view else batch.images
                        maps = self.maps and len(kinds) > 1
                        computed = self.inputs.compute(images, config, who, shown, self.zoom, maps)
                        for each, part in zip(features, computed, strict=True):
                            each[readable] = part
                    for kind, each in zip(kinds, features, strict=True):
                        stores[kind].write(chunk, each)
            done += len(rows)
            if self.progress:
                self.progress(self.stage, done, total)
        return skipped

    def _open_stores(
        self, cache: Path | None
    ) -> tuple[Sequence[FeatureStore | MemoryStore], list[FeatureStore]]:
        """Return a store per view, then one per view's backgrounds or maps, on disk if samples and transform
        have names that find them again; and, for backgrounds, the stores of maps that were kept."""
        net, config = self.inputs.fast_net, self.config
        kinds: list[dict[str, Any]] = [{"view": view} for view in range(config.views)]
        if self.zoom != 1:
            kinds = [{**kind, "zoom": self.zoom} for kind in kinds]
        maps_kinds = [{**kind, "maps": True} for kind in kinds]
        if self.backgrounds:  # which depend on the last layer, through the softmax head's maps
            heads = [fingerprint(net.original.get_submodule(name)) for name in net.split.last]
            about = {"background": config.background_threshold, "last layer": heads}
            kinds += [{**kind, **about} for kind in kinds]
        have_paths = all(sample.path is not None for sample in self.samples)
        if cache is None or not have_paths or not isinstance(self.transform, Preprocess):
            if cache is not None and have_paths:
                log.warning("features stay in memory: a transform of your own has no name to find them by.")
            check_features(len(self.samples) * len(kinds), self.inputs.shape)
            shapes = [self.inputs.shape] * len(kinds) + self._maps_shapes(free_memory())
            return [MemoryStore(len(self.samples), shape, config) for shape in shapes], []
        facts = {
            "model": type(net.model).__name__,
            "graph": hashlib.blake2b(repr(net.original).encode(), digest_size=8).hexdigest(),
            "weights": fingerprint(net.original, without=net.split.last),
            "layer": net.split.layer,
            "heads": list(net.split.heads),
            "transform": transform_facts(self.transform),
            "autocast": config.autocast,
            "optimized": net.model is not net.original,
            "outputs": hash_of_tensors(self.inputs.exact(noise_input(net), config)),
            **machine_facts(net.device),
            "software": work_key(None),
        }

        def find(shape: tuple[int, ...], kinds: list[dict[str, Any]]) -> list[FeatureStore]:
            stores = (find_store(cache, self.samples, shape, config.precision, {**facts, **k}) for k in kinds)
            return list(stores)

        stores, kept = find(self.inputs.shape, kinds), list[FeatureStore]()
        if shapes := self._maps_shapes(free_space(cache)):
            stores += find(shapes[0], maps_kinds)
        elif self.backgrounds and (shape := self.inputs.maps_shape(self.transform)):
            kept = [store for store in find(shape, maps_kinds) if store.is_allocated()]
            kept = kept if len(kept) == config.views else []
        if rank() == 0:
            check_space(cache, sum(store.size for store in stores if not store.is_allocated()))
        barrier()
        for store in stores:
            store.create()
        barrier()
        return stores, kept

    def _maps_shapes(self, free: int | None) -> list[tuple[int, ...]]:
        """Return the shape of F for each view; nothing if it is not wanted, cannot be used, or takes more
        than the budget or half of what is free."""
        shape = self.inputs.maps_shape(self.transform) if self.maps else None
        if shape is None:
            return []
        needed = 2 * len(self.samples) * self.config.views * torch.Size(shape).numel()
        if needed > MAX_MAPS or (free is not None and needed > free / 2):
            sentence = "maps F of %d images take %s and are not kept: backgrounds take another pass."
            log.info(sentence, len(self.samples), size_text(needed))
            return []
        return [shape] * self.config.views


def _read_error(sample: Sample) -> str | None:
    """Return why an image cannot be read; None if it can."""
    try:
        sample.open()
    except (DataError, OSError) as error:
        return str(error)
    return None
