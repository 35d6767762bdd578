"""Fidelity: what a classifier makes of an image that its map has masked (PROTOCOL 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigcam.core.errors import DataError
from sigcam.metrics.base import Ids, ImageMetric, image_names, same_length, unit


class AverageDrop(ImageMetric):
    """Mean relative loss of confidence when only what the map shows is kept (PROTOCOL 6); lower is better.

    A map of ones loses nothing: report `MeanMap` beside it.
    """

    higher_is_better = False

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float64, intervals=intervals, **kwargs)

    def update(self, before: Tensor, after: Tensor, ids: Ids = None) -> None:
        """Count the class's probability on the image and on image times map, both (B,)."""
        before, after = _scores(self, before, after, ids)
        self.add((before - after).clamp(min=0) / (before + 1e-7), ids)  # the epsilon of Table 1


class IncreaseInConfidence(ImageMetric):
    """Images on which the class gains confidence, strictly, when only what the map shows is kept."""

    def update(self, before: Tensor, after: Tensor, ids: Ids = None) -> None:
        """Count the class's probability on the image and on image times map, both (B,)."""
        before, after = _scores(self, before, after, ids)
        self.add(after > before, ids)


def _scores(metric: ImageMetric, before: Tensor, after: Tensor, ids: Ids) -> tuple[Tensor, Tensor]:
    names = image_names(before, ids, metric.images)
    same_length(after, "scores after", names)
    found = [
        unit(x, "B", f"scores {w}", names, metric.device).double()
        for x, w in ((before, "before"), (after, "after"))
    ]
    return found[0], found[1]


class MeanMap(ImageMetric):
    """Mean value of the maps: how much of the image a mask keeps, to be read beside drop and increase."""

    higher_is_better = None

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float64, intervals=intervals, **kwargs)

    def update(self, maps: Tensor, ids: Ids = None) -> None:
        """Count (B, H, W) maps in [0, 1]."""
        maps = unit(maps, "B, H, W", "maps", image_names(maps, ids, self.images), self.device)
        self.add(maps.flatten(1).mean(1, dtype=torch.float64), ids)


class Insertion(ImageMetric):
    """Area under the class's probability while pixels appear in the map's order; higher is better (RISE)."""

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float64, intervals=intervals, **kwargs)

    def update(self, scores: Tensor, ids: Ids = None) -> None:
        """Count (B, S + 1) probabilities, the first before any pixel, the last after all of them."""
        self.add(_area(self, scores, ids), ids)


class Deletion(ImageMetric):
    """Area under the class's probability while pixels vanish in the map's order; lower is better (RISE)."""

    higher_is_better = False

    def __init__(self, *, intervals: bool = False, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float64, intervals=intervals, **kwargs)

    def update(self, scores: Tensor, ids: Ids = None) -> None:
        """Count (B, S + 1) probabilities, the first before any pixel, the last after all of them."""
        self.add(_area(self, scores, ids), ids)


def _area(metric: ImageMetric, scores: Tensor, ids: Ids) -> Tensor:
    names = image_names(scores, ids, metric.images)
    scores = unit(scores, "B, S + 1", "scores", names, metric.device).double()
    if len(scores) and scores.shape[1] < 2:
        raise DataError(f"a curve needs two scores or more, not one (the batch from image {names[0]!r} on).")
    return torch.trapezoid(scores, dx=1 / (scores.shape[1] - 1))


def insertion_deletion_curves(
    score: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    classes: Tensor,
    *,
    steps: int = 224,
    batch_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Probability of each image's class while its pixels appear on the blurred image, and while they turn to
    zero, highest map value first, both (B, steps + 1); the protocol of RISE (Petsiuk et al., 2018).

    Args:
        score: class probabilities (K, C) of (K, channels, H, W) images, as `lambda x: model(x).softmax(1)`.
        images: (B, channels, H, W) as `score` takes them; zero is what a pixel is deleted to.
        maps: (B, H, W); pixels of equal value go in reading order.
    """
    names = image_names(images, None, torch.zeros(()))
    same_length(maps, "maps", names)
    same_length(classes, "classes", names)
    pixels = images.shape[-2:].numel()
    if maps.shape[1:] != images.shape[-2:] or not 1 <= steps <= pixels:
        sizes = f"maps {tuple(maps.shape)}, images {tuple(images.shape)}, steps {steps}"
        raise DataError(f"maps must be as large as images and steps from 1 to {pixels}: {sizes}.")
    blurred, curves = _blurred(images), list[Tensor]()
    order = maps.to(images.device).flatten(1).argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(pixels, device=order.device).expand_as(order)
    )
    place = place.view(len(maps), 1, *maps.shape[1:])
    shown = torch.linspace(0, pixels, steps + 1, dtype=torch.float64).round().long().to(images.device)
    each = torch.arange(len(images) * (steps + 1), device=images.device)
    with torch.no_grad():
        for start, end in ((blurred, images), (images, torch.zeros_like(images))):
            scores = list[Tensor]()
            for chunk in each.split(batch_size):
                i, step = chunk // (steps + 1), chunk % (steps + 1)
                ahead = place[i] < shown[step][:, None, None, None]
                variants = torch.where(ahead, end[i], start[i])
                scores.append(score(variants).gather(1, classes.to(images.device)[i][:, None])[:, 0])
            curves.append(torch.cat(scores).view(len(images), steps + 1))
    return curves[0], curves[1]


def _blurred(images: Tensor) -> Tensor:
    """Images through an 11 x 11 Gaussian of sigma 5, zeros beyond the border, as RISE inserts into."""
    line = torch.exp(-((torch.arange(11, device=images.device, dtype=images.dtype) - 5) ** 2) / (2 * 5**2))
    line = line / line.sum()
    flat = images.flatten(0, 1)[:, None]
    flat = F.conv2d(flat, line.view(1, 1, 11, 1), padding=(5, 0))
    return F.conv2d(flat, line.view(1, 1, 1, 11), padding=(0, 5)).view_as(images)
