"""Localisation metrics (PROTOCOL 5); results are percent."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sigcam.core.errors import ConfigError, DataError
from sigcam.metrics.base import (
    IGNORED,
    BoxAccuracy,
    Ids,
    ImageMetric,
    checked_percentile,
    flags,
    image_names,
    object_masks,
)
from sigcam.metrics.boxes import THRESHOLDS, box_ious, boxes_at, cut_at_percentile, largest_box_ious

_IOU_NAMES = ("30", "50", "70")


class MaxBoxAcc(BoxAccuracy):
    """Images whose largest contour's box meets a ground-truth box with IoU >= 0.5, at the threshold that is
    best for the images counted (V1 of Choe et al., 2020)."""

    contours = "largest"

    def percent(self, totals: Tensor, images: Tensor) -> Tensor:
        return self.accuracies(totals, images)[0][..., 1]

    def best_threshold(self) -> Tensor:
        """The best threshold for the images counted; the lowest of equals."""
        return super().best_threshold()[1]


class MaxBoxAccV2(BoxAccuracy):
    """Images with any contour's box that meets a ground-truth box, at the threshold that is best for the
    images counted, for each IoU of 0.3, 0.5, 0.7, and their mean (Choe et al., 2020)."""

    contours = "all"

    def percent(self, totals: Tensor, images: Tensor) -> dict[str, Tensor]:
        accuracy, threshold = self.accuracies(totals, images)
        result = {"max_box_acc_v2": accuracy.mean(-1)}
        result |= {f"max_box_acc_{name}": accuracy[..., i] for i, name in enumerate(_IOU_NAMES)}
        return result | {f"threshold_{name}": threshold[..., i] for i, name in enumerate(_IOU_NAMES)}


def without_peeking(
    test: MaxBoxAcc | MaxBoxAccV2, val: MaxBoxAcc | MaxBoxAccV2, *, fixed: float = 0.2
) -> dict[str, dict[str, Tensor]]:
    """The accuracy of `test` at three thresholds: "oracle", its own best, as in the protocol; "transferred",
    the best on `val`; and "fixed". Only the last two need no test annotations."""
    if type(test) is not type(val):
        kinds = f"{type(test).__name__} and {type(val).__name__}"
        raise ConfigError(f"thresholds of {kinds} cannot be compared: use one metric for both.")
    if test.percentile != val.percentile:
        raise ConfigError("thresholds of a percentile and others cannot be compared: use one kind for both.")
    columns = {
        "oracle": test.accuracy_at(test.best_threshold()),
        "transferred": test.accuracy_at(val.best_threshold()),
        "fixed": test.accuracy_at(fixed),
    }
    return {k: dict(v) if isinstance(v, Mapping) else {"max_box_acc": v} for k, v in columns.items()}


class _Located(ImageMetric):
    """The largest contour's box at a fixed threshold (PROTOCOL 5.4) meets a ground-truth box: any of them
    (boxes="best") or, as in the authors' code, the first; the threshold is a fraction of the map's maximum
    or of its `percentile`."""

    def __init__(
        self,
        *,
        threshold: float = 0.2,
        iou: float = 0.5,
        boxes: Literal["best", "first"] = "best",
        percentile: float | None = None,
        intervals: bool = False,
        **kwargs: Any,
    ) -> None:
        if boxes not in ("best", "first"):
            raise ConfigError(f'boxes must be "best" or "first", not {boxes!r}.')
        setting = f"_{boxes}_{threshold:g}_{iou:g}"
        setting += "" if percentile is None else f"_percentile_{percentile:g}"
        super().__init__(setting=setting, intervals=intervals, **kwargs)
        self.percentile = checked_percentile(percentile)
        self.threshold, self.iou, self.boxes = threshold, iou, boxes

    def _add_located(
        self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids, correct: Tensor | None = None
    ) -> None:
        maps, truth, image, names = self.check_boxed(maps, boxes, ids)
        maps = maps if self.percentile is None else cut_at_percentile(maps, self.percentile)
        hits = largest_box_ious(maps, truth, image, self.threshold)[1] >= self.iou
        if self.boxes == "first":
            hits &= image != F.pad(image, (1, 0), value=-1)[:-1]
        located = _any_hit(hits, image, len(maps))
        self.add(located if correct is None else located & flags(correct, "correct", names), ids)


def _any_hit(hits: Tensor, image: Tensor, images: int) -> Tensor:
    """Whether any box of each image is hit, (B,) bool."""
    return torch.zeros(images, dtype=torch.int64).index_add(0, image, hits.long()) > 0


class GTKnownLoc(_Located):
    """Images located by the map of their true class."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps of the true class with one (G, 4) tensor of boxes in map pixels each."""
        self._add_located(maps, boxes, ids)


class Top1Loc(_Located):
    """Images that are located and classified correctly."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], correct: Tensor, ids: Ids = None) -> None:
        """Add maps as for GTKnownLoc, with (B,) flags of correctly classified images (`in_top`)."""
        self._add_located(maps, boxes, ids, correct)


class Top5Loc(Top1Loc):
    """Images that are located and whose label is among the five best classes."""


class Top1Cls(ImageMetric):
    """Images whose best class is their label."""

    def update(self, correct: Tensor, ids: Ids = None) -> None:
        """Add (B,) flags, as `in_top(scores, labels)` returns them."""
        self.add(flags(correct, "correct", image_names(correct, ids, self.images)), ids)


def in_top(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Whether each label is among the k best of its row of (B, C) scores, (B,) bool; ties go to the first."""
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        shapes = f"{tuple(scores.shape)}, {tuple(labels.shape)}"
        raise DataError(f"scores must be (B, C), labels (B,), not {shapes}.")
    if scores.isnan().any() or ((labels < 0) | (labels >= scores.shape[1])).any():
        raise DataError(f"scores must not be NaN and labels must be in 0..{scores.shape[1] - 1}.")
    label_score = scores.gather(1, labels[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    return ((scores > label_score) | ((scores == label_score) & before)).sum(1) < k


class PxAP(ImageMetric):
    """Area under the precision-recall curve of all pixels of all images, except ignored ones.

    Scores are binned between the thresholds 0, 0.001, ..., 1; the last bin is for 1 itself.
    """

    value_shape = (2, len(THRESHOLDS))
    value_dtype = torch.int32

    def update(self, maps: Tensor, masks: Tensor | Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] with masks of their size: 1 object, 0 background, 255 ignored."""
        maps, names = self.check_maps(maps, ids)
        kinds = object_masks(masks, maps, names).flatten(1)
        edges = THRESHOLDS.to(maps.device)
        bins = torch.bucketize(maps.flatten(1).double(), edges, right=True) - 1  # float64, as the edges
        rows = torch.arange(len(maps), device=maps.device)[:, None] * 2
        cells = ((rows + kinds) * len(edges) + bins)[kinds != IGNORED]
        counts = cells.bincount(minlength=len(maps) * 2 * len(edges))
        self.add(counts.reshape(len(maps), 2, len(edges)), ids)  # background, object

    def compute(self) -> Tensor:
        result = super().compute()
        assert isinstance(result, Tensor)
        if result.isnan():
            raise DataError("no pixel of any mask is 1 (object): PxAP has no recall.")
        return result

    def percent(self, totals: Tensor, images: Tensor) -> Tensor:
        positives = totals.double().flip(-1).cumsum(-1)  # from the highest score down
        false, true = positives[..., 0, :], positives[..., 1, :]
        precision = true / (true + false).clamp(min=1)
        gained = totals[..., 1, :].double().flip(-1)
        return 100 * (precision * gained).sum(-1) / true[..., -1]


class BoxAccAtHalf(ImageMetric):
    """Images with any contour's box that meets a ground-truth box with IoU >= 0.5 when the map is cut at one
    half, a value of the map and not a fraction of its maximum: no threshold is chosen. For probabilities."""

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] with one (G, 4) tensor of boxes in map pixels each."""
        maps, truth, image, _ = self.check_boxed(maps, boxes, ids)
        drawn = boxes_at(maps, 0.5, "all", absolute=True)
        pairs = zip(truth, image.tolist(), strict=True)
        hits = torch.tensor([bool((box_ious(drawn[i].cpu(), box) >= 0.5).any()) for box, i in pairs])
        self.add(_any_hit(hits.reshape(-1).bool(), image, len(maps)), ids)


class FalseAlarm(ImageMetric):
    """Images whose map of a class that they do not show is above one half anywhere, and the mean share of the
    image that is; lower is better. For probabilities: a unit map always reaches 1."""

    higher_is_better = False
    value_shape = (2,)
    value_dtype = torch.float64

    def update(self, maps: Tensor, ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] of classes that are absent."""
        maps, _ = self.check_maps(maps, ids)
        area = (maps > 0.5).flatten(1).double().mean(1)
        area = (area * 2**32).round() / 2**32  # such numbers add up exactly, in any order
        self.add(torch.stack([(area > 0).double(), area], 1), ids)

    def percent(self, totals: Tensor, images: Tensor) -> dict[str, Tensor]:
        shares = 100 * totals / images
        return {"false_alarm": shares[..., 0], "false_alarm_area": shares[..., 1]}


class PointingGame(ImageMetric):
    """Images whose map is highest inside a ground-truth box, or within `tolerance` pixels of one.

    Zhang et al. (2016) allow 15 pixels and average over classes; this is the mean over images. Of equal
    maxima the first in reading order counts, so a constant map points at the corner.
    """

    def __init__(self, *, tolerance: float = 0, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(setting=f"_{tolerance:g}", intervals=intervals, **kwargs)
        self.tolerance = tolerance

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] with one (G, 4) tensor of boxes each, the last pixel inside."""
        maps, truth, image, _ = self.check_boxed(maps, boxes, ids)
        peak = maps.flatten(1).argmax(1).cpu()
        point = torch.stack([peak % maps.shape[2], peak // maps.shape[2]], 1)[image]  # x, y
        offset = torch.maximum(truth[:, :2] - point, point - truth[:, 2:]).clamp(min=0)
        hits = offset.double().norm(dim=1) <= self.tolerance
        self.add(_any_hit(hits, image, len(maps)), ids)


class EnergyInBox(ImageMetric):
    """Mean share of a map's sum that lies inside the ground-truth boxes (Wang et al., 2020); 0 for a blank
    map. A constant map scores the boxes' share of the image."""

    value_dtype = torch.float64

    def update(self, maps: Tensor, boxes: Sequence[Tensor], ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1] with one (G, 4) tensor of boxes each, the last pixel inside."""
        maps, truth, image, _ = self.check_boxed(maps, boxes, ids)
        inside = torch.zeros(maps.shape, dtype=torch.bool)
        for i, (x0, y0, x1, y1) in zip(image.tolist(), truth.tolist(), strict=True):
            inside[i, y0 : y1 + 1, x0 : x1 + 1] = True
        total = maps.sum((1, 2), dtype=torch.float64)
        within = (maps * inside.to(maps.device)).sum((1, 2), dtype=torch.float64)
        self.add(torch.where(total > 0, within / total, 0.0), ids)
