"""RISE and extremal perturbations as slow loops, from the formulas of their papers, for one image."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from support.method_oracles import Array

Score = Callable[[Tensor], Tensor]  # (C, H, W) -> a number


def rise_map(score: Score, image: Tensor, grids: Tensor, shifts: Tensor) -> Array:
    """S = 1 / (N p) sum f(I * M) M, with masks enlarged between pixel centres and cut out at their shifts."""
    height, width = image.shape[1:]
    cells = grids.shape[1]
    tall, wide = -(-height // cells), -(-width // cells)  # pixels of a cell
    total = np.zeros((height, width))
    for grid, (down, right) in zip(grids.numpy(), shifts.tolist(), strict=True):
        mask = np.zeros((height, width))
        for y in range(height):
            for x in range(width):
                place = (y + down + 0.5) * cells / ((cells + 1) * tall) - 0.5
                across = (x + right + 0.5) * cells / ((cells + 1) * wide) - 0.5
                mask[y, x] = between(grid, place, across)
        total += float(score(image * torch.from_numpy(mask))) * mask
    return total / (len(grids) * 0.5)


def between(grid: Array, y: float, x: float) -> float:
    """The bilinear value at a place that may be between cells; outside, that of the nearest cell."""
    rows, columns = grid.shape
    y, x = min(max(y, 0.0), rows - 1.0), min(max(x, 0.0), columns - 1.0)
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, rows - 1), min(x0 + 1, columns - 1)
    top = (1 - (x - x0)) * grid[y0, x0] + (x - x0) * grid[y0, x1]
    bottom = (1 - (x - x0)) * grid[y1, x0] + (x - x0) * grid[y1, x1]
    return float((1 - (y - y0)) * top + (y - y0) * bottom)


def gaussian(image: Tensor, sigma: float) -> Tensor:
    """The image (C, H, W) under a Gaussian of three standard deviations each way, its edges repeated."""
    reach = math.ceil(3 * sigma)
    if reach == 0:
        return image
    height, width = image.shape[1:]
    weights = {d: math.exp(-(d**2) / (2 * sigma**2)) for d in range(-reach, reach + 1)}
    norm = sum(weights.values())
    rows, out = torch.zeros_like(image), torch.zeros_like(image)
    for x in range(width):
        for d, weight in weights.items():
            rows[:, :, x] += weight / norm * image[:, :, min(max(x + d, 0), width - 1)]
    for y in range(height):
        for d, weight in weights.items():
            out[:, y] += weight / norm * rows[:, min(max(y + d, 0), height - 1)]
    return out


def extremal_map(score: Score, image: Tensor, points: tuple[int, int], steps: int) -> Array:
    """The sum of the masks of 2.5, 5, 10 and 20 % of the image, under a Gaussian of 9 % of its side."""
    total = torch.zeros(image.shape[1:], dtype=torch.float64)
    for area in (0.025, 0.05, 0.1, 0.2):
        total = total + extremal_mask(score, image, points, area, steps)
    smooth: Array = gaussian(total[None], 0.09 * min(image.shape[1:]))[0].numpy()
    return smooth


def extremal_mask(score: Score, image: Tensor, points: tuple[int, int], area: float, steps: int) -> Tensor:
    """Gradient ascent of score - weight * area loss over a mask's points, one area alone."""
    height, width = image.shape[1:]
    unit = min(height, width) / 224
    blurs = [gaussian(image, 20 * unit * (7 - level) / 7) for level in range(8)]
    tall, wide = height / points[0], width / points[1]  # pixels between two points

    def mask_of(values: Tensor) -> Tensor:
        smooth = torch.stack(
            [torch.stack([_smooth_max(values, i, j) for j in range(points[1])]) for i in range(points[0])]
        )
        rows = [
            [_bilinear(smooth, (y + 0.5) / tall - 0.5, (x + 0.5) / wide - 0.5) for x in range(width)]
            for y in range(height)
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def _smooth_max(values: Tensor, i: int, j: int) -> Tensor:
        down, right = math.ceil(35 * unit / tall), math.ceil(35 * unit / wide)
        kernel, near = [], []
        for di in range(-down, down + 1):
            for dj in range(-right, right + 1):
                distance = math.hypot(di * tall, dj * wide) / (21 * unit)
                kernel.append(math.exp(-2 * max(0.0, distance - 0.5) ** 2))
                near.append(_folded(i + di, points[0]) * points[1] + _folded(j + dj, points[1]))
        products = torch.tensor(kernel, dtype=values.dtype) * values.flatten()[near]
        powers = (20 * products).exp()
        return (products * powers).sum() / powers.sum()

    values, speed = torch.ones(points, dtype=torch.float64), 0.0
    for step in range(steps):
        values = values.detach().requires_grad_()
        with torch.enable_grad():
            mask = mask_of(values)
            low = (mask.detach() * 7).floor().clamp(max=6).long()
            share = mask * 7 - low
            stack = torch.stack(blurs, -1)  # (C, H, W, L)
            index = low.expand(len(image), -1, -1)[..., None]
            shown = (1 - share) * stack.gather(-1, index)[..., 0] + share * stack.gather(-1, index + 1)[
                ..., 0
            ]
            weight = 300 * 1.0035 ** (800 * step / steps)
            gain = score(shown) - weight * area_loss(mask, area)
        (slope,) = torch.autograd.grad(gain, values)
        speed = 0.9 * speed + 0.1 * slope
        values = (values.detach() + 0.01 * min(800 / steps, 16) * speed).clamp(0, 1)
    return mask_of(values.detach())


def area_loss(mask: Tensor, area: float) -> Tensor:
    """The mean squared difference of the sorted mask from zeros and ones; the mean over all orders of pixels
    that are equal."""
    ones = max(1, round(area * mask.numel()))
    pixels = mask.detach().flatten().tolist()
    order = sorted(range(len(pixels)), key=lambda i: -pixels[i])
    values = mask.flatten()[order]
    last = pixels[order[ones - 1]]
    equal = [i for i, pixel in enumerate(order) if abs(pixels[pixel] - last) <= 1e-6]
    total = torch.zeros((), dtype=mask.dtype)
    for i, value in enumerate(values):
        share = (ones - equal[0]) / len(equal) if i in equal else float(i < ones)
        total = total + share * (value - 1) ** 2 + (1 - share) * value**2
    return total / mask.numel()


def _folded(i: int, count: int) -> int:
    """The point that a mirrored one beyond an edge stands for."""
    while not 0 <= i < count:
        i = -1 - i if i < 0 else 2 * count - 1 - i
    return i


def _bilinear(grid: Tensor, y: float, x: float) -> Tensor:
    rows, columns = grid.shape
    y, x = min(max(y, 0.0), rows - 1.0), min(max(x, 0.0), columns - 1.0)
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, rows - 1), min(x0 + 1, columns - 1)
    top = (1 - (x - x0)) * grid[y0, x0] + (x - x0) * grid[y0, x1]
    return (1 - (y - y0)) * top + (y - y0) * ((1 - (x - x0)) * grid[y1, x0] + (x - x0) * grid[y1, x1])
