"""Boxes of maps at one threshold or at all 1001, and their IoU with ground truth (PROTOCOL 5.1, 5.2).

Levels are floor(255 * map), the product in the maps' own precision as in the public evaluator; only maps in
half precision are multiplied in float32, where that product is exact. Thresholds are fractions of a map's
highest level, in float64.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sigcam.core.errors import ConfigError, DataError
from sigcam.metrics.contours import contours
from sigcam.metrics.threshold_sweep import LARGEST_SIDE, quantise, sweep

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

    _in_threads(run, len(maps))
    return torch.from_numpy(ious)


def _in_threads(run: Callable[[int, int], object], count: int) -> None:
    """Call `run(begin, end)` for parts of `count` maps, in as many threads as torch uses."""
    # Not numba's threads: those may neither be forked nor entered from two threads at once.
    threads = min(torch.get_num_threads(), count)
    cuts = np.linspace(0, count, min(4 * threads, count) + 1).astype(int).tolist()
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))
    elif threads:
        run(0, count)


def cut_at_percentile(maps: Tensor, percentile: float) -> Tensor:
    """Return maps (B, H, W) in [0, 1] as fractions of a percentile of each, what is above it as 1: thresholds
    are then fractions of the percentile, not of the maximum (Bae et al., 2020)."""
    levels = np.percentile(maps.detach().cpu().flatten(1).numpy(), percentile, axis=1)
    share = torch.from_numpy(np.asarray(levels)).to(maps)[:, None, None]  # (B, 1, 1)
    highest = maps.amax((1, 2), keepdim=True)
    reference = torch.where(share > 0, share, highest)  # of a map that is mostly 0, the maximum
    return (maps / reference.clamp(min=torch.finfo(maps.dtype).tiny)).clamp(max=1)


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
    values, found = masks.cpu().numpy(), dict[int, Any]()
    _in_threads(
        lambda begin, end: found.update((i, contours(values[i])) for i in range(begin, end)), len(values)
    )
    for i in range(len(values)):
        rows = found[i]
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
