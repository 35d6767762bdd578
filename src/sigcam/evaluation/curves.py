"""Curves over thresholds and paired differences, from the sums of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigcam.evaluation.result import FIXED, Key, Result, cell_words
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.metrics.localization import MaxBoxAcc, MaxBoxAccV2, PxAP


@dataclass(frozen=True)
class Curves:
    """What the sums of an evaluation tell beyond its numbers, over all processes.

    Args:
        boxes: of each cell, percent of images found at IoU 0.3, 0.5, 0.7 and every threshold, (3, T).
        pixels: of each cell, recall and precision in percent from the highest threshold down, (2, T).
        differences: of each (key, name of the number, origin of its threshold), from the softmax head's
            signed maps by the same method.
    """

    boxes: Mapping[str, Tensor]
    pixels: Mapping[str, Tensor]
    differences: Mapping[tuple[Key, str, str | None], Interval]


def curves_of(result: Result) -> Curves:
    """The curves of a result; every process must ask, since they add up what each has counted."""
    boxes, pixels = dict[str, Tensor](), dict[str, Tensor]()
    differences = dict[tuple[Key, str, str | None], Interval]()
    for key, metric in result.metrics.items():
        name = cell_name(key)
        if isinstance(metric, MaxBoxAccV2 | PxAP):
            with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
                counts, images = metric.counts.cpu().double(), metric.images.cpu()
            if isinstance(metric, MaxBoxAccV2):
                boxes[name] = 100 * counts / images
            else:
                false, true = counts.flip(-1).cumsum(-1)
                pixels[name] = 100 * torch.stack([true / true[-1], true / (true + false).clamp(min=1)])
        base = result.metrics.get((key[0], "softmax", False, key[3]))
        if base is not None and base is not metric and metric.intervals:
            differences |= _differences(key, metric, base)
    return Curves(boxes, pixels, differences)


def _differences(
    key: Key, metric: ImageMetric, base: ImageMetric
) -> dict[tuple[Key, str, str | None], Interval]:
    """The metric less the base on the same images, each by its name and where its threshold is from."""
    boxed = isinstance(metric, MaxBoxAcc | MaxBoxAccV2)
    pairs: dict[str | None, Any] = {"oracle" if boxed else None: (metric, base)}
    if isinstance(metric, MaxBoxAcc | MaxBoxAccV2) and isinstance(base, MaxBoxAcc | MaxBoxAccV2):
        pairs["fixed"] = (metric.at(FIXED), base.at(FIXED))
    found = dict[tuple[Key, str, str | None], Interval]()
    for origin, pair in pairs.items():
        apart = paired(*pair)
        named = apart if isinstance(apart, dict) else {key[3].partition(":")[0]: apart}
        found |= {(key, name, origin): each for name, each in named.items()}
    return found


def cell_name(key: Sequence[Any]) -> str:
    """Method, branch and clamp in words."""
    return " ".join(cell_words(dict(zip(("method", "branch", "clamp"), key[:3], strict=True))))
