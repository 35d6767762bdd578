"""What can be measured of maps, what each measure needs, and how it is told of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.masks import resize_mask
from sigcam.data.sample import Sample
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.boxes import scaled_boxes
from sigcam.metrics.fidelity import AverageDrop, Deletion, IncreaseInConfidence, Insertion, MeanMap
from sigcam.metrics.localization import (
    EnergyInBox,
    GTKnownLoc,
    MaxBoxAcc,
    MaxBoxAccV2,
    PointingGame,
    PxAP,
    Top1Cls,
    Top1Loc,
    Top5Loc,
)

Need = Literal["boxes", "masks", "labels", "a network"]
Use = Literal["maps", "kept", "scores", "curves", "classes"]
LeftOut = list[tuple[str, str]]


@dataclass(frozen=True)
class BatchRecord:
    """What is known of a batch of maps; maps are on the CPU, boxes and masks in their pixels."""

    ids: list[str]
    maps: Tensor = field(default_factory=lambda: torch.empty(0))  # (B, H, W), of the class to be located
    boxes: Sequence[Tensor] = ()  # (G, 4) each
    masks: Sequence[Tensor] = ()  # (H, W) each: 1 object, 0 background, 255 ignored
    top: Mapping[int, Tensor] = field(default_factory=dict)  # by k, (B,): the label is among the k best
    kept: Tensor | None = None  # (B, H, W), of the predicted class: what images are multiplied by
    scores: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by scorer: before, after
    curves: tuple[Tensor, ...] = ()  # insertion and deletion, (B, S + 1) each


@dataclass(frozen=True)
class MetricSpec:
    """A metric, how it is told of a batch (by a scorer), what it needs, and what of `Judged` it looks at."""

    make: Callable[..., ImageMetric]
    tell: Callable[[Any, BatchRecord, str], None]
    needs: tuple[Need, ...]
    uses: Use
    usual: bool = True


def _boxed(metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.maps, seen.boxes, ids=seen.ids)


def _boxed_if_top(k: int, metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.maps, seen.boxes, seen.top[k], ids=seen.ids)


def _masked(metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.maps, seen.masks, ids=seen.ids)


def _classified(metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.top[1], ids=seen.ids)


def _scored(metric: Any, seen: BatchRecord, scorer: str) -> None:
    metric.update(*seen.scores[scorer], ids=seen.ids)


def _averaged(metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.maps if seen.kept is None else seen.kept, ids=seen.ids)


def _curved(which: int, metric: Any, seen: BatchRecord, _: str) -> None:
    metric.update(seen.curves[which], ids=seen.ids)


_CLASSIFIED: tuple[Need, ...] = ("boxes", "labels", "a network")
METRICS: dict[str, MetricSpec] = {
    "max_box_acc_v2": MetricSpec(MaxBoxAccV2, _boxed, ("boxes",), "maps"),
    "max_box_acc": MetricSpec(MaxBoxAcc, _boxed, ("boxes",), "maps", usual=False),
    "gt_known_loc": MetricSpec(GTKnownLoc, _boxed, ("boxes",), "maps"),
    "gt_known_loc_first": MetricSpec(partial(GTKnownLoc, boxes="first"), _boxed, ("boxes",), "maps"),
    "top1_loc": MetricSpec(Top1Loc, partial(_boxed_if_top, 1), _CLASSIFIED, "maps"),
    "top1_loc_first": MetricSpec(
        partial(Top1Loc, boxes="first"), partial(_boxed_if_top, 1), _CLASSIFIED, "maps"
    ),
    "top5_loc": MetricSpec(Top5Loc, partial(_boxed_if_top, 5), _CLASSIFIED, "maps", usual=False),
    "pxap": MetricSpec(PxAP, _masked, ("masks",), "maps"),
    "pointing_game": MetricSpec(PointingGame, _boxed, ("boxes",), "maps"),
    "energy_in_box": MetricSpec(EnergyInBox, _boxed, ("boxes",), "maps"),
    "top1_cls": MetricSpec(Top1Cls, _classified, ("labels", "a network"), "classes"),
    "average_drop": MetricSpec(AverageDrop, _scored, ("a network",), "scores"),
    "increase_in_confidence": MetricSpec(IncreaseInConfidence, _scored, ("a network",), "scores"),
    "mean_map": MetricSpec(MeanMap, _averaged, (), "kept"),
    "insertion": MetricSpec(Insertion, partial(_curved, 0), ("a network",), "curves", usual=False),
    "deletion": MetricSpec(Deletion, partial(_curved, 1), ("a network",), "curves", usual=False),
}


def choose_metrics(
    asked: Iterable[str] | None, samples: Sequence[Sample], *, network: bool, labels_draw: bool
) -> tuple[dict[str, MetricSpec], LeftOut]:
    """The measures that the samples have annotations for, and why the others are left out.

    Args:
        asked: their names; None for the usual ones.
        network: whether there is one, or maps alone.
        labels_draw: whether maps are of the labels' classes.
    """
    if not len(samples):
        raise DataError("there are no samples to measure anything on.")
    if isinstance(asked, str):
        raise DataError(f"metrics is a list of names: metrics=[{asked!r}].")
    names = list(METRICS) if asked is None else list(dict.fromkeys(asked))
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown is not None:
        raise DataError(f"there is no metric {unknown!r}: choose of {', '.join(METRICS)}.")
    missing = {need: _without(need, samples) for need in ("boxes", "masks", "labels")}
    several = any(len(sample.boxes or ()) > 1 for sample in samples)
    chosen, left_out = dict[str, MetricSpec](), LeftOut()
    for name in names:
        measure = METRICS[name]
        if asked is None and (not measure.usual or (name.endswith("_first") and not several)):
            continue
        needs = {*measure.needs, *(["labels"] if labels_draw and measure.uses == "maps" else [])}
        if "a network" in needs and not network:
            left_out.append((name, "it needs a network"))
            continue
        none = sorted(need for need in needs if len(missing.get(need, ())) == len(samples))
        if none:
            left_out.append((name, f"the data has no {' and no '.join(none)}"))
            continue
        some = next(((need, missing[need][0]) for need in sorted(needs) if missing.get(need)), None)
        if some:
            raise DataError(
                f"image {some[1]} has no {some[0]}, which others have and {name} needs: take it out of the "
                "data, or leave the metric out."
            )
        chosen[name] = measure
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise DataError(f"nothing can be measured on these {len(samples)} images. {why}.")
    return chosen, left_out


def _without(need: str, samples: Iterable[Sample]) -> list[str]:
    """Ids of the samples that lack it."""
    field_of = {"boxes": "boxes", "masks": "open_mask", "labels": "label"}[need]
    return [sample.id for sample in samples if getattr(sample, field_of) is None]


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
