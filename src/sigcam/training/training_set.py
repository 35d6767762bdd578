"""TrainingSet: the rows that a head is trained on, some of them held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, world_size
from sigcam.network.dual import DualBranch
from sigcam.training.features import Features
from sigcam.training.logistic import Rows
from sigcam.training.selection import MIN_HELD_OUT

MAX_HELD_OUT = 10_000  # images
BACKGROUND_ORDER = 4  # backgrounds come after two views of images and two of negatives
VIEW_OFFSET = 2**40  # more than there are images; keeps the views apart in `TrainingSet.order`


@dataclass(frozen=True)
class TrainingSet(Rows):
    """Rows of this process: every view of its images, of the images without any of the classes, and of the
    images' backgrounds.

    Args:
        held_out: (n,) bool, rows of images that quality is measured on, and of their backgrounds.
        scored: (n,) bool, one row of each held-out image: its plain view.
        background: (n,) bool, rows of backgrounds; their weight is that of `background=1`.
        order: (n,) integers that sort the rows of all processes as a single process has them.
    """

    held_out: Tensor
    scored: Tensor
    background: Tensor
    order: Tensor

    def with_background(self, weight: float) -> TrainingSet:
        """Return the rows with backgrounds of this weight; without them if it is 0."""
        if not weight:
            return self._kept(~self.background)
        return replace(self, weights=torch.where(self.background, weight * self.weights, self.weights))

    def training_part(self) -> TrainingSet:
        """Return the rows that are not held out."""
        return self._kept(~self.held_out)

    def _kept(self, kept: Tensor) -> TrainingSet:
        return TrainingSet(*(getattr(self, each.name)[kept] for each in fields(self)))

    def image_share(self) -> float:
        """Return the share of all processes' weights that is not that of backgrounds."""
        weights = self.weights.double()
        parts = all_gather((float(weights[~self.background].sum()), float(weights.sum())))
        return sum(part[0] for part in parts) / sum(part[1] for part in parts)

    def can_choose_background(self) -> bool:
        """Whether there are backgrounds, and enough held-out images to choose their weight by."""
        parts = all_gather((int(self.scored.sum()), int(self.background.sum())))
        return sum(part[0] for part in parts) >= MIN_HELD_OUT and any(part[1] for part in parts)

    def gather(self) -> TrainingSet:
        """Return the rows of all processes, in the same order for any number of them."""
        if world_size() == 1:
            return self
        device = self.features.device
        parts = all_gather([getattr(self, each.name).cpu() for each in fields(self)])
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        order = columns[-1].argsort()
        return TrainingSet(*(column[order].to(device) for column in columns))

    def held_out_logits(self, logits: Callable[[Tensor], Tensor], classes: int) -> tuple[Tensor, Tensor]:
        """Return logits and targets (B, C) of the held-out images of all processes, on the CPU."""
        rows = self.select(self.scored)
        parts = all_gather((logits(rows.features).double().cpu(), rows.targets(torch.arange(classes)).cpu()))
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def held_out_backgrounds(self, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits (m, C) of the backgrounds of the held-out images of all processes, on the CPU."""
        plain = self.order < (BACKGROUND_ORDER + 1) * VIEW_OFFSET  # not those of mirror images
        rows = self.select(self.background & self.held_out & plain)
        return torch.cat(all_gather(logits(rows.features).double().cpu()))


def make_training_set(
    net: DualBranch, features: Features, negatives: Features | None, held_out: Tensor, config: FitConfig
) -> TrainingSet:
    """Return the rows of this process, given the positions of all held-out images."""
    positions, labels = features.positions(), features.labels
    if net.classes == 1 and labels.ndim == 1:
        labels = labels[:, None]
    held = torch.isin(positions, held_out)
    weight = torch.full((len(labels),), 1 / len(features.views))
    no, nothing = torch.zeros_like(held), 0 if labels.ndim == 2 else -1
    parts: list[tuple[Tensor, ...]] = [
        (view, labels, weight, held, held & (number == 0), no, positions + number * VIEW_OFFSET)
        for number, view in enumerate(features.views)
    ]
    if negatives is not None:
        no_class = labels.new_full((len(negatives), *labels.shape[1:]), nothing)
        never = torch.zeros(len(negatives), dtype=torch.bool)
        others = torch.full((len(negatives),), config.negatives_weight / len(negatives.views))
        for number, view in enumerate(negatives.views):
            order = negatives.positions() + (2 + number) * VIEW_OFFSET
            parts.append((view, no_class, others, never, never, never, order))
    for number, view in enumerate(features.backgrounds):
        found, order = (
            view.flatten(1).isfinite().all(1),
            positions + (BACKGROUND_ORDER + number) * VIEW_OFFSET,
        )
        row = view, torch.full_like(labels, nothing), weight, held, no, ~no, order
        parts.append(tuple(column[found] for column in row))
    device = torch.device("cpu") if net.device.type == "mps" else net.device  # mps has no float64
    columns = zip(*parts, strict=True)
    return TrainingSet(*((torch.cat(c) if len(c) > 1 else c[0]).to(device) for c in columns))


def choose_held_out(labels: Tensor, config: FitConfig) -> Tensor:
    """Return a mask (B,) of the images to hold out, by their (B,) or (B, C) labels: the same share of every
    class, at random, leaving at least one image of each to learn from. The same in every process."""
    count = len(labels)
    share = min(config.holdout, MAX_HELD_OUT / count)
    held_out = torch.zeros(count, dtype=torch.bool)
    if share == 0:
        return held_out
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))
    if labels.ndim == 2:  # the first of an image's classes; -1 for none
        labels = torch.where(labels.any(1), labels.to(torch.uint8).argmax(1), -1)
    by_class = order[labels[order].argsort(stable=True)]
    for images in by_class.split(labels.unique(return_counts=True)[1].tolist()):
        held_out[images[: min(max(1, round(share * len(images))), len(images) - 1)]] = True
    return held_out
