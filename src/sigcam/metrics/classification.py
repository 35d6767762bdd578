"""Quality of the scores of independent classes: average precision, AUROC, calibration.

Written for all classes at once: for 1000 classes and 3000 images on one core, torchmetrics.functional takes
1.6 times as long for average precision, 1.3 for AUROC and 3.3 for calibration, and returns 0 with a warning
instead of NaN for a class without positives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Calibration:
    """A reliability diagram (mean score, share of positives and count of each bin) and the expected
    calibration error: the mean distance of score and share, weighted by counts. Where cases have weights,
    they enter all means, and `count` is each bin's share of the total weight."""

    score: tuple[float, ...]
    share: tuple[float, ...]
    count: tuple[float, ...]
    error: float


@dataclass(frozen=True)
class Quality:
    """Quality of a branch's scores on held-out images: of each class, NaN without images of it, or of the
    absence and presence of one logit; calibration over all classes."""

    images: int
    average_precision: tuple[float, ...]
    auroc: tuple[float, ...]
    calibration: Calibration
    shifted: Calibration  # with log(pos_weight) subtracted from the logits

    @property
    def mean_average_precision(self) -> float:
        """Mean over the classes that are not NaN."""
        return float(torch.tensor(self.average_precision).nanmean())

    @property
    def mean_auroc(self) -> float:
        """Mean over the classes that are not NaN."""
        return float(torch.tensor(self.auroc).nanmean())


@dataclass(frozen=True)
class EvidenceQuality:
    """How well calibrated evidence answers its question on held-out images: half of the cases show the class;
    the others, in the proportion 6 : 3 : 2, are any other class of an image, the best class of a background
    and the best other class of an image.

    Args:
        images: held-out images that have a background; the others are left out.
        reliability: of the evidence, weighted as the question says.
        label_above_half: percent of these images' labels whose evidence is above one half.
        background_above_half: percent of their backgrounds on which any class's evidence is.
    """

    images: int
    reliability: Calibration
    label_above_half: float
    background_above_half: float


def quality_of(logits: Tensor, targets: Tensor, pos_weight: Tensor) -> Quality:
    """The quality of logits (B, C) of held-out images with targets (B, C)."""
    shifted = logits - pos_weight.log().to(logits)
    return Quality(
        len(logits),
        tuple(average_precision(*both_ways(logits, targets)).tolist()),
        tuple(auroc(*both_ways(logits, targets)).tolist()),
        calibration(logits.sigmoid(), targets),
        calibration(shifted.sigmoid(), targets),
    )


def both_ways(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Unchanged; one logit becomes two columns, for its absence and its presence."""
    if logits.shape[1] > 1:
        return logits, targets
    return torch.cat([-logits, logits], 1), torch.cat([1 - targets, targets], 1)


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Average precision (C,) of scores and targets (B, C), equal scores taken together; NaN for a class
    without positives."""
    hits, ranks, last = _ranked(scores, targets)
    precision = hits / ranks  # (B, C), correct at the last of equal scores
    gained = torch.where(last, hits, 0.0).cummax(0).values.diff(dim=0, prepend=torch.zeros_like(hits[:1]))
    return (precision * gained).sum(0) / hits[-1]


def auroc(scores: Tensor, targets: Tensor) -> Tensor:
    """Area under the ROC curve (C,) of scores and targets (B, C); NaN for a class without positives or
    negatives."""
    hits, ranks, last = _ranked(scores, targets)
    misses = ranks - hits
    at = [torch.where(last, x, 0.0).cummax(0).values for x in (hits, misses)]
    rise, run = (torch.diff(x, dim=0, prepend=torch.zeros_like(x[:1])) for x in at)
    area = (run * (at[0] - rise / 2)).sum(0)
    return area / (hits[-1] * misses[-1])


def _ranked(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cumulative positives and images from the highest score down, and whether the next score is lower."""
    ordered, order = scores.double().sort(0, descending=True)
    hits = targets.double().gather(0, order).cumsum(0)
    ranks = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)[:, None]
    last = torch.ones_like(hits, dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    return hits, ranks.expand_as(hits), last


def calibration(scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Calibration:
    """Calibration of probabilities (B, C), over all classes and images; `weights` (B, C) tell how much each
    counts, by default the same."""
    flat, truth = scores.double().flatten(), targets.double().flatten()
    bins = (flat * BINS).long().clamp(max=BINS - 1)
    if weights is None:
        count = bins.bincount(minlength=BINS)
    else:
        weight = weights.double().flatten() / weights.double().sum()
        count = bins.bincount(weight, BINS)
        flat, truth = weight * flat, weight * truth
    sums = [torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, x) for x in (flat, truth)]
    score, share = (total / count.where(count > 0, 1) for total in sums)
    error = ((score - share).abs() * count).sum() / (max(len(flat), 1) if weights is None else 1)
    return Calibration(tuple(score.tolist()), tuple(share.tolist()), tuple(count.tolist()), float(error))
