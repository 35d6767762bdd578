"""The metrics of every variant, and how a batch updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch

from sigcam.core.distributed import all_reduce_sum
from sigcam.evaluation.batch import Variant
from sigcam.evaluation.registry import BatchRecord, MetricSpec
from sigcam.evaluation.result import Key, Result, Row, metric_rows
from sigcam.metrics.base import ImageMetric


class MetricTable:
    """The metrics of each cell, and how many of its maps are blank."""

    def __init__(
        self,
        measures: Mapping[str, MetricSpec],
        cells: Sequence[Variant],
        scorers: Sequence[str],
        intervals: bool,
    ) -> None:
        self.metrics = dict[Key, ImageMetric]()
        self._told = dict[Variant, list[tuple[MetricSpec, ImageMetric, str]]]()
        self._scorers = dict[Key, str]()
        for (name, measure), cell in product(measures.items(), (Variant(), *cells)):
            if (measure.uses == "classes") != (cell == Variant()):
                continue
            for scorer in scorers if measure.uses == "scores" else ("",):
                key = (*cell, name if scorer in ("", "softmax") else f"{name}:{scorer}")
                self.metrics[key] = metric = measure.make(intervals=intervals)
                self._scorers[key] = scorer
                self._told.setdefault(cell, []).append((measure, metric, scorer))
        self.blank = {cell: [0, 0] for cell in cells if cell in self._told}  # blank maps, maps

    def tell(self, cell: Variant, seen: BatchRecord) -> None:
        """Count a batch of maps."""
        for measure, metric, scorer in self._told.get(cell, ()):
            measure.tell(metric, seen, scorer)
        if cell in self.blank:
            maps = seen.maps if len(seen.maps) or seen.kept is None else seen.kept
            self.blank[cell][0] += int((~maps.flatten(1).any(1)).sum())
            self.blank[cell][1] += len(maps)

    def rows(self, val: Result | None) -> list[Row]:
        """All numbers; the share of blank maps last."""
        found = [
            row
            for key, metric in self.metrics.items()
            for row in metric_rows(key, metric, scorer=self._scorers[key] or None, val=val)
        ]
        empty = dict.fromkeys(("low", "high", "threshold", "threshold_from", "scorer"))
        for cell, counted in self.blank.items():
            blank, images = all_reduce_sum(torch.tensor(counted)).tolist()
            value = {"metric": "blank_maps", "value": 100 * blank / images, "images": images}
            found.append({**cell._asdict(), **empty, **value})
        return found

    def definitions(self) -> dict[str, str]:
        """Each metric's own words."""
        about = {key[3].partition(":")[0]: type(metric).__doc__ or "" for key, metric in self.metrics.items()}
        return {name: " ".join(text.split("\n\n")[0].split()) for name, text in about.items()}
