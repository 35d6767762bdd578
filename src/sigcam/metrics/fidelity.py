"""Fidelity metrics: the class's score on images masked by their maps (PROTOCOL 6)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sigcam.core.errors import DataError
from sigcam.metrics.base import Ids, ImageMetric, image_names, relative_drop, same_length, unit


class AverageDrop(ImageMetric):
    """Mean relative loss of confidence on image times map; lower is better.

    A map of ones loses nothing: report `MeanMap` beside it.
    """

    higher_is_better = False
    value_dtype = torch.float64

    def update(self, before: Tensor, after: Tensor, ids: Ids = None) -> None:
        """Add the class's probability on the image and on image times map, both (B,)."""
        self.add(relative_drop(*_scores(self, before, after, ids)), ids)


class IncreaseInConfidence(ImageMetric):
    """Images whose class scores strictly higher on image times map."""

    def update(self, before: Tensor, after: Tensor, ids: Ids = None) -> None:
        """Add the class's probability on the image and on image times map, both (B,)."""
        before, after = _scores(self, before, after, ids)
        self.add(after > before, ids)


def _scores(metric: ImageMetric, before: Tensor, after: Tensor, ids: Ids) -> tuple[Tensor, Tensor]:
    names = image_names(before, ids, metric.images)
    same_length(after, "scores after", names)
    before = unit(before, "B", "scores before", names, metric.device)
    return before.double(), unit(after, "B", "scores after", names, metric.device).double()


class MeanMap(ImageMetric):
    """Mean value of the maps: how much of the image they keep, to read beside drop and increase."""

    higher_is_better = None
    value_dtype = torch.float64

    def update(self, maps: Tensor, ids: Ids = None) -> None:
        """Add (B, H, W) maps in [0, 1]."""
        maps, _ = self.check_maps(maps, ids)
        self.add(maps.flatten(1).mean(1, dtype=torch.float64), ids)


class Insertion(ImageMetric):
    """Area under the class's probability while pixels are inserted, highest map value first (RISE)."""

    value_dtype = torch.float64

    def update(self, scores: Tensor, ids: Ids = None) -> None:
        """Add (B, S + 1) probabilities, from before the first pixel to after the last."""
        names = image_names(scores, ids, self.images)
        scores = unit(scores, "B, S + 1", "scores", names, self.device).double()
        if len(scores) and scores.shape[1] < 2:
            batch = f"the batch from image {names[0]!r} on"
            raise DataError(f"a curve needs two scores or more, not one ({batch}).")
        self.add(torch.trapezoid(scores, dx=1 / (scores.shape[1] - 1)), ids)


class Deletion(Insertion):
    """Area under the class's probability while pixels are deleted; lower is better (RISE)."""

    higher_is_better = False


def insertion_deletion_curves(
    score: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    classes: Tensor,
    *,
    steps: int = 224,
    batch_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Probability of each image's class while its pixels are inserted into the blurred image, and while they
    are set to zero, highest map value first, both (B, steps + 1), as in RISE (Petsiuk et al., 2018).

    Args:
        score: returns class probabilities (K, C) of (K, channels, H, W) images.
        images: (B, channels, H, W), as `score` takes them; deleted pixels become zero.
        maps: (B, H, W); pixels of equal value are taken in reading order.
    """
    names = image_names(images, None, torch.zeros(()))
    same_length(maps, "maps", names)
    same_length(classes, "classes", names)
    pixels = images.shape[-2:].numel()
    if maps.shape[1:] != images.shape[-2:] or not 1 <= steps <= pixels:
        sizes = f"maps {tuple(maps.shape)}, images {tuple(images.shape)}, steps {steps}"
        raise DataError(f"maps must be as large as images and steps from 1 to {pixels}: {sizes}.")
    curves = list[Tensor]()
    order = maps.to(images.device).flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks = order.argsort(dim=1).view(len(maps), 1, *maps.shape[1:])  # 0 for the highest map value
    changed = torch.linspace(0, pixels, steps + 1, dtype=torch.float64).round().long().to(images.device)
    each = torch.arange(len(images) * (steps + 1), device=images.device)
    with torch.no_grad():
        for start, end in ((_blurred(images), images), (images, torch.zeros_like(images))):
            scores = list[Tensor]()
            for chunk in each.split(batch_size):
                i, step = chunk // (steps + 1), chunk % (steps + 1)
                variants = torch.where(ranks[i] < changed[step][:, None, None, None], end[i], start[i])
                scores.append(score(variants).gather(1, classes.to(images.device)[i][:, None])[:, 0])
            curves.append(torch.cat(scores).view(len(images), steps + 1))
    return curves[0], curves[1]


def _blurred(images: Tensor) -> Tensor:
    """Images blurred by an 11 x 11 Gaussian of sigma 5 with zero padding, as in RISE."""
    line = torch.exp(-((torch.arange(11, device=images.device, dtype=images.dtype) - 5) ** 2) / (2 * 5**2))
    line = line / line.sum()
    flat = images.flatten(0, 1)[:, None]
    flat = F.conv2d(flat, line.view(1, 1, 11, 1), padding=(5, 0))
    return F.conv2d(flat, line.view(1, 1, 1, 11), padding=(0, 5)).view_as(images)
