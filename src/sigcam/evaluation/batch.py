"""From a batch of images to what the metrics are updated with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sigcam.core.files import hash_of
from sigcam.core.types import GridSize
from sigcam.data.loader import Batch
from sigcam.data.sample import Sample
from sigcam.evaluation.registry import BatchRecord, MetricSpec, boxes_for, mask_for
from sigcam.methods.explainer import explain_pass
from sigcam.methods.inputs import Scores, choose_classes, class_probabilities
from sigcam.methods.postprocess import resize, unit_range
from sigcam.methods.registry import METHODS, MapConfig, Scale
from sigcam.methods.targets import Branch, at_least_float32, branch_logits, class_logits, head_of
from sigcam.metrics.fidelity import insertion_deletion_curves
from sigcam.metrics.localization import in_top
from sigcam.metrics.removal import removal_curves
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.image_errors import blame_images
from sigcam.network.zoom import zoom_batch, zoomed

ClassFrom = Literal["label", "predicted"]
MapScale = Literal["unit", "probability"]
Scorer = Literal["softmax", "sigmoid", "branch"]
SCORERS: dict[Scorer, str] = {
    "softmax": "the class's probability by the classifier's own head, for all branches alike",
    "sigmoid": "the class's evidence by the sigmoid branch, for all branches alike",
    "branch": "a softmax over the logits of the branch that the map explains",
}


class Variant(NamedTuple):
    """One way to draw maps; branch and clamp are None for maps of unknown origin."""

    method: str | None = None
    branch: str | None = None  # a `Branch`, or the name of a further sigmoid branch
    clamp: bool | None = None
    scale: MapScale = "unit"

    @property
    def source(self) -> Branch:
        """The branch of the network that draws the maps; a further branch is that network's own."""
        return self.branch if self.branch in ("softmax", "centred") else "sigmoid"  # type: ignore[return-value]

    def map_config(self, scale: Scale | None = None) -> MapConfig:
        """The settings to draw these maps with, or with another scale."""
        assert self.method is not None
        return MapConfig(self.method, self.source, self.clamp, scale=scale or self.scale)

    def simplest_equal(self, net: DualBranch) -> Variant:
        """The simplest variant with the same maps (PROTOCOL 4.2): some methods have no negative weights, and
        on a head of global average pooling and a linear layer some methods are one."""
        assert self.method is not None
        facts, head = METHODS[self.method], head_of(self.source)
        twin = facts.linear_twin if head in net.linear else None
        clamp = self.clamp if facts.signed or self.scale != "unit" else True
        return self._replace(method=twin or self.method, clamp=clamp)


NO_MAPS = Variant()  # of metrics that need no maps


@dataclass(frozen=True)
class BatchEvaluator:
    """Draws the maps of a batch and computes whatever the chosen metrics use.

    Args:
        others: further branches of the network's classifier, by name; they share its pass.
        curve_steps: steps of insertion and deletion.
        map_samples: masks, noises or steps of methods that take them; None for their default.
        map_top_n: channels that methods try which mask images by channels; None for all.
    """

    net: DualBranch
    specs: Mapping[str, MetricSpec]
    class_from: ClassFrom
    scorers: tuple[Scorer, ...]
    zoom: float
    others: Mapping[str, DualBranch] = field(default_factory=dict)
    curve_steps: int = 224
    map_samples: int | None = None
    map_top_n: int | None = None

    def uses(self, *parts: str) -> bool:
        """Whether a metric uses one of these parts of the record."""
        return any(spec.uses in parts for spec in self.specs.values())

    def needs(self, annotation: str) -> bool:
        """Whether a metric, or the choice of the class to locate, needs this annotation."""
        by_label = annotation == "labels" and self.class_from == "label" and self.uses("maps")
        return by_label or any(annotation in spec.needs for spec in self.specs.values())

    def records(
        self, batch: Batch, samples: Sequence[Sample], variants: Sequence[Variant]
    ) -> Iterator[tuple[Variant, BatchRecord]]:
        """The records of the batch: without maps first, then with the maps of each variant."""
        net = self.net
        images = batch.images.to(net.device, next(net.model.parameters()).dtype)
        grad = not {"softmax", "sigmoid"} <= net.linear  # of linear heads, gradients are the weights
        with blame_images(net, images):
            forward = net.run(images, grad=grad)  # the one pass that all variants share
        labels = batch.labels.to(net.device) if self.needs("labels") and batch.labels is not None else None
        predicted, _ = choose_classes(net, forward, None)  # (B, 1)
        record = replace(
            self._annotations(batch, samples, forward, labels),
            predicted=predicted[:, 0].cpu(),
            confidence=Scores.of(net, forward, "softmax", predicted),
        )
        yield NO_MAPS, record
        located = labels[:, None] if labels is not None and self.class_from == "label" else predicted
        zoom_batch(net, images, self.zoom, whole=True)  # refuses what does not fit into memory
        zoomed_net, larger = zoomed(net, images, self.zoom)
        same = zoomed_net is net and larger is images
        finer = forward if same else zoomed_net.run(larger, grad=grad)
        finer = replace(finer, altered={})  # heads share the passes of altered images
        shown = located, predicted, absent_classes(located, max(net.classes, 2), record.ids)
        drawn = dict[Variant, BatchRecord]()  # equal maps are drawn once
        for variant in variants:
            simplest = variant.simplest_equal(net)
            if simplest not in drawn:
                source = zoomed_net, finer
                if other := self.others.get(variant.branch or ""):
                    other = zoomed(other, images, self.zoom)[0]
                    source = other, other.reread(finer)
                drawn[simplest] = self._with_maps(record, simplest, forward, source, *shown)
            yield variant, drawn[simplest]

    def _annotations(
        self, batch: Batch, samples: Sequence[Sample], forward: ForwardPass, labels: Tensor | None
    ) -> BatchRecord:
        """The record of the batch without maps."""
        height, width = forward.image
        record = BatchRecord([sample.id for sample in samples])
        if self.needs("boxes"):
            pairs = zip(samples, batch.sizes, strict=True)
            record = replace(record, boxes=[boxes_for(sample, size, width, height) for sample, size in pairs])
        if self.needs("masks"):
            record = replace(record, masks=[mask_for(sample, width, height) for sample in samples])
        if labels is not None:
            scores = at_least_float32(forward.softmax)
            if self.net.classes == 1:
                scores = class_probabilities(self.net, forward)
            record = replace(record, correct={k: in_top(scores, labels, k).cpu() for k in (1, 5)})
        return record

    def _with_maps(
        self,
        record: BatchRecord,
        variant: Variant,
        forward: ForwardPass,
        source: tuple[DualBranch, ForwardPass],
        located: Tensor,
        predicted: Tensor,
        absent: Tensor,
    ) -> BatchRecord:
        """The record with the variant's maps, drawn from the pass in `source`, and the scores of the images
        masked by them."""
        net, fidelity = self.net, self.uses("predicted_maps", "scores", "curves", "removal")
        assert variant.method is not None
        facts = METHODS[variant.method]
        cam = fidelity and facts.masks_are_resized and variant.scale == "unit"
        classes = [located] * self.uses("maps") + [absent] * self.uses("absent_maps")
        classes += [predicted] * (fidelity and not cam)  # masks of CAM are resized otherwise
        if classes:
            config, chosen = variant.map_config(), torch.cat(classes, 1)
            if facts.samples:
                config = replace(config, samples=self.map_samples)
            if facts.tries_channels:
                config = replace(config, top_n=self.map_top_n)
            maps = explain_pass(*source, config, classes=chosen, size=forward.image, zoom=self.zoom).maps
            record = replace(record, maps=maps[:, 0].cpu()) if self.uses("maps") else record
            if self.uses("absent_maps"):
                record = replace(record, absent_maps=maps[:, int(self.uses("maps"))].cpu())
        if not fidelity:
            return record
        masks = _cam_masks(*source, variant, predicted, forward.image) if cam else maps[:, -1]  # (B, H, W)
        record = replace(record, predicted_maps=masks.cpu())
        if self.uses("scores"):
            with torch.no_grad():
                masked = net.run(forward.images * masks[:, None].to(forward.images.dtype))
            passes = forward, masked
            scores = {s: [_score(net, f, s, variant, predicted) for f in passes] for s in self.scorers}
            if "branch" in scores and (other := self.others.get(variant.branch or "")):
                passes = other.reread(forward), other.reread(masked)
                scores["branch"] = [_score(other, f, "branch", variant, predicted) for f in passes]
            record = replace(record, scores=scores)

        def probabilities(images: Tensor) -> Tensor:
            return class_probabilities(net, net.run(images))

        shown = forward.images, masks, predicted[:, 0]
        if self.uses("curves"):
            curves = insertion_deletion_curves(probabilities, *shown, steps=self.curve_steps)
            record = replace(record, curves=tuple(curve.cpu() for curve in curves))
        if self.uses("removal"):
            record = replace(record, removal=tuple(c.cpu() for c in removal_curves(probabilities, *shown)))
        return record


def absent_classes(located: Tensor, classes: int, ids: Sequence[str]) -> Tensor:
    """A class (B, 1) other than each image's own, drawn by its id: the same in every evaluation."""
    drawn = [int(hash_of(id), 16) % (classes - 1) + 1 for id in ids]
    return (located + torch.tensor(drawn, device=located.device)[:, None]) % classes


def _cam_masks(
    net: DualBranch, forward: ForwardPass, variant: Variant, classes: Tensor, size: GridSize
) -> Tensor:
    """CAM as a mask, (B, H, W): scaled at low resolution, then resized bilinearly (PROTOCOL 6)."""
    maps = explain_pass(net, forward, variant.map_config("raw"), classes=classes, size="features").maps
    with torch.no_grad():
        return resize(unit_range(maps, eps=1e-7), size, "bilinear")[:, 0]


def _score(
    net: DualBranch, forward: ForwardPass, scorer: Scorer, variant: Variant, classes: Tensor
) -> Tensor:
    """The scores (B,) of (B, 1) classes."""
    if scorer == "softmax":
        scores = class_probabilities(net, forward)
    else:
        branch: Branch = "sigmoid" if scorer == "sigmoid" else variant.source
        logits = at_least_float32(branch_logits(forward, branch).detach())
        if scorer == "sigmoid":
            logits = net.calibration.evidence(logits)
        logits = class_logits(logits)
        scores = logits.sigmoid() if scorer == "sigmoid" or net.classes == 1 else logits.softmax(1)
    return scores.gather(1, classes)[:, 0].cpu()
