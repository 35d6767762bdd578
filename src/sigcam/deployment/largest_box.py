"""The box of each map's largest component, in operations that an exported graph has.

A map of P x Q cells is enlarged to H x W pixels bilinearly. Between two neighbouring columns of cells, a row
of pixels rises or falls steadily, so its pixels above a threshold are one *run*: none, the first, the last or
all of that *strip*. A map has Q strips of H runs, far fewer than pixels. Runs that touch from row to row make
a *chain*; a strip has at most P + 1 of them, and components are found among chains.

Here M is the number of maps, and J = P + 2 that of chains in a strip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAR = 2.0**24  # more than any pixel's number: float32 holds whole numbers up to here


@dataclass(frozen=True)
class Axis:
    """How one axis of a map is enlarged from cells to pixels, as `interpolate` does without align_corners."""

    cell: Tensor  # (pixels,) the cell before each pixel
    after: Tensor  # (pixels,) the next one
    share: Tensor  # (pixels,) the weight of the next one
    first: Tensor  # (cells,) the first pixel after each cell
    last: Tensor  # (cells,) the last one
    scale: float  # pixels per cell

    @classmethod
    def of(cls, cells: int, pixels: int, device: torch.device) -> Axis:
        """Return the table of an axis of so many cells and pixels."""
        places = torch.arange(pixels, device=device, dtype=torch.float32)
        source = ((places + 0.5) * (cells / pixels) - 0.5).clamp(min=0)
        before = source.floor().clamp(max=cells - 1)
        cell = before.long()
        numbers = torch.arange(cells, device=device)
        inside = cell[:, None] == numbers  # (pixels, cells)
        first = torch.where(inside, places[:, None], float(FAR)).amin(0)
        last = torch.where(inside, places[:, None], -1.0).amax(0)
        return cls(cell, (cell + 1).clamp(max=cells - 1), source - before, first, last, pixels / cells)

    def weights(self) -> Tensor:
        """(pixels, cells) how much each cell counts in each pixel."""
        numbers = torch.arange(self.first.shape[0], device=self.first.device)
        before = torch.where(self.cell[:, None] == numbers, 1 - self.share[:, None], 0.0)
        return before + torch.where(self.after[:, None] == numbers, self.share[:, None], 0.0)


@dataclass(frozen=True)
class Runs:
    """One run of pixels per strip and row, all (M, Q, H); its ends are inside."""

    start: Tensor
    end: Tensor
    there: Tensor  # bool


@dataclass(frozen=True)
class Chains:
    """Runs joined from row to row."""

    number: Tensor  # (M, Q, H) of each run's chain in its strip
    holds: Tensor  # (M, Q, H, J) float: whether the chain holds the run
    begins: Tensor  # (M, Q, H) whether the run is the first of its chain
    meets: Tensor  # (M, Q - 1, J, J) bool: whether a chain touches one of the next strip


def enlarged_extremes(maps: Tensor, rows: Axis, columns: Axis) -> tuple[Tensor, Tensor]:
    """The lowest and highest pixel (M,) of the enlarged maps; they lie at the ends of strips."""
    sides = []
    for axis in (rows, columns):
        ends = torch.cat([axis.first, axis.last]).long()
        sides.append(axis.weights().index_select(0, ends))  # (2 * cells, cells)
    ends = sides[0] @ maps @ sides[1].mT
    return ends.amin((1, 2)), ends.amax((1, 2))


def largest_boxes(
    maps: Tensor, threshold: Tensor, rows: Axis, columns: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the box of the largest component above the threshold (M,) of maps (M, P, Q), as
    `sigcam.metrics.boxes.boxes_at` does on the enlarged maps; the mean of the map's pixels in it (M,); and
    whether there is one (M,). Boxes are (M, 4), xyxy; the last pixel is inside."""
    runs = _runs_above(maps, threshold, rows, columns)
    chains_in = maps.shape[1] + 2
    filled = _without_holes(runs, columns, chains_in)
    chains = _chains(filled, columns, chains_in, corners=True)
    best = _largest(filled, chains, columns)
    found = best.any(1)
    start = torch.where(chains.holds > 0, filled.start[..., None], FAR).amin(2).flatten(1)
    end = torch.where(chains.holds > 0, filled.end[..., None], -1.0).amax(2).flatten(1)
    places = torch.arange(rows.cell.shape[0], device=maps.device, dtype=maps.dtype)[:, None]
    top = torch.where(chains.holds > 0, places, FAR).amin(2).flatten(1)
    bottom = torch.where(chains.holds > 0, places, -1.0).amax(2).flatten(1)
    low = [torch.where(best, each, FAR).amin(1) for each in (start, top)]
    high = [torch.where(best, each, -1.0).amax(1) for each in (end, bottom)]
    boxes = torch.where(found[:, None], torch.stack([*low, *high], 1), 0.0)
    sides = []
    for axis, one, other in ((rows, boxes[:, 1], boxes[:, 3]), (columns, boxes[:, 0], boxes[:, 2])):
        pixels = torch.arange(axis.cell.shape[0], device=maps.device, dtype=maps.dtype)
        inside = (pixels >= one[:, None]) & (pixels <= other[:, None])
        sides.append(inside.to(maps.dtype) @ axis.weights() / (other - one + 1)[:, None])  # (M, cells)
    means = (sides[0][:, None] @ maps @ sides[1][..., None])[:, 0, 0]
    return boxes, torch.where(found, means, 0.0), found


def _runs_above(maps: Tensor, threshold: Tensor, rows: Axis, columns: Axis) -> Runs:
    """The run of each strip and row that is above the threshold."""
    cells, limit = maps.mT, threshold[:, None, None]  # (M, Q, P)
    left = (
        cells.index_select(2, rows.cell) * (1 - rows.share) + cells.index_select(2, rows.after) * rows.share
    )
    right = torch.cat([left[:, 1:], left[:, -1:]], 1)  # (M, Q, H)
    first, last = columns.first[:, None], columns.last[:, None]  # (Q, 1)
    number = torch.arange(maps.shape[2], device=maps.device, dtype=maps.dtype)[:, None]
    rise = right - left
    crossing = (limit - left) / torch.where(rise == 0, 1.0, rise)
    crossing = (number + crossing + 0.5) * columns.scale - 0.5  # in pixels
    over_left, over_right = left > limit, right > limit
    start = torch.where(over_left, first, torch.maximum(first, crossing.floor() + 1))
    end = torch.where(over_right, last, torch.minimum(last, crossing.ceil() - 1))
    return Runs(start, end, (over_left | over_right) & (start <= end))


def _shifted(values: Tensor, by: int, fill: Any, dim: int = 2) -> Tensor:
    """The values of the next (1) or previous (-1) row."""
    edge = torch.full_like(values.narrow(dim, 0, 1), fill)
    if by > 0:
        return torch.cat([values.narrow(dim, 1, values.shape[dim] - 1), edge], dim)
    return torch.cat([edge, values.narrow(dim, 0, values.shape[dim] - 1)], dim)


def _chains(runs: Runs, columns: Axis, count: int, *, corners: bool) -> Chains:
    """Join runs from row to row, and chains to those of the next strip; at corners, too, if asked."""
    reach = 1 if corners else 0
    before = Runs(
        _shifted(runs.start, -1, FAR), _shifted(runs.end, -1, -2.0), _shifted(runs.there, -1, False)
    )
    touches = (runs.start <= before.end + reach) & (before.start <= runs.end + reach)
    begins = runs.there & ~(touches & before.there)
    number = begins.to(torch.int64).cumsum(2) - 1
    numbers = torch.arange(count, device=number.device)
    holds = ((number[..., None] == numbers) & runs.there[..., None]).to(runs.start.dtype)
    at_right = holds * (runs.end == columns.last[:, None]).to(holds.dtype)[..., None]
    at_left = holds * (runs.start == columns.first[:, None]).to(holds.dtype)[..., None]
    if corners:
        at_left = at_left + _shifted(at_left, -1, 0.0) + _shifted(at_left, 1, 0.0)
    meets = at_right[:, :-1].mT @ at_left[:, 1:] > 0
    return Chains(number, holds, begins, meets)


def _without_holes(runs: Runs, columns: Axis, count: int) -> Runs:
    """Add the background that the border of the image does not reach: a contour's area includes its holes."""
    first, last = columns.first[:, None], columns.last[:, None]
    prefix = runs.start == first
    start = torch.where(runs.there & prefix, runs.end + 1, first)
    end = torch.where(runs.there & ~prefix, runs.start - 1, last)
    around = Runs(start, end, start <= end)
    chains = _chains(around, columns, count, corners=False)
    height, width = runs.there.shape[2], columns.cell.shape[0]
    row = torch.arange(height, device=start.device)
    border = (row == 0) | (row == height - 1) | (start == 0) | (end == width - 1)
    outside = (chains.holds * border[..., None].to(start.dtype)).amax(2)  # (M, Q, J)
    enclosed = spread_lowest(1 - outside, chains.meets).gather(2, chains.number.clamp(0, count - 1)) > 0
    hole = around.there & enclosed
    return Runs(torch.where(hole, first, runs.start), torch.where(hole, last, runs.end), runs.there | hole)


def _largest(runs: Runs, chains: Chains, columns: Axis) -> Tensor:
    """(M, Q * J) which chains belong to the component of the largest area; of equal ones, to the last in
    reading order, as OpenCV's order of contours has it."""
    below = Runs(_shifted(runs.start, 1, FAR), _shifted(runs.end, 1, -2.0), _shifted(runs.there, 1, False))
    shared = torch.minimum(runs.end, below.end) - torch.maximum(runs.start, below.start)
    # Twice the area between 2 x 2 pixel centres: 2 where all four are inside, 1 where three are.
    area = 2 * shared + (runs.start != below.start).float() + (runs.end != below.end).float()
    area = torch.where(runs.there & below.there & (shared >= 0), area, 0.0)
    right = runs.there & (runs.end == columns.last[:, None])
    left = runs.there & (runs.start == columns.first[:, None])
    corners = [right[:, :-1], left[:, 1:], _shifted(right, 1, False)[:, :-1], _shifted(left, 1, False)[:, 1:]]
    between = (torch.stack([each.float() for each in corners]).sum(0) - 2).clamp(min=0)  # across strips
    nothing = torch.zeros_like(area[:, :1])
    area = area + torch.cat([torch.where(corners[0], between, 0.0), nothing], 1)
    area = area + torch.cat([nothing, torch.where(corners[0], 0.0, between)], 1)
    rows = torch.arange(area.shape[2], device=area.device, dtype=area.dtype)
    place = torch.where(chains.begins, rows * columns.cell.shape[0] + runs.start, 0.0)  # in reading order
    sums = chains.holds.mT @ torch.stack([area, place, chains.begins.float()], -1)  # (M, Q, J, 3)
    area, place, exists = sums.flatten(1, 2).unbind(-1)
    strips, count = sums.shape[1:3]
    nodes = torch.arange(strips * count, device=area.device, dtype=area.dtype).reshape(strips, count)
    names = spread_lowest(nodes + torch.zeros_like(sums[..., 0]), chains.meets).flatten(1).long()
    zeros = torch.zeros_like(area)
    total = zeros.scatter_add(1, names, area).gather(1, names)  # of the component of each chain
    total = torch.where(exists > 0, total, -1.0)
    earliest = (zeros + FAR).scatter_reduce(1, names, torch.where(exists > 0, place, FAR), "amin")
    earliest = earliest.gather(1, names)
    largest = (total == total.amax(1, keepdim=True)) & (exists > 0)
    return largest & (earliest == torch.where(largest, earliest, -1.0).amax(1, keepdim=True))


def spread_lowest(values: Tensor, meets: Tensor) -> Tensor:
    """Give each chain (M, Q, J) the lowest value of its component."""

    def step(values: Tensor) -> Tensor:
        edge = torch.full_like(values[:, :1], FAR)
        right = torch.where(meets, values[:, :-1, :, None], FAR).amin(2)  # of the strip before
        left = torch.where(meets, values[:, 1:, None, :], FAR).amin(3)
        sides = torch.minimum(torch.cat([edge, right], 1), torch.cat([left, edge], 1))
        return torch.minimum(values, sides)

    return repeat_until_equal(step, values)


def repeat_until_equal(step: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply the step until it changes nothing."""
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.while_loop import while_loop

        def again(values: Tensor, before: Tensor) -> Tensor:
            return (values != before).any()

        def body(values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            return step(values), values.clone()

        result: Tensor = while_loop(again, body, (step(values), values))[0]
        return result
    while not torch.equal(values, following := step(values)):
        values = following
    return values
