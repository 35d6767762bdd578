"""Percentile bootstrap over images: intervals of a metric, or of the difference of two."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import sub
from typing import Any, cast

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.memory import check_memory
from sigcam.metrics.base import ImageMetric, Value

_CHUNK = 1024  # images unpacked at a time


@dataclass(frozen=True)
class Interval:
    """A value over all images, and quantiles of the same over resampled images."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


Intervals = Interval | dict[str, Interval]


def interval(metric: ImageMetric, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Intervals:
    """The interval of each number that `metric.compute()` returns, in the same form: one, or a dict.

    Images are drawn with replacement; a best threshold is chosen anew in every resample. Images with ids give
    the same interval in any order and sharding.

    Args:
        metric: created with `intervals=True`.
        level: share of the resamples between the ends.
    """
    value, (rows, _) = metric.compute(), metric.table()
    resampled = _resampled(metric, rows, _draws(len(rows), resamples, seed))
    return cast(Intervals, _each(partial(_interval, level), value, resampled))


def paired(
    a: ImageMetric, b: ImageMetric, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Intervals:
    """The interval of a minus b, both over the same resamples of the same images.

    Images are matched by id; without ids, by order.
    """
    if type(a) is not type(b):
        kinds = f"{type(b).__name__} from {type(a).__name__}"
        raise DataError(f"cannot subtract {kinds}: use one metric for both.")
    difference = _each(sub, a.compute(), b.compute())  # raises if there are no images
    (rows_a, keys_a), (rows_b, keys_b) = a.table(), b.table()
    if not torch.equal(keys_a, keys_b):
        problem = f"{len(keys_a)} images against {len(keys_b)}"
        if len(keys_a) == len(keys_b):
            unmatched = set(map(tuple, keys_a.tolist())) ^ set(map(tuple, keys_b.tolist()))
            problem = f"{len(unmatched)} ids occur on one side only"
        raise DataError(f"{problem}: a pair needs the same images on both sides.")
    if keys_a.any() and len(keys_a.unique(dim=0)) < len(keys_a):
        raise DataError("some ids occur more than once, so images cannot be paired: name each image once.")
    draws = _draws(len(rows_a), resamples, seed)
    resampled = _each(sub, _resampled(a, rows_a, draws), _resampled(b, rows_b, draws))
    return cast(Intervals, _each(partial(_interval, level), difference, resampled))


def _each(function: Callable[..., Any], *values: Value) -> Any:
    """Apply a function to the values, or to each entry of dicts of values."""
    if not isinstance(values[0], dict):
        return function(*values)
    return {name: function(*(value[name] for value in values)) for name in values[0]}  # type: ignore[index]


def _draws(images: int, resamples: int, seed: int) -> Tensor:
    """How often each resample contains each image, (R, N) int16."""
    if resamples < 1:
        raise DataError(f"resamples must be 1 or more, not {resamples}.")
    shown = f"drawing {resamples} resamples of {images} images"
    check_memory(2 * resamples * images, shown, "use fewer resamples")
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(resamples, images, dtype=torch.int16)
    for row in counts:  # one at a time: (R, N) indices of 8 bytes would be the largest thing here
        drawn = torch.randint(images, (images,), generator=generator)
        row.copy_(drawn.bincount(minlength=images))
    return counts


def _resampled(metric: ImageMetric, rows: Tensor, draws: Tensor) -> Value:
    """The metric's result for each resample, (R,): the totals are one matrix product."""
    different = _different_columns(metric, rows)
    sums = torch.zeros(len(draws), int(different.sum()), dtype=torch.float64)
    for part, weights in zip(rows.split(_CHUNK), draws.split(_CHUNK, dim=1), strict=True):
        values = metric.unpacked(part)[:, different]
        sums += weights.to(values.dtype) @ values
    return metric.percent(metric.totals(sums[:, different.cumsum(0) - 1]), torch.tensor(draws.shape[1]))


def _different_columns(metric: ImageMetric, rows: Tensor) -> Tensor:
    """Columns that differ from the one before in some image: 1001 thresholds have at most 256 levels."""
    different = torch.zeros(metric.unpacked(rows[:1]).shape[1], dtype=torch.bool)
    different[0] = True
    for part in rows.split(_CHUNK):
        values = metric.unpacked(part)
        different[1:] |= (values[:, 1:] != values[:, :-1]).any(0)
    return different


def _interval(level: float, value: Tensor, draws: Tensor) -> Interval:
    if not 0 < level < 1:
        raise DataError(f"level must be between 0 and 1, not {level}.")
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = draws.double().nanquantile(ends).tolist()  # NaN: a resample without any object pixel
    return Interval(float(value), low, high)
