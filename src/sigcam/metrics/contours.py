"""The contours of one mask, as OpenCV's findContours lists them, from the runs of equal pixels in its rows.

The mask is framed by a pixel of background on every side. Rows are runs of background and foreground in
turns, beginning and ending with background, so the k-th run of a row is foreground if k is odd.
"""

from typing import Any

import numpy as np

from sigcam.metrics.threshold_sweep import kernel


@kernel
def contours(mask: Any) -> Any:
    """Contours of an (H, W) mask in OpenCV's order: x0, y0, x1, y1 (ends inside), twice the area inside."""
    ends, firsts = _runs(mask)
    labels, parents, known = _regions(ends, firsts)
    rows = np.empty((known + 1, 5), np.int64)
    _boxes(ends, firsts, labels, rows)
    _add_areas(ends, firsts, labels, rows)
    for region in range(known, 1, -1):
        rows[parents[region], 4] += rows[region, 4]  # a contour's area includes everything inside it
    listed = _opencv_order(parents, known)
    result = np.empty((len(listed), 5), np.int64)
    for i in range(len(listed)):
        for k in range(5):
            result[i, k] = rows[listed[i], k]
    return result


@kernel
def _runs(mask: Any) -> Any:
    """The last column of each run of the framed mask, and the index of the first run of each row."""
    height, width = mask.shape
    ends, firsts = np.empty((height + 2) * (width + 2), np.int32), np.empty(height + 3, np.int64)
    firsts[0], ends[0], count = 0, width + 1, 1
    for y in range(height):
        firsts[y + 1] = count
        before = False
        for x in range(width):
            ends[count] = x  # the framed column before this one
            count += mask[y, x] != before
            before = mask[y, x]
        if before:
            ends[count] = width
            count += 1
        ends[count] = width + 1
        count += 1
    firsts[height + 1], ends[count] = count, width + 1
    firsts[height + 2] = count + 1
    return ends, firsts


@kernel
def _root(parents: Any, run: Any) -> Any:
    while parents[run] != run:
        parents[run] = parents[parents[run]]
        run = parents[run]
    return run


@kernel
def _join(parents: Any, a: Any, b: Any) -> None:
    """Make two runs one region, named after its first run."""
    a, b = _root(parents, a), _root(parents, b)
    parents[max(a, b)] = min(a, b)


@kernel
def _regions(ends: Any, firsts: Any) -> Any:
    """The region of each run, numbered from 1 (the surroundings) in reading order; the region around each
    region; and their number. Foreground meets at corners, too."""
    total = firsts[-1]
    roots = np.arange(total)
    for y in range(1, len(firsts) - 1):
        i, j = firsts[y - 1], firsts[y]
        while True:
            p, q = (i - firsts[y - 1]) & 1, (j - firsts[y]) & 1
            if p == q:
                _join(roots, i, j)
            if ends[i] < ends[j]:
                i += 1
            elif ends[i] > ends[j]:
                j += 1
            elif i + 1 == firsts[y]:
                break
            else:
                if p and not q:
                    _join(roots, i, j + 1)
                elif q and not p:
                    _join(roots, i + 1, j)
                i, j = i + 1, j + 1
    labels, parents, known = np.empty(total, np.int64), np.zeros(total + 1, np.int64), 0
    for run in range(total):
        root = _root(roots, run)
        if root == run:
            known += 1
            labels[run] = known
            parents[known] = labels[run - 1] if run else 0  # the region left of its first pixel
        else:
            labels[run] = labels[root]
    return labels, parents, known


@kernel
def _boxes(ends: Any, firsts: Any, labels: Any, rows: Any) -> None:
    """Write the box of each region's contour, in pixels of the mask, and an area of 0."""
    for region in range(len(rows)):
        rows[region, 0] = rows[region, 1] = len(ends)
        rows[region, 2] = rows[region, 3] = rows[region, 4] = 0
    for y in range(len(firsts) - 1):
        for run in range(firsts[y], firsts[y + 1]):
            grown = 1 - ((run - firsts[y]) & 1)  # a hole's contour runs through the surrounding pixels
            x0 = ends[run - 1] + 1 if run > firsts[y] else 0
            region = labels[run]
            rows[region, 0] = min(rows[region, 0], x0 - 1 - grown)
            rows[region, 1] = min(rows[region, 1], y - 1 - grown)
            rows[region, 2] = max(rows[region, 2], ends[run] - 1 + grown)
            rows[region, 3] = max(rows[region, 3], y - 1 + grown)


@kernel
def _add_areas(ends: Any, firsts: Any, labels: Any, rows: Any) -> None:
    """Add the area of each square between 2x2 pixel centres to the regions in it, by halves: to background
    if there is any, half by half to the first and the last of it in reading order."""
    for y in range(1, len(firsts) - 1):
        i, j, x = firsts[y - 1], firsts[y], 0
        while True:  # over stretches of columns in which neither row changes
            end = min(ends[i], ends[j])
            rows[labels[j if (i - firsts[y - 1]) & 1 else i], 4] += 2 * (end - x)
            right, below = i + (ends[i] == end), j + (ends[j] == end)
            if right == firsts[y]:
                break
            full = first = last = 0
            for k in range(4):
                row, run = firsts[y - 1 + k // 2], (i, right, j, below)[k]
                if (run - row) & 1:
                    full = labels[run]
                elif first:
                    last = labels[run]
                else:
                    first = labels[run]
            rows[first if first else full, 4] += 1
            rows[last if last else full, 4] += 1
            i, j, x = right, below, end + 1


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
