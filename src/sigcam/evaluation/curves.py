"""Curves over thresholds and paired differences between variants, from the metrics of a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sigcam.evaluation.result import FIXED, MetricKey, Result, variant_words
from sigcam.metrics.base import BoxAccuracy, ImageMetric
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.metrics.localization import MaxBoxAccV2, PxAP

Differences = dict[tuple[MetricKey, str, str | None], Interval]


@dataclass(frozen=True)
class Curves:
    """Curves and differences over all processes.

    Args:
        boxes: by variant, percent of images located at IoU 0.3, 0.5, 0.7 and every threshold, (3, T).
        pixels: by variant, recall and precision in percent from the highest threshold down, (2, T).
        differences: by (key, name of the number, origin of its threshold), the difference from the signed
            maps of the softmax head by the same method.
    """

    boxes: Mapping[str, Tensor]
    pixels: Mapping[str, Tensor]
    differences: Differences


def curves_of(result: Result) -> Curves:
    """The curves of a result; every process must call this, since it adds up the counts of all."""
    boxes, pixels, differences = dict[str, Tensor](), dict[str, Tensor](), Differences()
    for key, metric in result.metrics.items():
        name = variant_words(key._asdict())
        if isinstance(metric, MaxBoxAccV2 | PxAP):
            with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
                counts, images = metric.counts.cpu().double(), metric.images.cpu()
            if isinstance(metric, MaxBoxAccV2):
                boxes[name] = 100 * counts / images
            else:
                false, true = counts.flip(-1).cumsum(-1)
                pixels[name] = 100 * torch.stack([true / true[-1], true / (true + false).clamp(min=1)])
        base = result.metrics.get(key._replace(branch="softmax", clamp=False))
        if base is not None and base is not metric and getattr(metric, "intervals", False):
            differences |= _differences(key, metric, base)
    return Curves(boxes, pixels, differences)


def _differences(key: MetricKey, metric: ImageMetric, base: ImageMetric) -> Differences:
    """The metric minus the base on the same images, by name and by the origin of the threshold."""
    pairs: dict[str | None, tuple[ImageMetric, ImageMetric]] = {None: (metric, base)}
    if isinstance(metric, BoxAccuracy) and isinstance(base, BoxAccuracy):
        pairs = {"oracle": (metric, base), "fixed": (metric.at(FIXED), base.at(FIXED))}
    found = Differences()
    for origin, pair in pairs.items():
        difference = paired(*pair)
        named = difference if isinstance(difference, dict) else {key.metric: difference}
        found |= {(key, name, origin): each for name, each in named.items()}
    return found
