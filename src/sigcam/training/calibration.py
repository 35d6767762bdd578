"""Calibrate a fitted branch on images and their backgrounds."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather
from sigcam.network.calibration import BranchCalibration, LogitScale, fit_scale
from sigcam.network.dual import DualBranch
from sigcam.training.background import classes_of
from sigcam.training.features import Features
from sigcam.training.recipes import Logits, TrainedHead

log = logging.getLogger("sigcam")
MAX_CALIBRATION_IMAGES = 512  # images to calibrate each enlargement on


def calibrate(
    net: DualBranch,
    data: Any,
    features: Features,
    held_out: Tensor,
    trained: TrainedHead,
    config: FitConfig,
    read: Callable[..., Features],
) -> BranchCalibration | None:
    """Return the scale of maps at each size, fitted on training images, and that of evidence, fitted on the
    held-out ones; None if they cannot be told from their backgrounds.

    Args:
        data: where the features come from; `read` computes them again for enlarged images.
        held_out: positions of the held-out images.
    """
    assert trained.logits is not None
    scales = {1.0: CalibrationSet(net, features, trained.logits).map_scale()}
    positions = features.gather_labels()[0]
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(config.seed))
    only = positions[order[:MAX_CALIBRATION_IMAGES]].sort().values
    for zoom in config.zooms:
        if zoom != 1:
            larger = read(data, replace(config, views=1), backgrounds=True, zoom=zoom, only=only)
            scales[zoom] = CalibrationSet(net, larger, trained.logits).map_scale()
    for zoom in [zoom for zoom, scale in scales.items() if scale is None]:
        log.warning("zoom %g is not calibrated: the branch does not tell images from backgrounds.", zoom)
    maps = {zoom: scale for zoom, scale in scales.items() if scale is not None}
    evidence = None
    if trained.unseen_logits is not None:
        chosen = torch.isin(features.positions(), held_out)
        evidence = CalibrationSet(net, features, trained.unseen_logits, chosen).evidence_scale()
    return BranchCalibration(evidence or LogitScale(), maps) if maps or evidence else None


class CalibrationSet:
    """Logits of images and of their backgrounds, over all processes.

    Args:
        chosen: mask of the images of this process to use; all by default.
    """

    def __init__(
        self, net: DualBranch, features: Features, logits: Logits, chosen: Tensor | None = None
    ) -> None:
        alone, classes = features.backgrounds[0], net.classes
        device = torch.device("cpu") if net.device.type == "mps" else net.device
        usable = alone.flatten(1).isfinite().all(1)
        usable = usable if chosen is None else usable & chosen
        rows = features.views[0][usable], alone[usable]
        shown_classes = classes_of(features.labels[usable], classes)
        parts = all_gather((*(logits(each.to(device)).double().cpu() for each in rows), shown_classes))
        width = max(part[2].shape[1] for part in parts)
        shown = [torch.nn.functional.pad(part[2], (0, width - part[2].shape[1]), value=-1) for part in parts]
        self.images, self.alone = (torch.cat([part[i] for part in parts]) for i in (0, 1))  # (n, C)
        index = torch.cat(shown)
        marks = torch.zeros(len(index), classes + 1, dtype=torch.bool)
        self.shown = marks.scatter_(1, index.where(index >= 0, classes), True)[:, :classes]  # (n, C)

    def map_scale(self) -> LogitScale | None:
        """Return the scale that tells images of a class from their own backgrounds, both counting half."""
        return _fit_groups([self.images[self.shown]], [self.alone[self.shown]])

    def evidence_scale(self) -> LogitScale | None:
        """Return the scale that tells images of a class (one half) from images of other classes (a quarter)
        and from backgrounds (a quarter)."""
        return _fit_groups([self.images[self.shown]], [self.images[~self.shown], self.alone.flatten()])


def _fit_groups(positives: list[Tensor], negatives: list[Tensor]) -> LogitScale | None:
    """Fit a scale with equal total weights of positives and negatives, and of the groups of either."""
    logits, targets, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for target, groups in ((1.0, positives), (0.0, negatives)):
        groups = [group for group in groups if len(group)]
        for group in groups:
            logits.append(group)
            targets.append(torch.full_like(group, target))
            weights.append(torch.full_like(group, 1 / (len(groups) * len(group))))
    if not logits:
        return None
    return fit_scale(torch.cat(logits), torch.cat(targets), torch.cat(weights))
