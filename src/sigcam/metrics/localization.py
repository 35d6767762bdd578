"""Metrics of localisation (PROTOCOL 5) and fidelity (PROTOCOL 6) for anybody's maps; results are percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sigcam.core.errors import DataError
from sigcam.metrics.base import (
    IGNORED,
    Ids,
    ImageMetric,
    flags,
    ground_truth,
    image_names,
    object_masks,
    unit,
)
from sigcam.metrics.boxes import THRESHOLDS, best_ious, boxes_at

IOUS = (0.3, 0.5, 0.7)
_NAMES = ("30", "50", "70")
Truth = Literal["best", "first"]


class MaxBoxAcc(ImageMetric):
    """Images whose largest contour's box meets a ground-truth box with IoU >= 0.5, at the threshold that is
    best for the images counted (V1 of Choe et al., 2020)."""

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(shape=(len(IOUS), len(THRESHOLDS)), intervals=intervals, **kwargs)
        self.chosen: Tensor | None = None

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1] with one (G, 4) tensor of xyxy boxes in map pixels each."""
        self.add(_found(self, maps, boxes, ids, "largest"), ids)

    def percent(self, totals: Tensor, images: Tensor) -> Tensor:
        return _accuracy(totals, images, self.chosen)[0][..., 1]

    def best_threshold(self) -> Tensor:
        """The threshold that is best for the images counted; of equals, the lowest."""
        return _best_threshold(self)[1]

    def at(self, threshold: float | Tensor) -> MaxBoxAcc:
        """A copy that computes the accuracy at a threshold chosen elsewhere, a multiple of 0.001."""
        other = cast(MaxBoxAcc, self.clone())
        other.chosen, other._computed = _index(threshold), None
        return other

    def accuracy_at(self, threshold: float | Tensor) -> Tensor:
        """The accuracy at a threshold chosen elsewhere."""
        return cast(Tensor, self.at(threshold).compute())


class MaxBoxAccV2(ImageMetric):
    """Images with any contour's box that meets a ground-truth box, at the threshold that is best for the
    images counted, for each IoU of 0.3, 0.5, 0.7, and their mean (Choe et al., 2020)."""

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(shape=(len(IOUS), len(THRESHOLDS)), intervals=intervals, **kwargs)
        self.chosen: Tensor | None = None

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1] with one (G, 4) tensor of xyxy boxes in map pixels each."""
        self.add(_found(self, maps, boxes, ids, "all"), ids)

    def percent(self, totals: Tensor, images: Tensor) -> dict[str, Tensor]:
        accuracy, threshold = _accuracy(totals, images, self.chosen)
        result = {"max_box_acc_v2": accuracy.mean(-1)}
        result |= {f"max_box_acc_{name}": accuracy[..., i] for i, name in enumerate(_NAMES)}
        return result | {f"threshold_{name}": threshold[..., i] for i, name in enumerate(_NAMES)}

    def best_threshold(self) -> Tensor:
        """The thresholds that are best for the images counted, one for each IoU; of equals, the lowest."""
        return _best_threshold(self)

    def at(self, threshold: float | Tensor) -> MaxBoxAccV2:
        """A copy that computes the accuracy at one threshold chosen elsewhere, or at one for each IoU."""
        other = cast(MaxBoxAccV2, self.clone())
        other.chosen, other._computed = _index(threshold), None
        return other

    def accuracy_at(self, threshold: float | Tensor) -> dict[str, Tensor]:
        """The accuracies at one threshold chosen elsewhere, or at one for each IoU."""
        return cast(dict[str, Tensor], self.at(threshold).compute())


def without_peeking(
    test: MaxBoxAcc | MaxBoxAccV2, val: MaxBoxAcc | MaxBoxAccV2, *, fixed: float = 0.2
) -> dict[str, dict[str, Tensor]]:
    """Three columns for `test`: "oracle", its own best threshold, as the protocol has it; "transferred", the
    threshold that is best on `val`; "fixed". Only the last two can be had without the test annotations."""
    if type(test) is not type(val):
        kinds = f"{type(test).__name__} and {type(val).__name__}"
        raise DataError(f"a threshold of one metric says nothing about another ({kinds}): use one for both.")
    columns = {
        "oracle": test.accuracy_at(test.best_threshold()),
        "transferred": test.accuracy_at(val.best_threshold()),
        "fixed": test.accuracy_at(fixed),
    }
    return {k: dict(v) if isinstance(v, Mapping) else {"max_box_acc": v} for k, v in columns.items()}


def _found(
    metric: ImageMetric, maps: Tensor, boxes: Sequence[Tensor], ids: Ids, mode: Literal["all", "largest"]
) -> Tensor:
    names = image_names(maps, ids, metric.images)
    maps = unit(maps, "B, H, W", "maps", names, metric.device)
    truth, owner = ground_truth(boxes, maps, names)
    each = list(truth.split(owner.bincount(minlength=len(maps)).tolist()))
    ious = best_ious(maps, each, mode=mode)  # (B, T)
    return torch.stack([ious >= iou for iou in IOUS], 1)  # (B, 3, T)


def _accuracy(counts: Tensor, images: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Percent right and the threshold, both (..., 3), for counts (..., 3, T): the best or the chosen."""
    at = counts.argmax(-1) if chosen is None else chosen.to(counts.device).expand(counts.shape[:-1])
    right = counts.gather(-1, at[..., None])[..., 0]
    return 100 * right.double() / images, THRESHOLDS.to(counts.device)[at]


def _best_threshold(metric: ImageMetric) -> Tensor:
    metric.compute()  # refuses when there is nothing to choose from
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
        return _accuracy(metric.counts, metric.images, None)[1]


def _index(threshold: float | Tensor) -> Tensor:
    thousandths = 1000 * torch.as_tensor(threshold, dtype=torch.float64).cpu()
    index = thousandths.round()
    if not ((index - thousandths).abs() < 1e-6).all() or not ((index >= 0) & (index <= 1000)).all():
        raise DataError(f"thresholds are 0, 0.001, ..., 1, not {threshold}: round it.")
    if index.shape not in ((), (len(IOUS),)):
        raise DataError(f"give one threshold, or one for each IoU of {IOUS}, not {tuple(index.shape)}.")
    return index.long()


class _Located(ImageMetric):
    """The largest contour's box at a fixed threshold (PROTOCOL 5.4); `boxes` says which ground-truth box it
    must meet, any of them or, as the authors read it, the first."""

    def __init__(
        self,
        *,
        threshold: float = 0.2,
        iou: float = 0.5,
        boxes: Truth = "best",
        intervals: bool = False,
        **kwargs: Any,
    ) -> None:
        if boxes not in ("best", "first"):
            raise DataError(f'boxes must be "best" or "first", not {boxes!r}.')
        super().__init__(setting=f"_{boxes}_{threshold:g}_{iou:g}", intervals=intervals, **kwargs)
        self.threshold, self.iou, self.boxes = threshold, iou, boxes

    def _right(self, maps: Tensor, boxes: Sequence[Tensor], names: list[Any]) -> Tensor:
        maps = unit(maps, "B, H, W", "maps", names, self.device)
        truth, owner = ground_truth(boxes, maps, names)
        drawn = [box.cpu() for box in boxes_at(maps, self.threshold, "largest")]
        met = _ious(torch.cat([*drawn, truth[:0]])[owner], truth) >= self.iou
        if self.boxes == "first":
            met &= owner != F.pad(owner, (1, 0), value=-1)[:-1]
        return _any(met, owner, len(maps))


def _ious(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of each of (G, 4) boxes with its other, the last pixel inside, in float64 (PROTOCOL 5.2)."""
    low, high = torch.maximum(boxes[:, :2], others[:, :2]), torch.minimum(boxes[:, 2:], others[:, 2:])
    both = (high - low + 1).clamp(min=0).prod(1).double()
    areas = (boxes[:, 2:] - boxes[:, :2] + 1).prod(1) + (others[:, 2:] - others[:, :2] + 1).prod(1)
    return both / (areas - both)


def _any(hits: Tensor, owner: Tensor, images: int) -> Tensor:
    """Whether any box of an image is hit, (B,) bool."""
    return torch.zeros(images, dtype=torch.int64).index_add(0, owner, hits.long()) > 0


class GTKnownLoc(_Located):
    """Images located by the map of their true class."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps of the true class with one (G, 4) tensor of boxes in map pixels each."""
        self.add(self._right(maps, boxes, image_names(maps, ids, self.images)), ids)


class Top1Loc(_Located):
    """Images both located and classified right."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], correct: Tensor, ids: Ids = None) -> None:
        """Count maps as GTKnownLoc does; `correct` (B,): the label is the best class (`in_top`)."""
        names = image_names(maps, ids, self.images)
        right = self._right(maps, boxes, names)
        self.add(right & flags(correct, "correct", names), ids)


class Top5Loc(_Located):
    """Images located whose label is among the five best classes."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], correct: Tensor, ids: Ids = None) -> None:
        """Count maps as GTKnownLoc does; `correct` (B,): the label is among the best five (`in_top`)."""
        names = image_names(maps, ids, self.images)
        right = self._right(maps, boxes, names)
        self.add(right & flags(correct, "correct", names), ids)


class Top1Cls(ImageMetric):
    """Images whose best class is their label."""

    def update(self, correct: Tensor, ids: Ids = None) -> None:
        """Count (B,) yes or no, as `in_top(scores, labels)` gives them."""
        self.add(flags(correct, "correct", image_names(correct, ids, self.images)), ids)


def in_top(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Whether each label is among the k best of its row of (B, C) scores, (B,) bool; of equals the first."""
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise DataError(
            f"scores must be (B, C), labels (B,), not {tuple(scores.shape)}, {tuple(labels.shape)}."
        )
    if scores.isnan().any() or ((labels < 0) | (labels >= scores.shape[1])).any():
        raise DataError(f"scores must not be NaN and labels must be in 0..{scores.shape[1] - 1}.")
    own = scores.gather(1, labels[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    return ((scores > own) | ((scores == own) & before)).sum(1) < k


class PxAP(ImageMetric):
    """Area under the precision-recall curve of all pixels of all images but the ignored (PROTOCOL 5.5).

    The bins of the score are those between the thresholds 0, 0.001, ..., 1, the last for 1 itself.
    """

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(shape=(2, len(THRESHOLDS)), dtype=torch.int32, intervals=intervals, **kwargs)

    def update(self, maps: Tensor, masks: Tensor | Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1] with masks of their size: 1 object, 0 background, 255 ignored."""
        names = image_names(maps, ids, self.images)
        maps = unit(maps, "B, H, W", "maps", names, self.device)
        kinds = object_masks(masks, maps, names).flatten(1)
        edges = THRESHOLDS.to(maps.device)
        bins = torch.bucketize(maps.flatten(1).double(), edges, right=True) - 1  # float64: as edges are
        rows = torch.arange(len(maps), device=maps.device)[:, None] * 2
        cells = ((rows + kinds) * len(edges) + bins)[kinds != IGNORED]
        counts = cells.bincount(minlength=len(maps) * 2 * len(edges))
        self.add(counts.reshape(len(maps), 2, len(edges)), ids)  # background, object

    def compute(self) -> Tensor:
        result = super().compute()
        assert isinstance(result, Tensor)
        if result.isnan():
            raise DataError("no pixel of any mask is 1 (object): PxAP has no recall to speak of.")
        return result

    def percent(self, totals: Tensor, images: Tensor) -> Tensor:
        positives = totals.double().flip(-1).cumsum(-1)  # from the highest score down
        false, true = positives[..., 0, :], positives[..., 1, :]
        precision = true / (true + false).clamp(min=1)
        gained = totals[..., 1, :].double().flip(-1)
        return 100 * (precision * gained).sum(-1) / true[..., -1]


class PointingGame(ImageMetric):
    """Images whose map is highest inside a ground-truth box, or within `tolerance` pixels of one.

    Zhang et al. (2016) allow 15 pixels and average over classes; this is the mean over images. Of equal
    maxima the first in reading order points, so a constant map points at the corner.
    """

    def __init__(self, *, tolerance: float = 0, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(setting=f"_{tolerance:g}", intervals=intervals, **kwargs)
        self.tolerance = tolerance

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1] with one (G, 4) tensor of boxes each, the last pixel inside."""
        names = image_names(maps, ids, self.images)
        maps = unit(maps, "B, H, W", "maps", names, self.device)
        truth, owner = ground_truth(boxes, maps, names)
        at = maps.flatten(1).argmax(1).cpu()
        point = torch.stack([at % maps.shape[2], at // maps.shape[2]], 1)[owner]  # x, y
        apart = torch.maximum(truth[:, :2] - point, point - truth[:, 2:]).clamp(min=0)
        hit = apart.double().norm(dim=1) <= self.tolerance
        self.add(_any(hit, owner, len(maps)), ids)


class EnergyInBox(ImageMetric):
    """Mean share of a map's sum that lies inside the ground-truth boxes (Wang et al., 2020); a blank map has
    none. A constant map scores the boxes' share of the image."""

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float64, intervals=intervals, **kwargs)

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1] with one (G, 4) tensor of boxes each, the last pixel inside."""
        names = image_names(maps, ids, self.images)
        maps = unit(maps, "B, H, W", "maps", names, self.device)
        truth, owner = ground_truth(boxes, maps, names)
        inside = torch.zeros(maps.shape, dtype=torch.bool)
        for i, (x0, y0, x1, y1) in zip(owner.tolist(), truth.tolist(), strict=True):
            inside[i, y0 : y1 + 1, x0 : x1 + 1] = True
        total = maps.sum((1, 2), dtype=torch.float64)
        within = (maps * inside.to(maps.device)).sum((1, 2), dtype=torch.float64)
        self.add(torch.where(total > 0, within / total, 0.0), ids)
