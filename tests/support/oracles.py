"""Slow, obvious versions of what the library computes, written from the formulas of PROTOCOL.md."""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]


def bce_paper(logits: Array, labels: Array) -> float:
    """L_paper of section 2, one image and one class after another, in float64."""
    images, classes = logits.shape
    total = 0.0
    for n in range(images):
        for k in range(classes):
            s = 1 / (1 + math.exp(-logits[n, k]))
            total += (1 - 1 / classes) * math.log(s) if k == labels[n] else math.log(1 - s) / classes
    return float(-total / images)


def bce_code(logits: Array, targets: Array, rho: float) -> float:
    """L_code of section 2 for any weight rho; targets (B, C) zeros and ones."""
    images, classes = logits.shape
    total = 0.0
    for n in range(images):
        for k in range(classes):
            s = 1 / (1 + math.exp(-logits[n, k]))
            total += rho * math.log(s) if targets[n, k] else math.log(1 - s)
    return float(-total / (images * classes))


def min_max(values: Array, eps: float = 0.0) -> Array:
    """The last step of section 4.3: NaN or constant gives zeros."""
    if np.isnan(values).any() or values.min() == values.max():
        return np.zeros_like(values)
    scaled: Array = (values - values.min()) / (values.max() - values.min() + eps)
    return scaled


def path_a(low: Array, height: int, width: int) -> Array:
    """Section 4.3 for `cam`, with OpenCV."""
    return min_max(cv2.resize(low.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC))


def path_b(low: Array, height: int, width: int) -> Array:
    """Section 4.3 for gradient methods, with OpenCV, step by step."""
    low = np.maximum(low.astype(np.float32), 0)
    low = (low - low.min()) / (low.max() - low.min() + 1e-7)
    high = np.maximum(cv2.resize(low, (width, height), interpolation=cv2.INTER_LINEAR), 0)
    high = (high - high.min()) / (high.max() - high.min() + 1e-7)
    return min_max(high)


def grad_cam_map(
    model: nn.Module, layer: nn.Module, image: Tensor, k: int, *, clamp: bool, relu: bool
) -> Array:
    """Eq. 4-6 for one image (C, H, W): plain autograd through the plain model, one forward hook."""
    caught: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, out: caught.append(out))
    logits = model(image[None])
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[0, k], caught[0])
    channels, rows, columns = gradient.shape[1:]
    total = np.zeros((rows, columns))
    for i in range(channels):
        weight = float(gradient[0, i].mean())
        if clamp:
            weight = max(weight, 0.0)
        total += weight * caught[0][0, i].detach().numpy()
    return np.maximum(total, 0) if relu else total


def largest_box(values: Array, tau: float) -> tuple[int, int, int, int]:
    """Section 5.1 in single-contour mode, with OpenCV."""
    levels = (255 * values).astype(np.uint8)
    mask = (levels > int(tau * levels.max())).astype(np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)
    if not contours:
        return 0, 0, 0, 0
    x, y, w, h = cv2.boundingRect(max(contours, key=cv2.contourArea))
    height, width = values.shape
    return x, y, min(x + w, width - 1), min(y + h, height - 1)


def contour_boxes(levels: Array, cut: int, mode: str) -> Array:
    """Section 5.1 for one map of levels (H, W) uint8: boxes of what is above `cut`, with OpenCV, (G, 4)."""
    _, mask = cv2.threshold(levels, cut, 255, cv2.THRESH_BINARY)
    contours, _ = cv2.findContours(mask, cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)
    if not contours:
        return np.zeros((1, 4), np.int64)
    rects = [
        cv2.boundingRect(c) for c in ([max(contours, key=cv2.contourArea)] if mode == "largest" else contours)
    ]
    height, width = levels.shape
    return np.array([(x, y, min(x + w, width - 1), min(y + h, height - 1)) for x, y, w, h in rects])


def iou_matrix(drawn: Array, truth: Array) -> Array:
    """Section 5.2 for all pairs of boxes, (D, G)."""
    a, b = drawn[:, None], truth[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]) + 1
    both = np.maximum(sides, 0).prod(-1)
    areas = ((a[..., 2:] - a[..., :2] + 1).prod(-1), (b[..., 2:] - b[..., :2] + 1).prod(-1))
    ious: Array = both / (areas[0] + areas[1] - both)
    return ious
