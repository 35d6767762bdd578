"""Calibrate a fitted branch on images and their backgrounds."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather
from sigcam.core.errors import ConfigError
from sigcam.core.memory import check_memory
from sigcam.metrics.classification import EvidenceQuality, calibration
from sigcam.network.calibration import (
    BranchCalibration,
    Cases,
    LogitScale,
    evidence_cases,
    fit_scale,
    weighted_cases,
)
from sigcam.network.dual import DualBranch
from sigcam.network.trace import chunks
from sigcam.network.zoom import zoom_batch, zoomed
from sigcam.training.background import classes_of
from sigcam.training.feature_cache import IMAGES_PER_CHUNK
from sigcam.training.features import Features
from sigcam.training.recipes import Logits, TrainedHead

log = logging.getLogger("sigcam")
MAX_CALIBRATION_IMAGES = 512  # images to calibrate each enlargement on
MAP_SMOOTHING = (
    0.1  # a cell's score varies far more than the mean over an image, which maps are calibrated by
)


def calibrate(
    net: DualBranch,
    data: Any,
    features: Features,
    held_out: Tensor,
    trained: TrainedHead,
    config: FitConfig,
    read: Callable[..., Features],
) -> tuple[BranchCalibration | None, EvidenceQuality | None]:
    """Return the scale of maps at each size, fitted on training images, and that of evidence, fitted on the
    held-out ones; None if they cannot be told from their backgrounds. Also return how reliable evidence is.

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
    evidence = quality = None
    if trained.unseen_logits is not None:
        chosen = torch.isin(features.positions(), held_out)
        unseen = CalibrationSet(net, features, trained.unseen_logits, chosen)
        evidence = unseen.evidence_scale()
        quality = unseen.evidence_quality(config.seed) if evidence else None
    return BranchCalibration(evidence or LogitScale(), maps) if maps or evidence else None, quality


def check_zooms(net: DualBranch, config: FitConfig) -> None:
    """Raise ConfigError or DataError for an enlargement that the network does not take, or that does not fit
    into memory: before the fit, which takes longer."""
    image = net.example[:1]
    batch = chunks(image.expand(IMAGES_PER_CHUNK, -1, -1, -1))[0]  # as in one pass
    for zoom in [zoom for zoom in config.zooms if zoom != 1]:
        fits = zoom_batch(net, batch, zoom, grad="softmax" not in net.linear)
        if fits < len(batch):
            pass_needs = f"zoom {zoom:g} needs memory for {len(batch)} images at once"
            raise ConfigError(f"{pass_needs}, {fits} fit: use a smaller zoom.")
        enlarged = IMAGES_PER_CHUNK * image.nbytes * zoom**2
        check_memory(
            enlarged, f"{IMAGES_PER_CHUNK} images at zoom {zoom:g}", "use a smaller zoom", net.device
        )
        zoomed(net, image, zoom)


class CalibrationSet:
    """Logits of images and of their backgrounds, over all processes, in the order of the data.

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
        scores = [logits(each.to(device)).double().cpu() for each in rows]
        parts = all_gather((*scores, shown_classes, features.positions()[usable]))
        width = max(part[2].shape[1] for part in parts)
        shown = [torch.nn.functional.pad(part[2], (0, width - part[2].shape[1]), value=-1) for part in parts]
        order = torch.cat([part[3] for part in parts]).argsort()  # the same for any number of processes
        self.images, self.alone = (torch.cat([part[i] for part in parts])[order] for i in (0, 1))  # (n, C)
        index = torch.cat(shown)[order]
        marks = torch.zeros(len(index), classes + 1, dtype=torch.bool)
        self.shown = marks.scatter_(1, index.where(index >= 0, classes), True)[:, :classes]  # (n, C)

    def map_scale(self) -> LogitScale | None:
        """Return the scale that tells images of a class from their own backgrounds, both counting half: the
        typical image has a probability of 0.9, the typical background 0.1."""
        cases = weighted_cases([(1, self.images[self.shown])], [(1, self.alone[self.shown])])
        return _fit(cases, MAP_SMOOTHING)

    def evidence_scale(self, chosen: Tensor | None = None) -> LogitScale | None:
        """Return the scale for the question of `evidence_cases`, of all images or the chosen ones (n,)."""
        return _fit(self._evidence_cases(self.images, self.alone, chosen))

    def evidence_quality(self, seed: int) -> EvidenceQuality | None:
        """Return how reliable calibrated evidence is; None if half of the images cannot be calibrated on.

        No image is judged by numbers that were fitted on it (2-fold cross-fitting): the scale and shift that
        are fitted on one half of the images give the evidence of the other half, and the other way round.
        """
        first = self._halves(seed)
        by_first, by_second = self.evidence_scale(first), self.evidence_scale(~first)
        if by_first is None or by_second is None:
            return None
        images, alone = self.images.clone(), self.alone.clone()
        for half, scale in ((~first, by_first), (first, by_second)):
            images[half], alone[half] = scale(images[half]).sigmoid(), scale(alone[half]).sigmoid()
        return EvidenceQuality(
            len(images),
            calibration(*self._evidence_cases(images, alone)),
            100 * float((images[self.shown] > 0.5).double().mean()),
            100 * float((alone > 0.5).any(1).double().mean()),
        )

    def _halves(self, seed: int) -> Tensor:
        """Return a mask (n,) of one half of the images, drawn at random, with half of each class."""
        order = torch.randperm(len(self.shown), generator=torch.Generator().manual_seed(seed))
        order = order[self.shown.byte().argmax(1)[order].argsort(stable=True)]
        mask = torch.zeros(len(order), dtype=torch.bool)
        mask[order[::2]] = True
        return mask

    def _evidence_cases(self, images: Tensor, alone: Tensor, chosen: Tensor | None = None) -> Cases:
        """Return the scores (n, C) of images and backgrounds as the cases of the question that evidence
        answers."""
        shown = self.shown
        if chosen is not None:
            images, alone, shown = images[chosen], alone[chosen], shown[chosen]
        return evidence_cases(images, shown, alone)


def _fit(cases: Cases, smoothing: float = 0.0) -> LogitScale | None:
    return fit_scale(*cases, smoothing) if len(cases[0]) else None
