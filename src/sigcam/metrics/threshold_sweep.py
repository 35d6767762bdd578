"""The best box of a grey map at every level, over the contours that OpenCV's findContours returns (numba).

A contour is the outside of an 8-connected region above a level, or a hole: a 4-connected region at or below
it that does not reach the frame. Going down the levels, regions above only grow and merge; going up, regions
below do. Two passes over the pixels in order of level therefore find every box, and a box is compared with
the ground truth once for all the levels at which it exists.

What happens at a pixel depends on which of its eight neighbours came before it: one byte, looked up in
tables. The kernels are plain loops, since slices and array expressions take seconds to compile. Hot indices
are unsigned: checking whether they are negative took a quarter of the time.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]

LARGEST_SIDE = 4095  # of a map: row, column and the byte of neighbours share 32 bits
NEIGHBOURS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))  # bit k: (row, column)


def _tables(diagonal: bool) -> tuple[Array, Array]:
    """Per byte of earlier neighbours: how many regions meet at the pixel, and a neighbour in each."""
    counts, leads = np.zeros(256, np.uint8), np.zeros((256, 4), np.uint8)
    for byte in range(256):
        left = [k for k in range(8) if byte >> k & 1]
        while left:
            group = [left.pop(0)]
            for k in group:  # grows during the loop
                near = [j for j in left if _adjacent(NEIGHBOURS[k], NEIGHBOURS[j], diagonal)]
                left = [j for j in left if j not in near]
                group += near
            lead = next((k for k in group if diagonal or 0 in NEIGHBOURS[k]), None)
            if lead is not None:  # otherwise a lone corner, which is no 4-neighbour
                leads[byte, counts[byte]] = lead
                counts[byte] += 1
    return counts, leads


def _adjacent(one: tuple[int, int], two: tuple[int, int], diagonal: bool) -> bool:
    dy, dx = abs(one[0] - two[0]), abs(one[1] - two[1])
    return max(dy, dx) == 1 if diagonal else dy + dx == 1


def _half_cells() -> Array:
    """Per byte of earlier neighbours, what a pixel adds to twice the area of the polygon through the centres
    of a region's outer pixels: a half cell for each 2x2 block that it makes three or four pixels full."""
    corners = ((0, 1, 3), (1, 2, 4), (3, 5, 6), (4, 6, 7))
    return np.array([sum(sum(b >> k & 1 for k in c) >= 2 for c in corners) for b in range(256)], np.uint8)


COUNTS_8, LEADS_8 = _tables(diagonal=True)
COUNTS_4, LEADS_4 = _tables(diagonal=False)
HALF_CELLS = _half_cells()


def kernel(function: Any) -> Any:
    """Compile with numba, cache on disk, and release the GIL so that threads can share a batch."""
    return njit(cache=True, nogil=True, error_model="numpy")(function)


class Judge(NamedTuple):  # numba's cache on disk refers to it by name
    """The ground truth (G, 4) of a map, and the best IoU with it so far at each level (256,)."""

    truth: Any
    best: Any
    height: Any
    width: Any
    grown: Any  # pixels by which a contour's box is larger than its region's on each side


class Regions(NamedTuple):
    """All regions: the region each merged into, its box (ends inside), and the level since it has it."""

    parents: Any
    boxes: Any
    since: Any


# ------------------------------------------------------------------------------- pixels in order of level


@kernel
def quantise(maps: Any, scale: Any, levels: Any) -> Any:
    """Fill `levels` with floor(scale * maps) in the precision of both; count the values not in [0, 1]."""
    bad = 0
    for i in range(maps.size):
        bad += not 0 <= maps[i] <= 1
        levels[i] = np.uint8(np.int32(scale * maps[i]))  # via int32, which vectorises
    return bad


@kernel
def _compare(levels: Any, codes: Any) -> None:
    """Per pixel, a bit for each neighbour above it: higher, or as high and later in reading order.

    Those come first on the way down; on the way up, exactly the others do. Nothing beyond the frame is above
    any pixel, so the surroundings of the map are background."""
    height, width = levels.shape
    for y in range(height):
        above, row, below, out = levels[max(y - 1, 0)], levels[y], levels[min(y + 1, height - 1)], codes[y]
        for x in range(1, width - 1):  # no branches, so that this loop vectorises
            v = row[x]
            out[x] = (
                np.uint8(above[x - 1] > v)
                | np.uint8(above[x] > v) << 1
                | np.uint8(above[x + 1] > v) << 2
                | np.uint8(row[x - 1] > v) << 3
                | np.uint8(row[x + 1] >= v) << 4
                | np.uint8(below[x - 1] >= v) << 5
                | np.uint8(below[x] >= v) << 6
                | np.uint8(below[x + 1] >= v) << 7
            )
        for x in range(0, width, max(width - 1, 1)):
            v, code = row[x], (above[x] > row[x]) << 1 | (below[x] >= row[x]) << 6
            if x > 0:
                code |= (above[x - 1] > v) | (row[x - 1] > v) << 3 | (below[x - 1] >= v) << 5
            if x < width - 1:
                code |= (above[x + 1] > v) << 2 | (row[x + 1] >= v) << 4 | (below[x + 1] >= v) << 7
            out[x] = code
    for x in range(width):
        codes[0, x] &= 0b11111000
        codes[height - 1, x] &= 0b00011111


@kernel
def _sort(levels: Any, codes: Any, order: Any, starts: Any) -> None:
    """Sort pixels by level, then in reading order, packed as row, column, code; level v is at starts[v].

    Four strips are read in turn, since neighbours often have one level and would wait for each other."""
    height, width = levels.shape
    rows = height // 4
    ends = np.zeros((5, 256), np.int64)  # per strip, and for up to three remaining rows
    for y in range(rows):
        for x in range(width):
            for strip in range(4):
                ends[strip, levels[y + strip * rows, x]] += 1
    for y in range(4 * rows, height):
        for x in range(width):
            ends[4, levels[y, x]] += 1
    total = 0
    for v in range(256):
        starts[v] = total
        for strip in range(5):
            total, ends[strip, v] = total + ends[strip, v], total
    starts[256] = total
    for row in range(rows):
        for x in range(width):
            for strip in range(4):
                y = row + strip * rows
                at = ends[strip, levels[y, x]]
                ends[strip, levels[y, x]] = at + 1
                order[at] = np.uint32(y << 20 | x << 8 | codes[y, x])
    for y in range(4 * rows, height):
        for x in range(width):
            at = ends[4, levels[y, x]]
            ends[4, levels[y, x]] = at + 1
            order[at] = np.uint32(y << 20 | x << 8 | codes[y, x])


@kernel
def _steps(stride: Any) -> Any:
    """Offset of each neighbour in an array with rows of `stride` pixels."""
    steps = np.empty(8, np.int64)
    for k in range(8):
        steps[k] = NEIGHBOURS[k][0] * stride + NEIGHBOURS[k][1]
    return steps


@kernel
def _find(parents: Any, region: Any) -> Any:
    while parents[region] != region:
        parents[region] = parents[parents[region]]
        region = parents[region]
    return region


# ------------------------------------------------------------------------------------- all boxes, all levels


@kernel
def _iou(x0: Any, y0: Any, x1: Any, y1: Any, truth: Any) -> Any:
    """The best IoU of a box with any of `truth`, ends inside (PROTOCOL 5.2)."""
    best = 0.0
    for g in range(len(truth)):
        across = min(x1, truth[g, 2]) - max(x0, truth[g, 0]) + 1
        down = min(y1, truth[g, 3]) - max(y0, truth[g, 1]) + 1
        if across > 0 and down > 0:
            other = (truth[g, 2] - truth[g, 0] + 1) * (truth[g, 3] - truth[g, 1] + 1)
            best = max(best, across * down / ((x1 - x0 + 1) * (y1 - y0 + 1) + other - across * down))
    return best


@kernel
def _contour_iou(region: Any, boxes: Any, ious: Any) -> Any:
    """The best IoU of the box of a region's contour."""
    x0, y0 = boxes[region, 0] - ious.grown, boxes[region, 1] - ious.grown
    x1, y1 = boxes[region, 2] + ious.grown + 1, boxes[region, 3] + ious.grown + 1
    return _iou(x0, y0, min(x1, ious.width - 1), min(y1, ious.height - 1), ious.truth)


@kernel
def _record(region: Any, v: Any, regions: Any, ious: Any) -> None:
    """Record the IoU of a region's box for the levels from which it has that box to v, where it changes."""
    since = np.int64(regions.since[region])
    if since != v:
        iou = _contour_iou(region, regions.boxes, ious)
        for t in range(min(since, v), max(since, v)):
            ious.best[t] = max(ious.best[t], iou)
        regions.since[region] = v


@kernel
def _extend(boxes: Any, region: Any, x0: Any, y0: Any, x1: Any, y1: Any) -> None:
    """Extend the box of a region to include another box."""
    boxes[region, 0], boxes[region, 1] = min(boxes[region, 0], x0), min(boxes[region, 1], y0)
    boxes[region, 2], boxes[region, 3] = max(boxes[region, 2], x1), max(boxes[region, 3], y1)


@kernel
def _sweep(
    order: Any, starts: Any, begin: Any, end: Any, tables: Any, labels: Any, regions: Any, ious: Any
) -> None:
    """Record the IoUs of all regions while levels are added from `begin` up or down to `end`.

    Region 0 is the surroundings of the map: its box contains everything, and it is never recorded."""
    counts, leads = tables
    up = begin < end
    step, flip = (1, 255) if up else (-1, 0)
    parents, boxes, since = regions
    stride = ious.width + 2
    steps = _steps(stride)
    jumps = np.empty(256, np.int32)  # offset of the neighbour in the first region
    for byte in range(256):
        jumps[byte] = steps[leads[byte, 0]]
    labels.fill(0)
    parents[0] = since[0] = 0
    boxes[0, 0] = boxes[0, 1] = -1
    boxes[0, 2], boxes[0, 3] = ious.width, ious.height
    known = 1
    for v in range(begin, end, step):
        i = starts[v] if up else starts[v + 1] - 1
        for _ in range(starts[v + 1] - starts[v]):
            packed = np.int64(order[np.uint64(i)])
            i += step
            y, x, code = packed >> 20, packed >> 8 & 0xFFF, np.uint8(packed & 255 ^ flip)
            here = (y + 1) * stride + x + 1
            if counts[code] == 0:
                labels[here] = parents[known] = known
                boxes[known, 0] = boxes[known, 2] = x
                boxes[known, 1] = boxes[known, 3] = y
                since[known] = v
                known += 1
                continue
            region = labels[np.uint64(here + jumps[code])]
            if region or counts[code] > 1:
                region = _find(parents, region)
                for k in range(1, counts[code]):
                    other = _find(parents, labels[here + steps[leads[code, k]]])
                    if other != region:
                        region = _merge(region, other, v, regions, ious)
                x0, y0, x1, y1 = boxes[region, 0], boxes[region, 1], boxes[region, 2], boxes[region, 3]
                if x < x0 or y < y0 or x > x1 or y > y1:
                    _record(region, v, regions, ious)
                    _extend(boxes, region, x, y, x, y)
            labels[np.uint64(here)] = region
    for other in range(1, known):
        region = parents[other]
        if region == other:
            _record(region, end, regions, ious)


@kernel
def _merge(a: Any, b: Any, v: Any, regions: Any, ious: Any) -> Any:
    """Merge two regions at level v into the larger, whose box changes less often."""
    parents, boxes, _ = regions
    if (boxes[a, 2] - boxes[a, 0] + 1) * (boxes[a, 3] - boxes[a, 1] + 1) < (boxes[b, 2] - boxes[b, 0] + 1) * (
        boxes[b, 3] - boxes[b, 1] + 1
    ):
        a, b = b, a
    _record(b, v, regions, ious)
    parents[b] = a
    x0, y0, x1, y1 = boxes[b, 0], boxes[b, 1], boxes[b, 2], boxes[b, 3]
    if x0 < boxes[a, 0] or y0 < boxes[a, 1] or x1 > boxes[a, 2] or y1 > boxes[a, 3]:
        _record(a, v, regions, ious)
        _extend(boxes, a, x0, y0, x1, y1)
    return a


# --------------------------------------------------------------------- the contour with the largest polygon


@kernel
def _fill(
    order: Any, starts: Any, top: Any, labels: Any, parents: Any, opened: Any, levels: Any, filled: Any
) -> Any:
    """Raise every pixel to the level at which it is no longer part of a hole; return whether there are holes.

    A hole's contour is never larger than the outer contour around it and comes after it in OpenCV's list, as
    does everything inside the hole: the largest contour is that of a region of the filled map."""
    height, width = levels.shape
    stride = width + 2
    steps = _steps(stride)
    labels.fill(0)
    parents[0] = opened[0] = 0  # opened: the level at which a region reaches the frame
    known = 1
    for v in range(top):
        for i in range(starts[v], starts[v + 1]):
            packed = np.int64(order[i])
            code = np.uint8(packed & 255 ^ 255)
            here = ((packed >> 20) + 1) * stride + (packed >> 8 & 0xFFF) + 1
            if COUNTS_4[code] == 0:
                labels[here] = parents[known] = known
                opened[known] = top
                known += 1
                continue
            region = labels[np.uint64(here + steps[LEADS_4[code, 0]])]
            if COUNTS_4[code] > 1:
                region = _find(parents, region)
                for k in range(1, COUNTS_4[code]):
                    other = _find(parents, labels[here + steps[LEADS_4[code, k]]])
                    reached = opened[region] <= v
                    if reached != (opened[other] <= v):
                        opened[other if reached else region] = v  # not merged: its pixels keep this level
                    elif not reached:
                        parents[other] = region
            labels[here] = region
    for y in range(height):
        for x in range(width):
            level = opened[_find(parents, labels[(y + 1) * stride + x + 1])]
            filled[y, x] = max(levels[y, x], level)
    return known > 1


@kernel
def _largest(
    order: Any, starts: Any, top: Any, labels: Any, regions: Any, areas: Any, firsts: Any, ious: Any
) -> None:
    """Record, at each level of a map without holes, the IoU of the region with the largest polygon.

    Of equals, OpenCV lists first the one whose first pixel in reading order comes last."""
    parents, boxes, ties = regions
    stride = ious.width + 2
    steps = _steps(stride)
    known = tied = most = 0
    for v in range(top, 0, -1):
        for i in range(starts[v + 1] - 1, starts[v] - 1, -1):
            packed = np.int64(order[i])
            y, x, code = packed >> 20, packed >> 8 & 0xFFF, np.uint8(packed & 255)
            here = (y + 1) * stride + x + 1
            if COUNTS_8[code] == 0:
                region, before = np.uint32(known), -1
                parents[known] = known
                boxes[known, 0] = boxes[known, 2] = x
                boxes[known, 1] = boxes[known, 3] = y
                areas[known], firsts[known] = 0, here
                known += 1
            else:
                region = _find(parents, labels[np.uint64(here + steps[LEADS_8[code, 0]])])
                before = areas[region]
                for k in range(1, COUNTS_8[code]):
                    other = _find(parents, labels[here + steps[LEADS_8[code, k]]])
                    if other != region:
                        parents[other] = region
                        areas[region] += areas[other]
                        firsts[region] = min(firsts[region], firsts[other])
                        x0, y0, x1, y1 = boxes[other, 0], boxes[other, 1], boxes[other, 2], boxes[other, 3]
                        _extend(boxes, region, x0, y0, x1, y1)
                areas[region] += HALF_CELLS[code]
                firsts[region] = min(firsts[region], here)
                _extend(boxes, region, x, y, x, y)
            labels[here] = region
            if areas[region] > most:
                most, tied = areas[region], 0
            if areas[region] == most and before < most:
                ties[tied] = region
                tied += 1
        best = _find(parents, np.uint32(ties[0]))
        for k in range(1, tied):
            region = _find(parents, np.uint32(ties[k]))
            if firsts[region] > firsts[best]:
                best = region
        ious.best[v - 1] = _contour_iou(best, boxes, ious)


# ------------------------------------------------------------------------------------------------- a batch


@kernel
def sweep(levels: Any, truth: Any, ends: Any, thresholds: Any, largest: Any, ious: Any) -> None:
    """Fill `ious` (B, T) with the best IoU of maps (B, H, W) uint8 with their ground truth, per threshold.

    Args:
        truth: boxes (sum of G, 4) of all images; those of image b are `truth[ends[b] : ends[b + 1]]`.
        largest: count only the contour with the largest polygon instead of all.
    """
    count, height, width = levels.shape
    pixels = height * width
    codes, filled = np.empty((height, width), np.uint8), np.empty((height, width), np.uint8)
    order, starts = np.empty(pixels, np.uint32), np.empty(257, np.int64)
    labels = np.empty((height + 2) * (width + 2), np.uint32)
    parents, since = np.empty(pixels + 1, np.uint32), np.empty(pixels + 1, np.int32)
    regions = Regions(parents, np.empty((pixels + 1, 4), np.int64), since)
    areas, firsts = np.empty(pixels, np.int64), np.empty(pixels, np.int64)
    best = np.empty(256, np.float64)
    for b in range(count):
        boxes = truth[ends[b] : ends[b + 1]]
        _compare(levels[b], codes)
        _sort(levels[b], codes, order, starts)
        zero, top = np.int64(0), 255  # a bare 0 has another type and would compile everything twice
        while starts[top] == pixels:
            top -= 1
        for v in range(256):
            best[v] = 0.0 if v < top else _iou(zero, zero, zero, zero, boxes)  # the box of an empty mask
        found = Judge(boxes, best, height, width, 0)
        if largest:
            if _fill(order, starts, top, labels, parents, since, levels[b], filled):
                _compare(filled, codes)
                _sort(filled, codes, order, starts)
            _largest(order, starts, top, labels, regions, areas, firsts, found)
        else:
            _sweep(order, starts, top, zero, (COUNTS_8, LEADS_8), labels, regions, found)
            found = Judge(boxes, best, height, width, 1)
            _sweep(order, starts, zero, top, (COUNTS_4, LEADS_4), labels, regions, found)
        for i in range(len(thresholds)):
            ious[b, i] = best[np.int64(thresholds[i] * top)]
