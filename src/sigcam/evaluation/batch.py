"""From one batch of images to what the metrics are updated with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.data.loader import Batch
from sigcam.data.sample import Sample
from sigcam.evaluation.registry import BatchRecord, MetricSpec, boxes_for, mask_for
from sigcam.methods.explainer import explain_pass
from sigcam.methods.inputs import choose_classes
from sigcam.methods.map_config import MapConfig, Scale
from sigcam.methods.postprocess import resize, unit_range
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch, at_least_float32, branch_logits
from sigcam.metrics.fidelity import insertion_deletion_curves
from sigcam.metrics.localization import in_top
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.zoom import zoomed

Scorer = Literal["softmax", "sigmoid", "branch"]


SCORERS: dict[Scorer, str] = {
    "softmax": "the class's probability by the classifier's own head, for all branches alike",
    "sigmoid": "the class's evidence by the sigmoid branch, for all branches alike",
    "branch": "a softmax over the logits of the branch that the map explains",
}


class Variant(NamedTuple):
    """One way to draw maps; None where others drew them, or where none are needed."""

    method: str | None = None
    branch: Branch | None = None
    clamp: bool | None = None

    def drawing(self, scale: Scale = "unit") -> MapConfig:
        """The same for `explain`."""
        assert self.method is not None and self.branch is not None
        return MapConfig(self.method, self.branch, self.clamp, scale=scale)

    def standing_for(self, net: DualBranch) -> Variant:
        """The simplest cell with the same maps (PROTOCOL 4.2): some methods have no negative weights, and
        on a head that is global average + linear, some gradients are all alike."""
        assert self.method is not None
        facts, head = METHODS[self.method], "sigmoid" if self.branch == "sigmoid" else "softmax"
        twin = facts.linear_twin if head in net.linear else None
        return self._replace(method=twin or self.method, clamp=self.clamp if facts.signed else True)


@dataclass(frozen=True)
class BatchEvaluator:
    """What is asked of the network for each batch."""

    net: DualBranch
    measures: Mapping[str, MetricSpec]
    class_from: Literal["label", "predicted"]
    scorers: tuple[Scorer, ...]
    zoom: float

    def uses(self, *kinds: str) -> bool:
        return any(measure.uses in kinds for measure in self.measures.values())

    def needs(self, what: str) -> bool:
        return any(what in measure.needs for measure in self.measures.values())

    @property
    def boxes(self) -> bool:
        return self.needs("boxes")

    @property
    def masks(self) -> bool:
        return self.needs("masks")

    @property
    def labels(self) -> bool:
        return self.needs("labels") or (self.class_from == "label" and self.uses("maps"))

    def judged(
        self, batch: Batch, samples: Sequence[Sample], cells: Sequence[Variant]
    ) -> Iterator[tuple[Variant, BatchRecord]]:
        """What is known of the batch, without maps and for each cell with its maps."""
        net = self.net
        images = batch.images.to(net.device, next(net.model.parameters()).dtype)
        passage = net.run(images, grad=True)  # the one pass that all cells share
        height, width = passage.image
        labels = batch.labels.to(net.device) if self.labels and batch.labels is not None else None
        seen = BatchRecord([sample.id for sample in samples])
        if self.boxes:
            pairs = zip(samples, batch.sizes, strict=True)
            seen = replace(seen, boxes=[boxes_for(sample, size, width, height) for sample, size in pairs])
        if self.masks:
            seen = replace(seen, masks=[mask_for(sample, width, height) for sample in samples])
        if labels is not None:
            ranked = _probabilities(net, passage) if net.classes == 1 else at_least_float32(passage.softmax)
            seen = replace(seen, top={k: in_top(ranked, labels, k).cpu() for k in (1, 5)})
        yield Variant(), seen
        predicted, _ = choose_classes(net, passage, None)  # (B, 1)
        chosen = labels[:, None] if labels is not None and self.class_from == "label" else predicted
        finer, larger = zoomed(net, images, self.zoom)
        fine = passage if finer is net and larger is images else finer.run(larger, grad=True)
        done = dict[Variant, BatchRecord]()  # maps that are the same by an identity are drawn once
        for cell in cells:
            same = cell.standing_for(net)
            if same not in done:
                done[same] = self._drawn(same, passage, (finer, fine), chosen, predicted, seen)
            yield cell, done[same]

    def _drawn(
        self,
        cell: Variant,
        passage: ForwardPass,
        fine: tuple[DualBranch, ForwardPass],
        chosen: Tensor,
        predicted: Tensor,
        seen: BatchRecord,
    ) -> BatchRecord:
        """`seen` with the cell's maps, drawn from the finer pass, and what the network says of the images
        that they mask."""
        net, fidelity = self.net, self.uses("kept", "scores", "curves")
        assert cell.method is not None
        own = fidelity and METHODS[cell.method].finish == "min-max"  # masks are finished otherwise
        wanted = [chosen] if self.uses("maps") else []
        wanted += [predicted] if fidelity and not own else []
        if wanted:
            classes = torch.cat(wanted, 1)
            drawn = explain_pass(*fine, cell.drawing(), classes=classes, size=passage.image).maps
            seen = replace(seen, maps=drawn[:, 0].cpu()) if self.uses("maps") else seen
        if not fidelity:
            return seen
        masks = _cam_masks(*fine, cell, predicted, passage.image) if own else drawn[:, -1]  # (B, H, W)
        seen = replace(seen, kept=masks.cpu())
        if self.uses("scores"):
            with torch.no_grad():
                masked = net.run(passage.images * masks[:, None].to(passage.images.dtype))
            scores = dict[str, tuple[Tensor, Tensor]]()
            for scorer in self.scorers:
                before, after = (_confidence(net, p, scorer, cell, predicted) for p in (passage, masked))
                scores[scorer] = before, after
            seen = replace(seen, scores=scores)
        if self.uses("curves"):
            curves = insertion_deletion_curves(
                lambda images: _probabilities(net, net.run(images)), passage.images, masks, predicted[:, 0]
            )
            seen = replace(seen, curves=tuple(curve.cpu() for curve in curves))
        return seen


def _cam_masks(
    net: DualBranch, passage: ForwardPass, cell: Variant, classes: Tensor, size: GridSize
) -> Tensor:
    """CAM as a mask, (B, H, W): scaled at low resolution, then resized bilinearly (PROTOCOL 6)."""
    low = explain_pass(net, passage, cell.drawing("raw"), classes=classes, size="features").maps
    with torch.no_grad():
        return resize(unit_range(low, eps=1e-7), size, "bilinear")[:, 0]


def _confidence(
    net: DualBranch, passage: ForwardPass, scorer: Scorer, cell: Variant, classes: Tensor
) -> Tensor:
    """The classes' scores, (B,), for (B, 1) classes."""
    if scorer == "softmax":
        scores = _probabilities(net, passage)
    else:
        branch: Branch = "sigmoid" if scorer == "sigmoid" else cell.branch or "softmax"
        logits = at_least_float32(branch_logits(passage, branch).detach())
        logits = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
        scores = logits.sigmoid() if scorer == "sigmoid" or net.classes == 1 else logits.softmax(1)
    return scores.gather(1, classes)[:, 0].cpu()


def _probabilities(net: DualBranch, passage: ForwardPass) -> Tensor:
    """What the classifier's own head says, (B, C), or (B, 2) for one logit."""
    output = at_least_float32(passage.softmax)
    if net.classes > 1:
        return output if net.split.output == "probabilities" else output.softmax(1)
    positive = output if net.split.output == "probabilities" else output.sigmoid()
    return torch.cat([1 - positive, positive], 1)
