"""Every metric with made inputs of its kind, cut into shards and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigcam import metrics
from sigcam.metrics.base import ImageMetric

HEIGHT, WIDTH = 9, 12
Inputs = dict[str, Any]  # by argument of update, one entry per image


def made_maps(n: int, dice: torch.Generator) -> Tensor:
    """Maps with plateaus, some of them blank."""
    maps = torch.randint(0, 9, (n, HEIGHT, WIDTH), generator=dice) / 8
    return maps * (torch.rand(n, 1, 1, generator=dice) > 0.1)


def made_boxes(n: int, dice: torch.Generator) -> list[Tensor]:
    """One to three boxes for each image; x1 = W and y1 = H occur."""
    found = list[Tensor]()
    for _ in range(n):
        count = int(torch.randint(1, 4, (), generator=dice))
        x0 = torch.randint(0, WIDTH - 2, (count,), generator=dice)
        y0 = torch.randint(0, HEIGHT - 2, (count,), generator=dice)
        x1 = (x0 + torch.randint(1, WIDTH, (count,), generator=dice)).clamp(max=WIDTH)
        y1 = (y0 + torch.randint(1, HEIGHT, (count,), generator=dice)).clamp(max=HEIGHT)
        found.append(torch.stack([x0, y0, x1, y1], 1))
    return found


def _boxed(n: int, dice: torch.Generator) -> Inputs:
    return {"maps": made_maps(n, dice), "boxes": made_boxes(n, dice)}


def _judged(n: int, dice: torch.Generator) -> Inputs:
    return _boxed(n, dice) | {"correct": torch.rand(n, generator=dice) > 0.3}


def _masked(n: int, dice: torch.Generator) -> Inputs:
    kinds = torch.tensor([0, 0, 1, 255], dtype=torch.uint8)
    masks = kinds[torch.randint(0, 4, (n, HEIGHT, WIDTH), generator=dice)]
    masks[:, 0, 0] = 1  # a resample of any images has an object
    return {"maps": torch.rand(n, HEIGHT, WIDTH, generator=dice), "masks": masks}


def _scored(n: int, dice: torch.Generator) -> Inputs:
    return {"before": torch.rand(n, generator=dice), "after": torch.rand(n, generator=dice)}


@dataclass(frozen=True)
class Case:
    """How to make a metric, and what it is updated with."""

    make: Callable[..., ImageMetric]
    inputs: Callable[[int, torch.Generator], Inputs]


def _first(**options: Any) -> ImageMetric:
    return metrics.GTKnownLoc(boxes="first", threshold=0.3, iou=0.3, **options)


CASES = {
    "MaxBoxAcc": Case(metrics.MaxBoxAcc, _boxed),
    "MaxBoxAccV2": Case(metrics.MaxBoxAccV2, _boxed),
    "GTKnownLoc": Case(metrics.GTKnownLoc, _boxed),
    "GTKnownLoc, first box": Case(_first, _boxed),
    "Top1Loc": Case(metrics.Top1Loc, _judged),
    "Top5Loc": Case(metrics.Top5Loc, _judged),
    "PxAP": Case(metrics.PxAP, _masked),
    "Top1Cls": Case(metrics.Top1Cls, lambda n, dice: {"correct": torch.rand(n, generator=dice) > 0.3}),
    "AverageDrop": Case(metrics.AverageDrop, _scored),
    "IncreaseInConfidence": Case(metrics.IncreaseInConfidence, _scored),
    "MeanMap": Case(metrics.MeanMap, lambda n, dice: {"maps": made_maps(n, dice)}),
    "Insertion": Case(metrics.Insertion, lambda n, dice: {"scores": torch.rand(n, 5, generator=dice)}),
    "Deletion": Case(metrics.Deletion, lambda n, dice: {"scores": torch.rand(n, 5, generator=dice)}),
    "RoadLeast": Case(metrics.RoadLeast, lambda n, dice: {"scores": torch.rand(n, 5, generator=dice)}),
    "RoadMost": Case(metrics.RoadMost, lambda n, dice: {"scores": torch.rand(n, 5, generator=dice)}),
    "PointingGame": Case(metrics.PointingGame, _boxed),
    "EnergyInBox": Case(metrics.EnergyInBox, _boxed),
}


def made(name: str, n: int, seed: int = 0) -> Inputs:
    """Inputs of n images for a metric, with ids."""
    inputs = CASES[name].inputs(n, torch.Generator().manual_seed(seed))
    return inputs | {"ids": [f"picture/{i}.png" for i in range(n)]}


def take(inputs: Inputs, which: Sequence[int]) -> Inputs:
    """The inputs of some of the images, in that order, repeats included."""
    return {
        k: v[torch.tensor(which, dtype=torch.int64)] if isinstance(v, Tensor) else [v[i] for i in which]
        for k, v in inputs.items()
    }


def numbers(metric: ImageMetric) -> dict[str, float]:
    """What a metric computes, by name."""
    result = metric.compute()
    return {k: float(v) for k, v in (result if isinstance(result, dict) else {"": result}).items()}
