"""Contours of a mask: boxes, areas and order of OpenCV's findContours with RETR_TREE."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigcam.metrics.threshold_sweep import kernel


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
