"""From maps to boxes: what is above a threshold, as connected regions (PROTOCOL 5.1)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor


def foreground(maps: Tensor, threshold: float) -> Tensor:
    """Pixels of (B, H, W) maps whose 8-bit level is above `threshold` times the highest level, (B, H, W)
    bool."""
    levels = (255 * maps).floor()
    highest = levels.flatten(1).amax(1)[:, None, None]
    return levels > (threshold * highest).floor()


def boxes_at(maps: Tensor, threshold: float, mode: Literal["largest", "all"] = "largest") -> list[Tensor]:
    """Per image, boxes (G, 4) around the regions above the threshold, largest first; (0, 0, 0, 0) if none.

    Boxes are xyxy; x1 and y1 are one past the last pixel, but never past the last pixel of the image.
    """
    height, width = maps.shape[-2:]
    found = list[Tensor]()
    for mask in foreground(maps.detach(), threshold).cpu().numpy():
        rows = regions(mask)
        rows = rows[np.argsort(-rows[:, 4], kind="stable")][: 1 if mode == "largest" else None, :4]
        rows[:, 2:] += 1
        boxes = np.minimum(rows, (width, height, width - 1, height - 1))
        found.append(torch.from_numpy(boxes if len(boxes) else np.zeros((1, 4), np.int64)).to(maps.device))
    return found


def regions(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """8-connected regions of an (H, W) mask in reading order: x0, y0, x1, y1 (last pixel inside), pixels."""
    found: NDArray[np.int64] = _regions(np.ascontiguousarray(mask))
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _regions(mask: Any) -> Any:
    height, width = mask.shape
    left = mask.copy()
    stack = np.empty((height * width, 2), np.int64)
    rows = np.empty(((height + 1) // 2 * ((width + 1) // 2), 5), np.int64)  # as many as fit apart
    count = 0
    for y in range(height):
        for x in range(width):
            if not left[y, x]:
                continue
            x0, y0, x1, y1, pixels, top = x, y, x, y, 0, 1
            stack[0, 0], stack[0, 1] = y, x
            left[y, x] = False
            while top:
                top -= 1
                v, u = stack[top, 0], stack[top, 1]
                x0, y0, x1, y1, pixels = min(x0, u), min(y0, v), max(x1, u), max(y1, v), pixels + 1
                for b in range(max(v - 1, 0), min(v + 2, height)):
                    for a in range(max(u - 1, 0), min(u + 2, width)):
                        if left[b, a]:
                            left[b, a] = False
                            stack[top, 0], stack[top, 1] = b, a
                            top += 1
            rows[count, 0], rows[count, 1], rows[count, 2] = x0, y0, x1
            rows[count, 3], rows[count, 4] = y1, pixels
            count += 1
    return rows[:count]
