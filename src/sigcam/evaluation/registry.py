"""Registry of metrics: the annotations each one needs and how a batch updates it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sigcam import metrics
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import resize_mask
from sigcam.data.sample import Sample
from sigcam.methods.inputs import Scores
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.boxes import scaled_boxes

Need = Literal["boxes", "masks", "labels", "a network"]
Threshold = Literal["maximum", "percentile"]  # what the thresholds of boxes are fractions of
PERCENTILE = 90.0  # of a map, instead of its maximum (Bae et al., 2020; their program)
_ANNOTATIONS = {"boxes": "boxes", "masks": "open_mask", "labels": "label"}  # need -> field of a Sample


@dataclass(frozen=True)
class BatchRecord:
    """What metrics are updated with: a batch of maps on the CPU, boxes and masks in their pixels."""

    ids: Sequence[str]
    maps: Tensor | None = None  # (B, H, W), of the class to locate
    boxes: Sequence[Tensor] = ()  # (G, 4) of each image
    masks: Sequence[Tensor] = ()  # (H, W) of each image: 1 object, 0 background, 255 ignored
    correct: Mapping[int, Tensor] = field(default_factory=dict)  # by k, (B,): the label is among the k best
    predicted: Tensor | None = None  # (B,), by the softmax head
    confidence: Scores | None = None  # of the predicted class, (B, 1)
    absent_maps: Tensor | None = None  # (B, H, W), of a class that the image does not show
    predicted_maps: Tensor | None = None  # (B, H, W), of the predicted class; images are multiplied by them
    # By scorer, the predicted class's score (B,) on the images and on the masked images.
    scores: Mapping[Any, Sequence[Tensor]] = field(default_factory=dict)
    curves: tuple[Tensor, ...] = ()  # insertion and deletion curves, (B, S + 1) each
    removal: tuple[Tensor, ...] = ()  # scores with pixels removed, least and most relevant first, (B, S) each


@dataclass(frozen=True)
class MetricSpec:
    """Everything `evaluate`, the commands and the reports know about a metric."""

    make: Callable[..., Any]  # a `torchmetrics.Metric` class, or a partial; an `ImageMetric` has intervals
    # Returns the arguments of `update` for a batch and a scorer (None unless `uses` is "scores"); an
    # `ImageMetric` is also given `ids`.
    inputs: Callable[[BatchRecord, Any], Sequence[Any]]
    needs: tuple[Need, ...] = ()  # what the metric cannot be measured without
    # The part of `BatchRecord` that must be computed; "correct" is measured once, without maps.
    uses: Literal["maps", "absent_maps", "predicted_maps", "scores", "curves", "removal", "correct"] = "maps"
    measured: Literal["always", "with several boxes", "on request"] = "always"  # if no metrics are named
    relative: bool = False  # whether its thresholds are fractions of a map's maximum, or of its percentile
    title: str = ""  # heading in tables; by default the metric's name in words
    unit: str = "%"  # of the value
    numbers: tuple[str, ...] = ()  # names of the values, if `compute` returns a dict

    @property
    def metric_class(self) -> Any:
        """The class that `make` creates."""
        return self.make.func if isinstance(self.make, partial) else self.make

    @property
    def higher_is_better(self) -> bool | None:
        """Whether larger values are better; None if neither is."""
        return getattr(self.metric_class, "higher_is_better", None)

    @property
    def definition(self) -> str:
        """The first paragraph of the metric's docstring."""
        return " ".join((self.metric_class.__doc__ or "").split("\n\n")[0].split())

    def create(self, *, intervals: bool) -> Any:
        """A new metric, which keeps a row per image if it can and intervals are wanted."""
        keeps_rows = isinstance(self.metric_class, type) and issubclass(self.metric_class, ImageMetric)
        return self.make(intervals=intervals) if keeps_rows else self.make()

    def by_percentile(self) -> "MetricSpec":
        """The same metric with thresholds that are fractions of each map's 90th percentile."""
        return replace(self, make=partial(self.make, percentile=PERCENTILE))

    def update(self, metric: Any, batch: BatchRecord, scorer: str | None) -> None:
        """Update a metric with a batch."""
        ids = {"ids": batch.ids} if isinstance(metric, ImageMetric) else {}
        metric.update(*self.inputs(batch, scorer), **ids)


_boxed = partial(MetricSpec, inputs=lambda batch, _: (batch.maps, batch.boxes), needs=("boxes",))
_located = partial(_boxed, relative=True)
_boxed_correct = partial(MetricSpec, needs=("boxes", "labels", "a network"), relative=True)
_networked = partial(MetricSpec, needs=("a network",))
_scored = partial(_networked, inputs=lambda batch, scorer: batch.scores[scorer], uses="scores")
_on_curve = partial(_networked, uses="curves", measured="on request")
_removing = partial(_networked, uses="removal", measured="on request")


def _top(k: int) -> Callable[[BatchRecord, Any], tuple[Any, ...]]:
    return lambda batch, _: (batch.maps, batch.boxes, batch.correct[k])


METRICS: dict[str, MetricSpec] = {
    "max_box_acc_v2": _located(
        metrics.MaxBoxAccV2, numbers=("max_box_acc_v2", "max_box_acc_30", "max_box_acc_50", "max_box_acc_70")
    ),
    "max_box_acc": _located(metrics.MaxBoxAcc, measured="on request"),
    "gt_known_loc": _located(metrics.GTKnownLoc),
    "gt_known_loc_first": _located(partial(metrics.GTKnownLoc, boxes="first"), measured="with several boxes"),
    "top1_loc": _boxed_correct(metrics.Top1Loc, _top(1)),
    "top1_loc_first": _boxed_correct(
        partial(metrics.Top1Loc, boxes="first"), _top(1), measured="with several boxes"
    ),
    "top5_loc": _boxed_correct(metrics.Top5Loc, _top(5), measured="on request"),
    "pxap": MetricSpec(metrics.PxAP, lambda batch, _: (batch.maps, batch.masks), ("masks",)),
    "box_acc_at_half": _boxed(metrics.BoxAccAtHalf, measured="on request"),
    "false_alarm": MetricSpec(
        metrics.FalseAlarm,
        lambda batch, _: (batch.absent_maps,),
        ("labels", "a network"),
        uses="absent_maps",
        measured="on request",
        numbers=("false_alarm", "false_alarm_area"),
    ),
    "pointing_game": _boxed(metrics.PointingGame),
    "energy_in_box": _boxed(metrics.EnergyInBox),
    "top1_cls": MetricSpec(
        metrics.Top1Cls, lambda batch, _: (batch.correct[1],), ("labels", "a network"), "correct"
    ),
    "average_drop": _scored(metrics.AverageDrop),
    "increase_in_confidence": _scored(metrics.IncreaseInConfidence),
    "mean_map": MetricSpec(
        metrics.MeanMap,
        lambda batch, _: (batch.maps if batch.predicted_maps is None else batch.predicted_maps,),
        uses="predicted_maps",
    ),
    "insertion": _on_curve(metrics.Insertion, lambda batch, _: batch.curves[:1]),
    "deletion": _on_curve(metrics.Deletion, lambda batch, _: batch.curves[1:]),
    "road_least": _removing(metrics.RoadLeast, lambda batch, _: batch.removal[:1]),
    "road_most": _removing(metrics.RoadMost, lambda batch, _: batch.removal[1:]),
}


def list_metrics() -> list[str]:
    """Return the names of all metrics that `evaluate` knows."""
    return list(METRICS)


def metric_of(number: str) -> str:
    """The name of the metric that computes a number: "max_box_acc_v2" for "max_box_acc_30"."""
    return next((name for name, spec in METRICS.items() if number in spec.numbers), number)


def number_title(number: str) -> str:
    """The heading of a number in tables."""
    spec = METRICS.get(number)
    return spec.title if spec and spec.title else number.replace("_", " ")


def choose_metrics(
    names: Iterable[str] | None,
    samples: Sequence[Sample],
    *,
    network: bool,
    maps_of_labels: bool,
    threshold: Threshold = "maximum",
) -> tuple[dict[str, MetricSpec], list[tuple[str, str]]]:
    """The metrics that the samples have annotations for, and (name, reason) of those left out.

    Args:
        names: the metrics to measure; None for all that are usual.
        network: whether there is a network, or only maps.
        maps_of_labels: whether maps are of the labels' classes.
        threshold: what the thresholds of boxes are fractions of.
    """
    if threshold not in get_args(Threshold):
        raise ConfigError(f"thresholds are of the maximum or a percentile, not {threshold!r}.")
    if not len(samples):
        raise DataError("there are no samples to evaluate.")
    if isinstance(names, str):
        raise ConfigError(f"metrics is a list of names: metrics=[{names!r}].")
    if names is None:
        usual = {"always", "with several boxes" if any(len(s.boxes or ()) > 1 for s in samples) else "always"}
        names = [name for name, spec in METRICS.items() if spec.measured in usual]
    missing = {
        need: [sample.id for sample in samples if getattr(sample, name) is None]
        for need, name in _ANNOTATIONS.items()
    }
    chosen, left_out = dict[str, MetricSpec](), list[tuple[str, str]]()
    for name in dict.fromkeys(names):
        if name not in METRICS:
            raise ConfigError(f"there is no metric {name!r}: choose from {', '.join(METRICS)}.")
        spec = METRICS[name]
        needs = {*spec.needs, *(["labels"] if maps_of_labels and spec.uses == "maps" else [])}
        if "a network" in needs and not network:
            left_out.append((name, "it needs a network"))
            continue
        incomplete = sorted(need for need in needs if missing.get(need))
        absent = [need for need in incomplete if len(missing[need]) == len(samples)]
        if absent:
            left_out.append((name, f"the data has no {' and no '.join(absent)}"))
        elif incomplete:
            need = incomplete[0]
            raise DataError(
                f"image {missing[need][0]} has no {need}, but other images have and {name} needs them: "
                "remove the image from the data, or leave the metric out."
            )
        else:
            chosen[name] = spec.by_percentile() if threshold == "percentile" and spec.relative else spec
    if threshold == "percentile" and not any(spec.relative for spec in chosen.values()):
        raise ConfigError("threshold percentile is for boxes: measure max_box_acc_v2 or gt_known_loc, say.")
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise DataError(f"nothing can be measured on these {len(samples)} images. {reasons}.")
    return chosen, left_out


def boxes_for(sample: Sample, opened: ImageSize | None, width: int, height: int) -> Tensor:
    """The sample's boxes in the pixels of a width x height map (PROTOCOL 5.2), (G, 4)."""
    size = sample.size or opened or sample.open().size
    return scaled_boxes(torch.tensor(sample.boxes, dtype=torch.int64), size, (width, height))


def mask_for(sample: Sample, width: int, height: int) -> Tensor:
    """The sample's mask at the size of a map, (H, W) uint8, by nearest neighbour (PROTOCOL 5.5)."""
    assert sample.open_mask is not None
    try:
        return torch.from_numpy(resize_mask(sample.open_mask(), (height, width)))
    except (DataError, OSError) as error:
        raise DataError(f"image {sample.id}: {error}") from error
