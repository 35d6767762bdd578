"""From maps to boxes: what is above a threshold, as connected regions (PROTOCOL 5.1)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def foreground(maps: Tensor, threshold: float) -> Tensor:
    """Pixels of (B, H, W) maps whose 8-bit level is above `threshold` times the highest level, (B, H, W)
    bool."""
    levels = (255 * maps).floor()
    highest = levels.flatten(1).amax(1)[:, None, None]
    return levels > (threshold * highest).floor()


def regions(mask: Tensor) -> Tensor:
    """8-connected regions of (B, H, W) masks: each pixel the number of its region, from 1; background 0."""
    height, width = mask.shape[-2:]
    numbers = torch.arange(1, height * width + 1, device=mask.device, dtype=torch.float64).view(
        1, height, width
    )
    labels = torch.where(mask, numbers, 0.0)  # float64 counts pixels of any image exactly
    while True:
        spread = F.max_pool2d(labels[:, None], 3, stride=1, padding=1)[:, 0] * mask
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def boxes_at(maps: Tensor, threshold: float, mode: Literal["largest", "all"] = "largest") -> list[Tensor]:
    """Per image, boxes (G, 4) around the regions above the threshold, largest first; (0, 0, 0, 0) if there
    is none.

    Boxes are xyxy; x1 and y1 are one past the last pixel, but never past the last pixel of the image.
    """
    found = list[Tensor]()
    height, width = maps.shape[-2:]
    for labels in regions(foreground(maps, threshold)):
        numbers, counts = labels[labels > 0].unique(return_counts=True)
        rows = [(0, 0, 0, 0)]
        if len(numbers):
            rows = []
            order = counts.argsort(descending=True, stable=True)
            for number in numbers[order[:1] if mode == "largest" else order]:
                ys, xs = (labels == number).nonzero(as_tuple=True)
                right, bottom = min(int(xs.max()) + 1, width - 1), min(int(ys.max()) + 1, height - 1)
                rows.append((int(xs.min()), int(ys.min()), right, bottom))
        found.append(torch.tensor(rows, device=maps.device))
    return found
