"""How far a number may be off: percentile bootstrap over images, for a metric or a minus b."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.metrics.base import ImageMetric, Value

_CHUNK = 1024  # images unpacked at a time


@dataclass(frozen=True)
class Interval:
    """A result over all images, and the quantiles of the same over resampled images."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


Intervals = Interval | dict[str, Interval]


def interval(metric: ImageMetric, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Intervals:
    """The interval of each number that `metric.compute()` gives, in the same form: one, or a dict of them.

    Images are drawn with replacement; a best threshold is chosen anew in every resample. The ends are the
    percentiles of the resampled results. Named images give the same interval in any order and sharding.

    Args:
        metric: made with `intervals=True`.
        level: the share of resamples between the ends.
    """
    value = _as_dict(metric.compute())
    rows, _ = metric.table()
    drawn = _as_dict(_results(metric, rows, _draws(len(rows), resamples, seed)))
    return _intervals(value, drawn, level, bare=not isinstance(metric.compute(), dict))


def paired(
    a: ImageMetric, b: ImageMetric, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Intervals:
    """The interval of a minus b, both resampled with the same draws of the same images.

    Images are matched by id; without ids, by the order in which they came.
    """
    if type(a) is not type(b):
        raise DataError(
            f"cannot subtract {type(b).__name__} from {type(a).__name__}: use one metric for both."
        )
    values = _as_dict(a.compute()), _as_dict(b.compute())
    (rows_a, keys_a), (rows_b, keys_b) = a.table(), b.table()
    if len(keys_a) != len(keys_b):
        raise DataError(
            f"{len(keys_a)} images against {len(keys_b)}: a pair needs the same images on both sides."
        )
    if not torch.equal(keys_a, keys_b):
        apart = len(set(map(tuple, keys_a.tolist())) ^ set(map(tuple, keys_b.tolist())))
        raise DataError(f"{apart} ids occur on one side only: a pair needs the same images on both sides.")
    if keys_a.any() and len(keys_a.unique(dim=0)) < len(keys_a):
        raise DataError("some ids occur more than once, so that pairs are not clear: name each image once.")
    draws = _draws(len(rows_a), resamples, seed)
    drawn_a, drawn_b = (_as_dict(_results(m, rows, draws)) for m, rows in ((a, rows_a), (b, rows_b)))
    value = {name: values[0][name] - values[1][name] for name in values[0]}
    difference = {name: drawn_a[name] - drawn_b[name] for name in drawn_a}
    return _intervals(value, difference, level, bare=not isinstance(a.compute(), dict))


def _draws(images: int, resamples: int, seed: int) -> Tensor:
    """How often each image is in each resample, (R, N) int16."""
    if resamples < 1:
        raise DataError(f"resamples must be 1 or more, not {resamples}.")
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(resamples, images, dtype=torch.int16)
    for row in counts:  # one at a time: (R, N) indices of 8 bytes would be the largest thing here
        drawn = torch.randint(images, (images,), generator=generator)
        row.copy_(drawn.bincount(minlength=images))
    return counts


def _results(metric: ImageMetric, rows: Tensor, draws: Tensor) -> Value:
    """What `metric` gives for each resample, (R,) each: its totals are one matrix product."""
    different = _different(metric, rows)
    sums = torch.zeros(len(draws), int(different.sum()), dtype=torch.float64)
    for part, weights in zip(rows.split(_CHUNK), draws.split(_CHUNK, dim=1), strict=True):
        values = metric.unpacked(part)[:, different]
        sums += weights.to(values.dtype) @ values
    return metric.percent(metric.totals(sums[:, different.cumsum(0) - 1]), torch.tensor(draws.shape[1]))


def _different(metric: ImageMetric, rows: Tensor) -> Tensor:
    """Columns that differ from the one before in some image: 1001 thresholds are 256 levels, or fewer."""
    different = torch.zeros(metric.unpacked(rows[:1]).shape[1], dtype=torch.bool)
    different[0] = True
    for part in rows.split(_CHUNK):
        values = metric.unpacked(part)
        different[1:] |= (values[:, 1:] != values[:, :-1]).any(0)
    return different


def _intervals(value: dict[str, Tensor], drawn: dict[str, Tensor], level: float, *, bare: bool) -> Intervals:
    if not 0 < level < 1:
        raise DataError(f"level must be between 0 and 1, not {level}.")
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    found = dict[str, Interval]()
    for name, draws in drawn.items():
        low, high = draws.double().nanquantile(ends).tolist()  # NaN: a resample without any object pixel
        found[name] = Interval(float(value[name]), low, high)
    return found[""] if bare else found


def _as_dict(value: Value) -> dict[str, Tensor]:
    return value if isinstance(value, dict) else {"": value}
