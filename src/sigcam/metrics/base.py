"""Base classes for metrics: summable state, optional per-image rows, input checks."""

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from sigcam.core.errors import ConfigError, DataError
from sigcam.metrics.boxes import THRESHOLDS, Mode, best_ious, check_boxes, cut_at_percentile

Value = Tensor | dict[str, Tensor]
Ids = Sequence[str] | None

UNIT_TOLERANCE = 1e-6  # resizing in float32 may leave [0, 1] by this much; values are clamped back
IGNORED = 255  # mask value of pixels that do not count
IOUS = (0.3, 0.5, 0.7)


class ImageMetric(Metric):
    """Base class for metrics: sums over images that merge across shards and ranks and, for intervals, one
    compact row per image. A subclass sets the shape and type of one image's values: bool or int32 are summed
    as int64 `counts`, float64 as `sums`.

    Args:
        setting: suffix that identifies the options which change what is counted.
        intervals: keep the packed values and a 16-byte key of each image, which `sigcam.bootstrap` needs.
    """

    value_shape: ClassVar[tuple[int, ...]] = ()
    value_dtype: ClassVar[torch.dtype] = torch.bool

    is_differentiable = False
    full_state_update = False
    higher_is_better: bool | None = True
    counts: Tensor
    sums: Tensor
    images: Tensor
    rows: list[Tensor]
    keys: list[Tensor]

    def __init__(self, *, intervals: bool = False, setting: str = "", **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "compute_with_cache": False})  # a kept result outlives its sums
        shape, dtype = self.value_shape, self.value_dtype
        self.intervals, self._empty = intervals, torch.zeros((0, *shape), dtype=dtype)
        total = torch.zeros(shape, dtype=dtype if dtype.is_floating_point else torch.int64)
        self._total = "sums" if dtype.is_floating_point else "counts"
        self.add_state(self._total, total, dist_reduce_fx="sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        # A MetricCollection merges the states of metrics whose states have the same names and values after
        # the first batch; a state named after class and setting prevents that.
        mark = type(self).__name__ + setting.replace(".", "_")
        self.add_state(mark, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        if intervals:
            self.add_state("rows", [], dist_reduce_fx="cat")
            self.add_state("keys", [], dist_reduce_fx="cat")
            self._start_rows()

    def check_maps(self, maps: Tensor, ids: Ids) -> tuple[Tensor, list[Any]]:
        """The (B, H, W) maps on this metric's device, and a name for each image."""
        names = image_names(maps, ids, self.images)
        return unit(maps, "B, H, W", "maps", names, self.device), names

    def check_boxed(self, maps: Tensor, boxes: Any, ids: Ids) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
        """The maps as from `check_maps`; all boxes, (sum of G, 4) int64, and the index of the image of each,
        both on the CPU; the names."""
        maps, names = self.check_maps(maps, ids)
        same_length(boxes, "sets of boxes", names)
        checked = list[Tensor]()
        for name, given in zip(names, boxes, strict=True):
            if given is None or not len(given):
                raise DataError(f"image {name!r} has no ground-truth box: annotate it or leave it out.")
            checked.append(torch.as_tensor(given).detach().cpu())
        check_boxes(checked, maps.shape, names)
        image = torch.tensor([i for i, each in enumerate(checked) for _ in each], dtype=torch.int64)
        return maps, torch.cat([torch.zeros(0, 4), *checked]).long(), image, names

    def add(self, values: Tensor, ids: Ids) -> None:
        """Add a batch of checked values, (B, *shape)."""
        values = values.to(self.device)
        total = getattr(self, self._total)
        setattr(self, self._total, total + values.sum(0, dtype=total.dtype))
        self.images = self.images + len(values)
        if self.intervals:
            self.rows.append(packed(values.to(self._empty.dtype)))
            self.keys.append(_keys(ids, len(values)).to(self.device))

    def compute(self) -> Value:
        """Return the result in percent, over all images of all ranks."""
        if not self.images:
            raise DataError(f"{type(self).__name__} has no images: call update before compute.")
        return self.percent(getattr(self, self._total), self.images)

    def percent(self, totals: Tensor, images: Tensor) -> Value:
        """The result for totals (..., *shape) over `images` images; leading axes are bootstrap resamples."""
        return 100 * totals.double() / images

    def table(self) -> tuple[Tensor, Tensor]:
        """Packed rows and keys of all images of all ranks, sorted by key."""
        if not self.intervals:
            name = type(self).__name__
            raise DataError(f"this {name} kept no rows per image: create it as {name}(intervals=True).")
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            rows, keys = dim_zero_cat(self.rows).cpu(), dim_zero_cat(self.keys).cpu()
        for column in (1, 0):  # the same order however images were sharded
            order = keys[:, column].argsort(stable=True)
            rows, keys = rows[order], keys[order]
        return rows, keys

    @property
    def row_bytes(self) -> int:
        """Bytes that `intervals` keeps per image: its packed values and its key."""
        return packed(self._empty.new_zeros(1, *self._empty.shape[1:])).nbytes + 16

    def unpacked(self, rows: Tensor) -> Tensor:
        """The values of packed rows, (N, values), in a float type that sums them exactly."""
        return unpacked(rows, self._empty.shape[1:].numel())

    def totals(self, sums: Tensor) -> Tensor:
        """Sums (R, values) of unpacked rows, in the shape that `percent` takes."""
        return sums.reshape(len(sums), *self._empty.shape[1:])

    def reset(self) -> None:
        """Forget all images."""
        super().reset()
        if self.intervals:
            self._start_rows()

    @property
    def update_called(self) -> bool:
        """Always true: `compute` itself says that there are no images, and sums may come from elsewhere."""
        return True

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the states of another metric of the same kind and setting."""
        own: dict[str, Any] = self.metric_state
        state = incoming_state.metric_state if isinstance(incoming_state, Metric) else incoming_state
        if state.keys() != own.keys():
            kinds = f"{', '.join(state)} to those of {type(self).__name__}: {', '.join(own)}"
            raise ConfigError(f"cannot add the states {kinds}. Merge metrics of one kind and setting.")
        for name, value in own.items():
            setattr(self, name, value + state[name])  # a sum of counts, or of lists of rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch and return its own result; a batch that raises leaves the sums unchanged."""
        Metric.forward(self.clone(), *args, **kwargs)  # torchmetrics resets itself to compute a batch alone
        return super().forward(*args, **kwargs)

    def _start_rows(self) -> None:
        # Never an empty list: a rank without images must gather rows of the same type and width.
        self.rows.append(packed(self._empty).to(self.device))
        self.keys.append(_keys(None, 0).to(self.device))


class BoxAccuracy(ImageMetric):
    """Base class for the share of images with a box at IoU 0.3, 0.5, 0.7 and each of 1001 thresholds.

    Args:
        percentile: thresholds are fractions of this percentile of each map; None for its maximum.
    """

    value_shape = (len(IOUS), len(THRESHOLDS))
    contours: ClassVar[Mode]  # whose boxes count
    chosen: Tensor | None = None  # index of the threshold to compute at; None for the best

    def __init__(
        self, *, percentile: float | None = None, intervals: bool = False, setting: str = "", **kwargs: Any
    ) -> None:
        setting += "" if percentile is None else f"_percentile_{percentile:g}"
        super().__init__(intervals=intervals, setting=setting, **kwargs)
        self.percentile = checked_percentile(percentile)

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] with one (G, 4) tensor of xyxy boxes in map pixels each."""
        maps, truth, image, _ = self.check_boxed(maps, boxes, ids)
        per_image = list(truth.split(image.bincount(minlength=len(maps)).tolist()))
        maps = maps if self.percentile is None else cut_at_percentile(maps, self.percentile)
        ious = best_ious(maps, per_image, mode=self.contours)  # (B, T)
        self.add(torch.stack([ious >= iou for iou in IOUS], 1), ids)

    def accuracies(self, counts: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Percent of images and the threshold, both (..., 3), for counts (..., 3, T): at the best threshold
        for each IoU, the lowest of equals, or at the chosen one."""
        at = counts.argmax(-1) if self.chosen is None else self.chosen.to(counts.device)
        at = at.expand(counts.shape[:-1])
        located = counts.gather(-1, at[..., None])[..., 0]
        return 100 * located.double() / images, THRESHOLDS.to(counts.device)[at]

    def best_threshold(self) -> Tensor:
        """The best threshold for the images counted, for each IoU, (3,); the lowest of equals."""
        self.compute()  # raises if there are no images
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return THRESHOLDS.to(self.counts.device)[self.counts.argmax(-1)]

    def at(self, threshold: float | Tensor) -> Self:
        """A copy that computes the accuracy at a given threshold, a multiple of 0.001, or at one per IoU."""
        copy = cast(Self, self.clone())
        copy.chosen = _threshold_index(threshold)
        return copy

    def accuracy_at(self, threshold: float | Tensor) -> Any:
        """The accuracy at a given threshold, or at one per IoU, in the form that `compute` returns."""
        return self.at(threshold).compute()


def checked_percentile(percentile: float | None) -> float | None:
    """Return the percentile; ConfigError unless it is above 0 and at most 100."""
    if percentile is not None and not 0 < percentile <= 100:
        raise ConfigError(f"a percentile is above 0 and at most 100, not {percentile!r}.")
    return percentile


def _threshold_index(threshold: float | Tensor) -> Tensor:
    thousandths = 1000 * torch.as_tensor(threshold, dtype=torch.float64).cpu()
    index = thousandths.round()
    if not ((index - thousandths).abs() < 1e-6).all() or not ((index >= 0) & (index <= 1000)).all():
        raise ConfigError(f"thresholds are 0, 0.001, ..., 1, not {threshold}: round it.")
    if index.shape not in ((), (len(IOUS),)):
        raise ConfigError(f"give one threshold, or one for each IoU of {IOUS}, not {tuple(index.shape)}.")
    return index.long()


def relative_drop(before: Tensor, after: Tensor) -> Tensor:
    """The share of each image's score that is lost, (B,); 0 where it grows."""
    return (before - after).clamp(min=0) / (before + 1e-7)  # the epsilon of Table 1


def packed(values: Tensor) -> Tensor:
    """Pack flags (B, ...) into bits, (B, bytes); flatten any other values to (B, values)."""
    values = values.reshape(len(values), values.shape[1:].numel())
    if values.dtype != torch.bool:
        return values
    return torch.from_numpy(np.packbits(values.cpu().numpy(), axis=1)).to(values.device)


def unpacked(rows: Tensor, width: int) -> Tensor:
    """Undo `packed`: flags as float32 (sums exact to 2^24), any other values as float64, (B, width)."""
    if rows.dtype != torch.uint8:
        return rows.double()
    return torch.from_numpy(np.unpackbits(rows.numpy(), axis=1, count=width)).float()


def _keys(ids: Ids, count: int) -> Tensor:
    """A 16-byte hash of each id, (B, 2) int64, since strings cannot be gathered; zeros without ids."""
    if ids is None:
        return torch.zeros((count, 2), dtype=torch.int64)
    digests = [hashlib.blake2b(str(i).encode(errors="surrogateescape"), digest_size=16).digest() for i in ids]
    halves = [[int.from_bytes(d[at : at + 8], signed=True) for at in (0, 8)] for d in digests]
    return torch.tensor(halves, dtype=torch.int64).reshape(count, 2)


def image_names(values: object, ids: Ids, start: Tensor) -> list[Any]:
    """Names of the images of a batch for error messages: their ids, or their position."""
    if not isinstance(values, Tensor) or not values.ndim:
        raise DataError(f"a batch must be a tensor with one entry per image, not {type(values).__name__}.")
    if ids is None:
        return [int(start) + i for i in range(len(values))]
    if isinstance(ids, str) or len(ids) != len(values):
        given = "one string" if isinstance(ids, str) else f"{len(ids)} ids"
        raise DataError(f"{given} for {len(values)} images: give one id per image.")
    return [str(i) for i in ids]


def unit(values: Tensor, dims: str, what: str, names: list[Any], device: torch.device) -> Tensor:
    """The batch on `device`, at least float32; DataError unless it holds floats in [0, 1]."""
    batch = f"the batch from image {names[0]!r} on" if names else "an empty batch"
    if values.ndim != len(dims.split(", ")) or 0 in values.shape[1:]:
        raise DataError(f"{what} must be ({dims}), not {tuple(values.shape)} ({batch}).")
    if not values.is_floating_point():
        raise DataError(f"{what} must be floats in [0, 1], not {values.dtype} ({batch}).")
    values = values.detach().to(device)
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    low, high = values.reshape(len(values), values.shape[1:].numel()).aminmax(dim=1)
    wrong = ~((low >= -UNIT_TOLERANCE) & (high <= 1 + UNIT_TOLERANCE))  # true for NaN
    if wrong.any():
        i = int(wrong.int().argmax())
        given = "NaN" if low[i].isnan() or high[i].isnan() else f"{low[i]:.6g} to {high[i]:.6g}"
        raise DataError(f"{what} of image {names[i]!r} must be in [0, 1], not {given}.")
    return values.clamp(0, 1)


def same_length(others: Any, what: str, names: list[Any]) -> None:
    """DataError unless there is one of `others` per image."""
    count = len(others) if hasattr(others, "__len__") else 0
    if count != len(names):
        last = f"the last image is {f'image {names[-1]!r}' if names else 'none'}"
        problem = f"image {names[count]!r} has none" if count < len(names) else last
        raise DataError(f"{count} {what} for {len(names)} images: {problem}.")


def flags(values: Tensor, what: str, names: list[Any]) -> Tensor:
    """One flag per image, (B,) bool."""
    same_length(values, what, names)
    values = torch.as_tensor(values).detach()
    if values.ndim != 1 or not (values.dtype == torch.bool or ((values == 0) | (values == 1)).all()):
        batch = f"the batch from image {names[0]!r} on"
        raise DataError(f"{what} must be yes or no for each image, (B,) bool ({batch}).")
    return values.bool().cpu()


def object_masks(masks: Tensor | Sequence[Tensor | None], maps: Tensor, names: list[Any]) -> Tensor:
    """Masks of the maps' size, (B, H, W) uint8: 1 object, 0 background, 255 ignored."""
    same_length(masks, "masks", names)
    checked = list[Tensor]()
    for name, given in zip(names, masks, strict=True):
        if given is None:
            raise DataError(f"image {name!r} has no mask: annotate it or leave it out.")
        mask = torch.as_tensor(given).detach().to(maps.device)
        if mask.shape != maps.shape[1:]:
            sizes = f"{tuple(mask.shape)}, its map is {tuple(maps.shape[1:])}"
            raise DataError(f"the mask of image {name!r} is {sizes}: resize it (nearest neighbour).")
        if not ((mask == 0) | (mask == 1) | (mask == IGNORED)).all():
            values = sorted({round(float(v), 4) for v in mask.unique()[:8]})
            kinds = "only 1 object, 0 background, 255 ignored"
            raise DataError(f"the mask of image {name!r} holds {values}: {kinds}.")
        checked.append(mask.to(torch.uint8))
    return torch.stack(checked) if checked else maps.to(torch.uint8)
