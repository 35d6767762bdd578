"""Boxes of maps at one threshold or at all 1001, and their IoU with ground truth (PROTOCOL 5.1, 5.2).

Levels are floor(255 * map), the product in the maps' own precision as in the public evaluator; only maps in
half precision are multiplied in float32, where that product is exact. Thresholds are fractions of a map's
highest level, in float64.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sigcam.core.errors import ConfigError, DataError
from sigcam.metrics.threshold_sweep import LARGEST_SIDE, kernel, quantise, sweep

Mode = Literal["largest", "all"]

THRESHOLDS = torch.arange(1001, dtype=torch.float64) / 1000


def best_ious(
    maps: Tensor,
    boxes: Sequence[Tensor],
    *,
    mode: Mode = "all",
    first: bool = False,
    ids: Sequence[str] | None = None,
) -> Tensor:
    """The best IoU of the boxes of maps (B, H, W) with ground truth, at each threshold, (B, 1001) float64.

    Uses as many threads as torch does (`torch.set_num_threads`); the result is on the CPU.

    Args:
        boxes: per image (G, 4), whole map pixels, xyxy; x1 and y1 are inside, and may be W and H.
        mode: count "all" contours, or the one with the "largest" polygon.
        first: count only the first ground-truth box of an image.
        ids: names of the images, for errors.
    """
    _check_mode(mode)
    levels = to_levels(maps, ids).numpy()
    check_boxes(boxes, maps.shape, ids)
    truth = [each[:1] if first else each for each in boxes]
    ends = np.cumsum([0, *map(len, truth)])
    flat = torch.cat([torch.zeros(0, 4, dtype=torch.int64), *(each.cpu().long() for each in truth)]).numpy()
    ious = np.empty((len(maps), len(THRESHOLDS)))

    def run(begin: int, end: int) -> None:
        bounds = ends[begin : end + 1]
        sweep(levels[begin:end], flat, bounds, THRESHOLDS.numpy(), mode == "largest", ious[begin:end])

    # Not numba's threads: those may neither be forked nor entered from two threads at once.
    threads = min(torch.get_num_threads(), len(maps))
    cuts = np.linspace(0, len(maps), min(4 * threads, len(maps)) + 1).astype(int).tolist()
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))
    elif threads:
        run(0, len(maps))
    return torch.from_numpy(ious)


def boxes_at(
    maps: Tensor, threshold: float, mode: Mode = "largest", *, absolute: bool = False
) -> list[Tensor]:
    """Per image, the boxes (G, 4) of contours above the threshold, largest polygon first; zeros if none.

    Holes have contours too. Boxes are xyxy; x1 and y1 are one past the last pixel, but never past the last
    pixel of the image.

    Args:
        absolute: the threshold is a value of the map, not a fraction of its highest level.
    """
    _check_mode(mode)
    height, width = maps.shape[-2:]
    boxes = list[Tensor]()
    masks = maps > threshold if absolute else foreground(maps, threshold)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        found = list(pool.map(contours, masks.cpu().numpy()))
    for rows in found:
        rows = rows[np.argsort(-rows[:, 4], kind="stable")][: 1 if mode == "largest" else None, :4]
        rows[:, 2:] = np.minimum(rows[:, 2:] + 1, (width - 1, height - 1))
        boxes.append(torch.from_numpy(rows if len(rows) else np.zeros((1, 4), np.int64)).to(maps.device))
    return boxes


def box_ious(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of (..., 4) boxes with others, the last pixel inside, in float64 (PROTOCOL 5.2)."""
    low = torch.maximum(boxes[..., :2], others[..., :2])
    high = torch.minimum(boxes[..., 2:], others[..., 2:])
    both = (high - low + 1).clamp(min=0).prod(-1).double()
    areas = sum((each[..., 2:] - each[..., :2] + 1).prod(-1) for each in (boxes, others))
    return both / (areas - both)


def largest_box_ious(maps: Tensor, truth: Tensor, image: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The box (B, 4) of each map's largest contour, and its IoU with the ground-truth boxes (G, 4) of all
    images, (G,); `image` is the index of the image of each of these."""
    drawn = torch.cat([*(box.cpu() for box in boxes_at(maps, threshold, "largest")), truth[:0]])
    return drawn, box_ious(drawn[image], truth)


def foreground(maps: Tensor, threshold: float) -> Tensor:
    """Pixels of (B, H, W) maps whose level is above `threshold` times the highest level, (B, H, W) bool."""
    check_threshold(threshold)
    levels = to_levels(maps)
    highest = levels.flatten(1).amax(1).double()
    return (levels > (threshold * highest).floor()[:, None, None]).to(maps.device)


def check_threshold(threshold: float) -> None:
    """ConfigError unless the threshold is a number from 0 to 1."""
    try:
        usable = not isinstance(threshold, bool | str) and 0 <= float(threshold) <= 1  # false for NaN
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise ConfigError(f"a threshold must be a number from 0 to 1, not {threshold!r}.")


def _check_mode(mode: str) -> None:
    if mode not in ("largest", "all"):
        raise ConfigError(f"mode is 'largest' or 'all', not {mode!r}.")


def to_levels(maps: Tensor, ids: Sequence[str] | None = None) -> Tensor:
    """Grey levels of maps (B, H, W) in [0, 1], uint8 on the CPU; DataError names a map with other values."""
    if maps.ndim != 3 or 0 in maps.shape[1:]:
        raise DataError(f"maps must be (images, height, width), not {tuple(maps.shape)}.")
    if max(maps.shape[1:]) > LARGEST_SIDE:
        size = f"{maps.shape[2]} x {maps.shape[1]}"
        raise DataError(f"maps of {size} pixels are too large: resize them to at most {LARGEST_SIDE} a side.")
    if ids is not None and len(ids) != len(maps):
        raise DataError(f"there are {len(maps)} maps but {len(ids)} ids: give one per map.")
    maps = maps.detach().cpu()
    maps = maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    levels = torch.empty(maps.shape, dtype=torch.uint8)
    flat = maps.flatten().numpy()
    if quantise(flat, flat.dtype.type(255), levels.view(-1).numpy()):
        inside = ((maps >= 0) & (maps <= 1)).flatten(1).all(1)  # false for NaN
        index = int((~inside).nonzero()[0])
        low, high = maps[index].aminmax()
        given = "NaN" if low.isnan() else f"values from {low:.6g} to {high:.6g}"
        raise DataError(f"the map of {_image_name(index, ids)} has {given}: bring maps into [0, 1].")
    return levels


def check_boxes(boxes: Sequence[Tensor], shape: torch.Size, ids: Sequence[str] | None = None) -> None:
    """DataError naming the first image of (B, H, W) maps whose boxes cannot be scored."""
    count, height, width = shape
    if len(boxes) != count:
        raise DataError(f"there are {count} maps but boxes of {len(boxes)} images: give (G, 4) per map.")
    for index, each in enumerate(boxes):
        image = _image_name(index, ids)
        if each.ndim != 2 or each.shape[1] != 4 or not len(each):
            needed = f"boxes of shape (G, 4) with G at least 1, not {tuple(each.shape)}"
            raise DataError(f"{image} needs {needed}: give its annotation, or leave it out.")
        for box in each.tolist():
            x0, y0, x1, y1 = box
            if any(value % 1 != 0 for value in box):  # true for NaN
                raise DataError(f"{image} has a box {box} that is not in whole pixels: use scaled_boxes.")
            if x0 > x1 or y0 > y1:
                raise DataError(f"{image} has an inverted box {box}: give x0, y0, x1, y1, the least first.")
            if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
                beyond = f"a box {box} beyond its {width} x {height} map: scale boxes to the map's size"
                raise DataError(f"{image} has {beyond}.")


def scaled_boxes(boxes: Tensor, size: tuple[int, int], out: tuple[int, int]) -> Tensor:
    """Scale boxes (G, 4) from an image of `size` (width, height) to one of `out`, rounded down.

    Multiplies before it divides, in float64: the other order may give other pixels (PROTOCOL 5.2).
    """
    sizes = torch.tensor([[*size, *size], [*out, *out]], dtype=torch.float64, device=boxes.device)
    return (boxes.double() * sizes[1] / sizes[0]).long()


def _image_name(index: int, ids: Sequence[str] | None) -> str:
    return f"image {ids[index]!r}" if ids is not None else f"image {index}"


@kernel
def contours(mask: Any) -> Any:
    """Contours of an (H, W) mask in OpenCV's order: x0, y0, x1, y1 (ends inside), twice the area inside."""
    height, width = mask.shape[0] + 2, mask.shape[1] + 2
    padded = np.zeros((height, width), np.bool_)
    for y in range(height - 2):
        for x in range(width - 2):
            padded[y + 1, x + 1] = mask[y, x]
    labels = np.zeros((height, width), np.int64)  # 0: not visited, 1: the surroundings of the map
    rows = np.empty((height * width + 1, 5), np.int64)
    parents = np.zeros(height * width + 1, np.int64)
    stack = np.empty((height * width, 2), np.int64)
    known = 0
    for y in range(height):
        for x in range(width):
            if labels[y, x] == 0:
                known += 1
                parents[known] = labels[y, x - 1] if known > 1 else 0  # region left of its first pixel
                _flood(padded, y, x, known, labels, rows, stack)
    _add_areas(padded, labels, rows)
    for region in range(known, 1, -1):
        rows[parents[region], 4] += rows[region, 4]  # a contour's area includes everything inside it
    listed = _opencv_order(parents, known)
    result = np.empty((len(listed), 5), np.int64)
    for i in range(len(listed)):
        for k in range(5):
            result[i, k] = rows[listed[i], k]
    return result


@kernel
def _flood(padded: Any, y: Any, x: Any, region: Any, labels: Any, rows: Any, stack: Any) -> None:
    """Label the region of a pixel and write its contour's box, in map pixels."""
    above = padded[y, x]
    rows[region, 0] = rows[region, 2] = x
    rows[region, 1] = rows[region, 3] = y
    rows[region, 4] = 0
    labels[y, x] = region
    stack[0, 0], stack[0, 1] = y, x
    depth = 1
    while depth:
        depth -= 1
        v, u = stack[depth, 0], stack[depth, 1]
        rows[region, 0], rows[region, 1] = min(rows[region, 0], u), min(rows[region, 1], v)
        rows[region, 2], rows[region, 3] = max(rows[region, 2], u), max(rows[region, 3], v)
        for b in range(max(v - 1, 0), min(v + 2, len(padded))):
            for a in range(max(u - 1, 0), min(u + 2, padded.shape[1])):
                if labels[b, a] == 0 and padded[b, a] == above and (above or a == u or b == v):
                    labels[b, a] = region
                    stack[depth, 0], stack[depth, 1] = b, a
                    depth += 1
    grown = 0 if above else 1  # a hole's contour runs through the surrounding pixels
    for k in range(2):
        rows[region, k] -= 1 + grown
        rows[region, k + 2] -= 1 - grown


@kernel
def _add_areas(padded: Any, labels: Any, rows: Any) -> None:
    """Add the area of each square between 2x2 pixel centres to the regions in it, by halves."""
    for y in range(len(padded) - 1):
        for x in range(padded.shape[1] - 1):
            above = first = last = 0
            for b in range(y, y + 2):
                for a in range(x, x + 2):
                    if padded[b, a]:
                        above = labels[b, a]
                    elif first == 0:
                        first = labels[b, a]
                    else:
                        last = labels[b, a]
            rows[first if first else above, 4] += 1
            rows[last if last else above, 4] += 1


@kernel
def _opencv_order(parents: Any, known: Any) -> Any:
    """Regions 2 to `known` in OpenCV's order: parents before children, later regions before earlier ones."""
    child, sibling = np.zeros(known + 1, np.int64), np.zeros(known + 1, np.int64)
    for region in range(2, known + 1):
        sibling[region], child[parents[region]] = child[parents[region]], region
    listed, stack = np.empty(known - 1, np.int64), np.empty(known + 1, np.int64)
    stack[0] = child[1]
    count, depth = 0, 1
    while depth:
        depth -= 1
        region = stack[depth]
        if region:
            listed[count] = region
            count += 1
            stack[depth], stack[depth + 1] = sibling[region], child[region]
            depth += 2
    return listed
