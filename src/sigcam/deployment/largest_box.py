"""The box of each map's largest component, in operations that an exported graph has.

A map of P x Q cells is enlarged to H x W pixels bilinearly. Between two neighbouring columns of cells, a row
of pixels rises or falls steadily, so its pixels above a threshold are one *run*: none, the first, the last or
all of that *strip*. A map has Q strips of H runs, far fewer than pixels. Runs that touch from row to row make
a *chain*. A chain begins where the left or the right column rises above the threshold, which P cells do at
most P / 2 times, rounded up; so components are found among few chains.

Here M is the number of maps, and J that of chains in a strip, at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

    number: Tensor  # (M, Q, H) int64, of each run's chain in its strip
    begins: Tensor  # (M, Q, H) whether the run is the first of its chain
    meets: Tensor  # (M, Q - 1, J, J) bool: whether a chain touches one of the next strip

    def total(self, values: Tensor) -> Tensor:
        """(M, Q, J) the sum over each chain's runs."""
        zeros = values.new_zeros(*values.shape[:2], self.meets.shape[3])
        return zeros.scatter_add(2, self.number, values)


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
    most = 2 * ((maps.shape[1] + 1) // 2)  # chains in a strip
    inside = _in_largest(runs, columns, most)
    places = torch.arange(rows.cell.shape[0], device=maps.device, dtype=maps.dtype)
    low = [torch.where(inside, each, FAR).amin((1, 2)) for each in (runs.start, places)]
    high = [torch.where(inside, each, -1.0).amax((1, 2)) for each in (runs.end, places)]
    found = high[0] >= 0
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


def _shifted(values: Tensor, by: int, fill: float) -> Tensor:
    """The values of the next (1) or previous (-1) row, the last axis; `fill` where there is none."""
    return F.pad(values, (-by, by), value=fill)


def _chains(runs: Runs, columns: Axis, count: int, *, corners: bool) -> Chains:
    """Join runs from row to row, and chains to those of the next strip; at corners, too, if asked."""
    reach = 1 if corners else 0
    before = Runs(
        _shifted(runs.start, -1, FAR), _shifted(runs.end, -1, -2.0), _shifted(runs.there, -1, False)
    )
    touches = (runs.start <= before.end + reach) & (before.start <= runs.end + reach)
    begins = runs.there & ~(touches & before.there)
    number = (begins.to(runs.start.dtype).cumsum(2) - 1).clamp(min=0)
    none = float(count * count)  # the number of a pair that does not touch
    right = torch.where(runs.there & (runs.end == columns.last[:, None]), number * count, none)[:, :-1]
    left = torch.where(runs.there & (runs.start == columns.first[:, None]), number, none)[:, 1:]
    pairs = [right + left]
    if corners:
        pairs += [right + _shifted(left, 1, none), right + _shifted(left, -1, none)]
    index = torch.cat(pairs, 2).clamp(max=none).long()
    meets = right.new_zeros(*right.shape[:2], count * count + 1).scatter(2, index, 1.0)
    return Chains(number.long(), begins, meets[..., :-1].unflatten(2, (count, count)) > 0)


def _in_largest(runs: Runs, columns: Axis, count: int) -> Tensor:
    """(M, Q, H) which runs belong to the largest component of their map. Areas are computed only if a map has
    several components."""
    chains = _chains(runs, columns, count, corners=True)
    names, exists = _components(chains)
    numbers = torch.arange(names.shape[1], device=names.device)
    several = (((names == numbers) & exists).to(runs.start.dtype).sum(1) > 1).any()

    def compared(start: Tensor, end: Tensor, there: Tensor) -> Tensor:
        filled = _without_holes(Runs(start, end, there), columns, count)
        return _largest(filled, _chains(filled, columns, count, corners=True), columns) & there

    def all_of_them(start: Tensor, end: Tensor, there: Tensor) -> Tensor:
        return there.clone()

    given = runs.start, runs.end, runs.there
    if torch.compiler.is_exporting():
        inside: Tensor = torch.cond(several, compared, all_of_them, given)
        return inside
    return compared(*given) if several else all_of_them(*given)


def _components(chains: Chains) -> tuple[Tensor, Tensor]:
    """(M, Q * J) the first chain of each chain's component, and whether there is such a chain."""
    strips, count = chains.begins.shape[1], chains.meets.shape[3]
    kind = {"device": chains.begins.device, "dtype": torch.float32}
    nodes = torch.arange(strips * count, **kind).reshape(strips, count)  # type: ignore[call-overload]
    many = chains.begins.to(nodes.dtype).sum(2, keepdim=True)  # (M, Q, 1)
    exists = nodes % count < many
    names = spread_lowest(nodes + torch.zeros_like(many), chains.meets)
    return names.flatten(1).long(), exists.flatten(1)


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
    outside = chains.total((around.there & border).to(start.dtype)) > 0  # (M, Q, J)
    enclosed = spread_lowest((~outside).to(start.dtype), chains.meets).gather(2, chains.number) > 0
    hole = around.there & enclosed
    return Runs(torch.where(hole, first, runs.start), torch.where(hole, last, runs.end), runs.there | hole)


def _largest(runs: Runs, chains: Chains, columns: Axis) -> Tensor:
    """(M, Q, H) which runs belong to the component of the largest area; of equal ones, to the last in reading
    order, as OpenCV's order of contours has it."""
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
    area, place = chains.total(area), chains.total(place)
    strips, count = area.shape[1:]
    names, exists = _components(chains)
    area, place = area.flatten(1), place.flatten(1)
    total = torch.zeros_like(area).scatter_add(1, names, area).gather(1, names)  # of each chain's component
    total = torch.where(exists, total, -1.0)
    earliest = torch.full_like(area, FAR).scatter_reduce(1, names, torch.where(exists, place, FAR), "amin")
    earliest = earliest.gather(1, names)
    largest = (total == total.amax(1, keepdim=True)) & exists
    largest = largest & (earliest == torch.where(largest, earliest, -1.0).amax(1, keepdim=True))
    best: Tensor = largest.unflatten(1, (strips, count)).gather(2, chains.number)
    return best & runs.there


def spread_lowest(values: Tensor, meets: Tensor) -> Tensor:
    """Give each chain (M, Q, J) the lowest value of its component."""

    apart = torch.where(meets, 0.0, FAR)

    def step(values: Tensor) -> Tensor:
        right = (values[:, :-1, :, None] + apart).amin(2)  # from the strip before
        left = (values[:, 1:, None, :] + apart).amin(3)
        right, left = F.pad(right, (0, 0, 1, 0), value=FAR), F.pad(left, (0, 0, 0, 1), value=FAR)
        return torch.minimum(values, torch.minimum(right, left))

    return _until_equal(step, values)


def _until_equal(step: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply the step, which lowers values, until it changes nothing."""
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.while_loop import while_loop

        def again(values: Tensor, before: Tensor) -> Tensor:
            return (before - values).sum() > 0

        def body(values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            return step(values), values.clone()

        lowest: Tensor = while_loop(again, body, (step(values), values))[0]
        return lowest
    while not torch.equal(values, following := step(values)):
        values = following
    return values
