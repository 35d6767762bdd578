"""What a report needs beyond an evaluation's numbers: curves from its sums, and a look at some images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.data.labels import match_classes
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples
from sigcam.evaluation.batch import Variant
from sigcam.evaluation.registry import boxes_for
from sigcam.evaluation.result import FIXED, Result
from sigcam.methods.explainer import explain_pass
from sigcam.methods.explanation import Explanation
from sigcam.methods.inputs import Scores
from sigcam.methods.postprocess import disagreement
from sigcam.metrics.boxes import best_ious
from sigcam.network.dual import DualBranch

LOOKED_AT = 200  # images


# ------------------------------------------------------------------------------------- a look at some images


@dataclass(frozen=True)
class Example:
    """What is kept of one image: small, so that many can be.

    Args:
        index: where it is in the samples.
        ious: of each cell, the IoU of its box at threshold 0.2 with the best ground-truth box; () without.
        drops: of each cell, the share of confidence lost when only what the map shows is kept; () with boxes.
        disagreement: of the maps of two branches, None where there is one.
    """

    index: int
    predicted: int
    probability: float
    evidence: float | None
    ious: tuple[float, ...]
    drops: tuple[float, ...]
    disagreement: float | None


@dataclass(frozen=True)
class Examples:
    """Glances at up to `LOOKED_AT` images of the samples, and the cells whose maps were looked at."""

    net: DualBranch
    samples: Samples
    cells: tuple[Variant, ...]
    labelled: bool
    boxed: bool
    glances: tuple[Example, ...] = field(repr=False)


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
    """Draws maps of some images again, by the first method that was evaluated, and keeps a few numbers: of
    the labels' classes where boxes are to be met, else of the predicted ones, as `evaluate` does."""
    assert net.transform is not None
    samples, labelled = _labelled(samples, net)
    boxed = all(sample.boxes for sample in samples)
    cells = _cells_of(result)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(samples), generator=generator)[:LOOKED_AT].sort().values.tolist()
    some = Samples(tuple(samples[i] for i in chosen), samples.classes)
    glances = list[Example]()
    for batch in load_batches(some, net.transform, batch_size=batch_size, workers=workers):
        drawn = drawn_by(net, batch.images, cells, batch.labels if labelled and boxed else None)
        first = drawn[0]
        maps = [ex.maps.cpu() for ex in drawn]
        predicted = first.top_classes[:, 0].tolist()
        truths = (
            [
                boxes_for(some[i], size, maps[0].shape[2], maps[0].shape[1])
                for i, size in zip(batch.indices, batch.sizes, strict=True)
            ]
            if boxed
            else []
        )
        ious = (
            [best_ious(m, truths, mode="largest")[:, round(1000 * FIXED)].tolist() for m in maps]
            if boxed
            else []
        )
        drops = [] if boxed else [_drops(net, batch.images, m, predicted) for m in maps]
        pair = pair_of(cells)
        for i, index in enumerate(batch.indices):
            apart = None if pair is None else float(disagreement(maps[pair[0]][i], maps[pair[1]][i]))
            glances.append(
                Example(
                    chosen[index],
                    int(predicted[i]),
                    float(first.top_probability[i, 0]),
                    float(first.top_evidence[i, 0]) if net.fitted else None,
                    tuple(values[i] for values in ious),
                    tuple(values[i] for values in drops),
                    apart,
                )
            )
        progress("report", len(glances), len(some))
    return Examples(net, samples, cells, labelled, boxed, tuple(glances))


def _labelled(samples: Samples, net: DualBranch) -> tuple[Samples, bool]:
    """The samples with the classifier's labels, if all have one that it knows."""
    if any(sample.label is None for sample in samples):
        return samples, False
    try:
        return match_classes(samples, net.classes, net.class_names), True
    except DataError:
        return samples, False


def _cells_of(result: Result) -> tuple[Variant, ...]:
    """The cells of the first method that was evaluated, a row of the table each; if none, the plainest."""
    keys = [(r["method"], r["branch"], r["clamp"]) for r in result.rows if r["method"] is not None]
    keys = keys or [("grad-cam", "softmax", False)]
    return tuple(Variant(*key) for key in dict.fromkeys(keys) if key[0] == keys[0][0])


def pair_of(cells: Sequence[Variant]) -> tuple[int, int] | None:
    """Two cells whose maps are compared: the first of the first branch, the last of another."""
    others = [i for i, cell in enumerate(cells) if cell.branch != cells[0].branch]
    return (0, others[-1]) if others else None


def drawn_by(
    net: DualBranch, images: Tensor, cells: Sequence[Variant], labels: Tensor | None
) -> list[Explanation]:
    """The maps of a batch by every cell, from one pass: of the labels' classes, else the predicted."""
    images = images.to(net.device, next(net.model.parameters()).dtype)
    passage = net.run(images, grad=True)
    classes = None if labels is None else labels.to(net.device)
    return [explain_pass(net, passage, cell.drawing(), classes=classes) for cell in cells]


def _drops(net: DualBranch, images: Tensor, maps: Tensor, predicted: Sequence[int]) -> list[float]:
    """Relative loss of the predicted classes' probability on image times map, (B,)."""
    images = images.to(net.device, next(net.model.parameters()).dtype)
    masked = images * maps[:, None].to(images)
    with torch.no_grad():
        before, after = (_probability(net, x, predicted) for x in (images, masked))
    return ((before - after).clamp(min=0) / (before + 1e-7)).tolist()


def _probability(net: DualBranch, images: Tensor, classes: Sequence[int]) -> Tensor:
    index = torch.tensor(classes, device=net.device)[:, None]
    return Scores.of(net, net.run(images), "softmax", index).probability[:, 0].double().cpu()
