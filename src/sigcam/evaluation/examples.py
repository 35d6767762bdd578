"""Examples: the maps of some images, with a few numbers of each, for the report of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples, match_classes
from sigcam.evaluation.batch import Variant
from sigcam.evaluation.registry import boxes_for
from sigcam.evaluation.result import FIXED, Result
from sigcam.methods.explainer import explain_pass
from sigcam.methods.inputs import Scores
from sigcam.methods.postprocess import disagreement
from sigcam.metrics.boxes import box_ious, boxes_at, to_levels
from sigcam.network.dual import DualBranch, ForwardPass

MAX_EXAMPLES = 200  # images


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
    """Draw the maps of randomly chosen images by the first method that was evaluated: of the labels' classes
    where there are boxes to locate, otherwise of the predicted ones, as `evaluate` does."""
    assert net.transform is not None
    labelled = all(sample.label is not None for sample in samples)
    if labelled:
        try:
            samples = match_classes(samples, net.classes, net.class_names)
        except DataError:  # labels that the classifier does not know
            labelled = False
    boxed = all(sample.boxes for sample in samples)
    variants = _first_method(result)
    pair = compared(variants)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(samples), generator=generator)[:MAX_EXAMPLES].sort().values.tolist()
    subset = Samples(tuple(samples[i] for i in chosen), samples.classes)
    examples = list[Example]()
    for batch in load_batches(subset, net.transform, batch_size=batch_size, workers=workers):
        forward = net.run(batch.images.to(net.device, next(net.model.parameters()).dtype), grad=True)
        classes = batch.labels.to(net.device) if labelled and boxed and batch.labels is not None else None
        drawn = [explain_pass(net, forward, variant.map_config(), classes=classes) for variant in variants]
        maps = torch.stack([ex.maps.cpu() for ex in drawn], 1)  # (B, V, H, W)
        predicted = drawn[0].top_classes[:, 0]
        drops = None if boxed else _drops(net, forward, maps, predicted)
        for i, index in enumerate(batch.indices):
            boxes = torch.cat(boxes_at(maps[i], FIXED))  # (V, 4)
            truth = torch.zeros(0, 4, dtype=torch.int64)
            if boxed:
                truth = boxes_for(subset[index], batch.sizes[i], maps.shape[3], maps.shape[2])
            example = Example(
                chosen[index],
                int(predicted[i]),
                float(drawn[0].top_probability[i, 0]),
                float(drawn[0].top_evidence[i, 0]) if net.fitted else None,
                to_levels(maps[i]),
                tuple(boxes.tolist()),
                truth.tolist(),
                tuple(float(box_ious(box, truth).max()) for box in boxes) if boxed else (),
                () if drops is None else tuple(drops[i].tolist()),
                None if pair is None else float(disagreement(maps[i, pair[0]], maps[i, pair[1]])),
            )
            examples.append(example)
        progress("report", len(examples), len(subset))
    return Examples(net, samples, variants, labelled, boxed, tuple(examples))


def _first_method(result: Result) -> tuple[Variant, ...]:
    """The variants of the first method that was evaluated; Grad-CAM of the softmax head if there is none."""
    rows = [(row["method"], row["branch"], row["clamp"]) for row in result.rows if row["method"] is not None]
    rows = rows or [("grad-cam", "softmax", False)]
    return tuple(Variant(*row) for row in dict.fromkeys(rows) if row[0] == rows[0][0])


def compared(variants: Sequence[Variant]) -> tuple[int, int] | None:
    """The two variants whose maps are compared: the first, and the last of another branch."""
    others = [i for i, variant in enumerate(variants) if variant.branch != variants[0].branch]
    return (0, others[-1]) if others else None


def _drops(net: DualBranch, forward: ForwardPass, maps: Tensor, predicted: Tensor) -> Tensor:
    """Relative loss of the predicted classes' probability on image times map, (B, V)."""
    chosen = predicted.to(net.device)[:, None]

    def probability(run: ForwardPass) -> Tensor:
        return Scores.of(net, run, "softmax", chosen).probability[:, 0].double().cpu()

    with torch.no_grad():
        before = probability(forward)
        masked = (net.run(forward.images * each[:, None].to(forward.images)) for each in maps.unbind(1))
        after = torch.stack([probability(run) for run in masked], 1)
    return (before[:, None] - after).clamp(min=0) / (before[:, None] + 1e-7)
