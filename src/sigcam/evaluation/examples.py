"""Examples: the maps of some images, with a few numbers of each, for the report of an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples, match_classes
from sigcam.evaluation.batch import BatchEvaluator, ClassFrom, Variant
from sigcam.evaluation.registry import METRICS, PERCENTILE, BatchRecord
from sigcam.evaluation.result import FIXED, Result
from sigcam.methods.postprocess import disagreement
from sigcam.metrics.base import relative_drop
from sigcam.metrics.boxes import cut_at_percentile, largest_box_ious, to_levels
from sigcam.network.dual import DualBranch

MIN_EXAMPLES, MAX_EXAMPLES = 48, 200  # images
SHARE = (
    4  # of the images that were evaluated, every fourth: a report takes a fraction of the evaluation's time
)


@dataclass(frozen=True)
class Example:
    """One image, with values of each variant of the maps."""

    index: int  # its position in the samples
    predicted: int
    probability: float
    evidence: float | None  # of the predicted class; None if the branch is not fitted
    maps: Tensor = field(repr=False)  # (variants, H, W) uint8, 255 for 1: small, so that many can be kept
    boxes: tuple[list[int], ...]  # at threshold 0.2
    truth: list[list[int]]  # ground-truth boxes in map pixels
    ious: tuple[float, ...]  # the best IoU of its box with a ground-truth box; () without boxes
    drops: tuple[float, ...]  # the share of confidence lost on image times map; () with boxes
    disagreement: float | None  # of the maps of two branches; None if there is only one


@dataclass(frozen=True)
class Examples:
    """Up to `MAX_EXAMPLES` images of the samples, and the variants that their maps are of."""

    net: DualBranch
    samples: Samples
    variants: tuple[Variant, ...]
    labelled: bool
    boxed: bool
    images: tuple[Example, ...] = field(repr=False)

    def class_name(self, index: int) -> str:
        """The name of a class of the classifier, or its number."""
        names = self.net.class_names or ()
        return names[index] if index < len(names) else f"class {index}"


def collect_examples(
    net: DualBranch,
    samples: Samples,
    result: Result,
    *,
    batch_size: int = 16,
    workers: int = 0,
    seed: int = 0,
    progress: Progress,
) -> Examples:
    """Draw the maps of randomly chosen images by the first method that was evaluated, as `evaluate` did, and
    measure each: where there are boxes, the IoU; otherwise the share of confidence that is lost."""
    assert net.transform is not None
    labelled = all(sample.label is not None for sample in samples)
    if labelled:
        try:
            samples = match_classes(samples, net.classes, net.class_names)
        except DataError:  # labels that the classifier does not know
            labelled = False
    boxed = all(sample.boxes for sample in samples)
    specs = {name: METRICS[name] for name in ("gt_known_loc" if boxed else "average_drop",)}
    class_from: ClassFrom = result.about["class_from"] if labelled else "predicted"
    evaluator = BatchEvaluator(net, specs, class_from, ("softmax",), result.about["zoom"])
    percentile = PERCENTILE if result.about.get("threshold") == "percentile" else None
    variants = _first_method(result)
    generator = torch.Generator().manual_seed(seed)
    count = min(max(MIN_EXAMPLES, len(samples) // SHARE), MAX_EXAMPLES)
    chosen = torch.randperm(len(samples), generator=generator)[:count].sort().values.tolist()
    subset = Samples(tuple(samples[i] for i in chosen), samples.classes)
    examples = list[Example]()
    for batch in load_batches(subset, net.transform, batch_size=batch_size, workers=workers):
        if batch.indices:
            records = evaluator.records(batch, [subset[i] for i in batch.indices], variants)
            drawn = dict(records)
            examples += _measured([chosen[i] for i in batch.indices], drawn, variants, net.fitted, percentile)
        progress("report", len(examples), len(subset))
    return Examples(net, samples, variants, labelled, boxed, tuple(examples))


def _measured(
    indices: Sequence[int],
    records: Mapping[Variant, BatchRecord],
    variants: Sequence[Variant],
    fitted: bool,
    percentile: float | None,
) -> Iterator[Example]:
    """Yield the examples of a batch, from what its metrics are updated with."""
    drawn = [_Drawn.of(records[variant], percentile) for variant in variants]
    pair = compared(variants)
    record = records[variants[0]]
    assert record.predicted is not None and record.confidence is not None
    for i, index in enumerate(indices):
        maps = torch.stack([each.maps[i] for each in drawn])  # (V, H, W)
        yield Example(
            index,
            int(record.predicted[i]),
            float(record.confidence.probability[i, 0]),
            float(record.confidence.evidence[i, 0]) if fitted else None,
            to_levels(maps),
            tuple(each.boxes[i].tolist() for each in drawn),
            record.boxes[i].tolist() if record.boxes else [],
            tuple(each.ious[i] for each in drawn) if record.boxes else (),
            tuple(each.drops[i] for each in drawn) if record.scores else (),
            None if pair is None else float(disagreement(maps[pair[0]], maps[pair[1]])),
        )


class _Drawn(NamedTuple):
    """The maps of a variant, (B, H, W), the box of each, (B, 4), and its IoU or its drop, if measured."""

    maps: Tensor
    boxes: Tensor
    ious: list[float]
    drops: list[float]

    @staticmethod
    def of(record: BatchRecord, percentile: float | None) -> "_Drawn":
        maps = record.maps if record.boxes else record.predicted_maps
        assert maps is not None
        truth = torch.cat([torch.zeros(0, 4, dtype=torch.int64), *record.boxes])
        counts = torch.tensor([len(boxes) for boxes in record.boxes], dtype=torch.int64)
        image = torch.arange(len(counts)).repeat_interleave(counts)
        cut = maps if percentile is None else cut_at_percentile(maps, percentile)
        boxes, ious = largest_box_ious(cut, truth, image, FIXED)
        best = [float(each.max()) for each in ious.split(counts.tolist())] if record.boxes else []
        scores = [score.double() for score in record.scores.get("softmax", ())]
        return _Drawn(maps, boxes, best, relative_drop(*scores).tolist() if scores else [])


def _first_method(result: Result) -> tuple[Variant, ...]:
    """The variants of the first method that was evaluated; Grad-CAM of the softmax head if there is none."""
    columns = "method", "branch", "clamp", "scale"
    rows = [tuple(row[name] for name in columns) for row in result.rows if row["method"] is not None]
    rows = rows or [("grad-cam", "softmax", False, "unit")]
    return tuple(Variant(*row) for row in dict.fromkeys(rows) if row[0] == rows[0][0])


def compared(variants: Sequence[Variant]) -> tuple[int, int] | None:
    """The two variants whose maps are compared: the first, and the last of another branch."""
    others = [i for i, variant in enumerate(variants) if variant.branch != variants[0].branch]
    return (0, others[-1]) if others else None
