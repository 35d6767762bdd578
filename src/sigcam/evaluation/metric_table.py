"""MetricTable: the metrics of every variant, updated batch by batch; EvalCheckpoint: its saved state."""

import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.distributed import all_reduce_sum, rank, world_size
from sigcam.core.manifest import versions
from sigcam.core.memory import check_memory
from sigcam.core.types import Skipped
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint
from sigcam.evaluation.batch import NO_MAPS, Variant
from sigcam.evaluation.registry import BatchRecord, MetricSpec
from sigcam.evaluation.result import MetricKey, Metrics, Result, Row, metric_rows
from sigcam.metrics.base import ImageMetric
from sigcam.network.dual import DualBranch
from sigcam.network.identity import network_facts


class MetricTable:
    """The metrics of each variant, with its number of images and of blank maps."""

    def __init__(
        self,
        specs: Mapping[str, MetricSpec],
        variants: Sequence[Variant],
        scorers: Sequence[str],
        intervals: bool,
    ) -> None:
        self._specs = specs
        self._metrics = dict[MetricKey, ImageMetric]()
        for (name, spec), variant in product(specs.items(), (NO_MAPS, *variants)):
            if (spec.uses == "correct") == (variant == NO_MAPS):
                for scorer in scorers if spec.uses == "scores" else (None,):
                    key = MetricKey(*variant[:3], name, scorer, variant.scale)
                    self._metrics[key] = spec.create(intervals=intervals)
        measured = {key.variant for key in self._metrics}
        self._counts = {v: [0, 0] for v in (*variants, NO_MAPS) if v in measured}  # images, blank maps

    def check_rows(self, images: int) -> None:
        """ConfigError if the rows per image that intervals need do not fit into memory."""
        kept = [m for m in self._metrics.values() if isinstance(m, ImageMetric) and m.intervals]
        advice = "measure fewer metrics or variants at a time, or leave intervals out"
        check_memory(images * sum(m.row_bytes for m in kept), f"intervals over {images} images", advice)

    def update(self, variant: Variant, batch: BatchRecord) -> None:
        """Update the metrics of a variant with a batch."""
        if variant not in self._counts:
            return
        for key, metric in self._metrics.items():
            if key.variant == variant:
                self._specs[key.metric].update(metric, batch, key.scorer)
        self._counts[variant][0] += len(batch.ids)
        maps = batch.predicted_maps if batch.maps is None else batch.maps
        if maps is not None:
            self._counts[variant][1] += int((~maps.flatten(1).any(1)).sum())

    def state(self) -> dict[str, Any]:
        """Everything counted so far, as tensors and plain numbers."""
        return {
            "metrics": [metric.metric_state for metric in self._metrics.values()],
            "counts": list(self._counts.values()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned for a table of the same metrics."""
        for metric, values in zip(self._metrics.values(), state["metrics"], strict=True):
            for name, value in values.items():
                setattr(metric, name, value)
        self._counts = dict(zip(self._counts, state["counts"], strict=True))

    def result(
        self,
        left_out: Sequence[tuple[str, str]],
        skipped: Sequence[tuple[str, str]],
        about: dict[str, Any],
        val: Result | None,
    ) -> Result:
        """The result over all processes, each of which must call this."""
        counts: dict[tuple[Any, ...], list[int]] = {
            variant: all_reduce_sum(torch.tensor(count)).tolist() for variant, count in self._counts.items()
        }
        rows = list[Row]()
        with warnings.catch_warnings():  # of metrics that are not ours, resumed when all images were counted
            warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
            for key, metric in self._metrics.items():
                rows += metric_rows(key, metric, images=counts[key.variant][0], val=val)
        empty = dict.fromkeys(("low", "high", "threshold", "threshold_from", "scorer"))
        for variant in self._counts:
            images, blank = counts[variant]
            if variant != NO_MAPS:
                value: Row = {"metric": "blank_maps", "value": 100 * blank / images, "images": images}
                rows.append({**variant._asdict(), **empty, **value})
        definitions = {name: spec.definition for name, spec in self._specs.items()}
        about = {**about, "definitions": definitions, "versions": versions()}
        return Result(tuple(rows), tuple(left_out), tuple(skipped), about, Metrics(self._metrics))


EVERY = 15.0  # seconds between two saves


class EvalCheckpoint(Checkpoint):
    """The state of an unfinished evaluation, one file per process; `path` None saves nothing."""

    def __init__(self, path: Path | None, facts: Any, table: MetricTable) -> None:
        super().__init__(path and path.with_name(f"{path.name}.{rank()}"), [facts, world_size()])
        self._table, self._saved_at = table, time.monotonic()

    def resume(self) -> tuple[int, list[Skipped]]:
        """Restore the metrics; return how many samples are done, and those of them that were skipped."""
        state = self.load()
        if state is None:
            return 0, []
        self._table.load_state(state["table"])
        return int(state["done"]), [(str(id), str(reason)) for id, reason in state["skipped"]]

    def save_progress(self, done: int, skipped: list[Skipped]) -> None:
        """Save the metrics, at most once in `EVERY` seconds."""
        if self.path is not None and time.monotonic() - self._saved_at >= EVERY:
            self.save({"done": done, "skipped": skipped, "table": self._table.state()})
            self._saved_at = time.monotonic()


def evaluation_facts(
    net: DualBranch, samples: Samples, transform: Any, others: Mapping[str, DualBranch] | None = None
) -> list[Any]:
    """Return everything about a network with its branches, the samples and this machine that numbers depend
    on."""
    further = {name: network_facts(other, transform) for name, other in (others or {}).items()}
    return [network_facts(net, transform), data_fingerprint(samples), files_fingerprint(samples), further]
