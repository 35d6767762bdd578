"""BranchCalibration: from a branch's logits to probabilities, one scale and one shift for each question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigcam.core.errors import ConfigError


@dataclass(frozen=True)
class LogitScale:
    """The probability of a logit z is sigmoid(scale z + shift)."""

    scale: float = 1.0
    shift: float = 0.0

    @classmethod
    def checked(cls, scale: float, shift: float) -> LogitScale:
        """Return the scale; ValueError if probabilities would not rise with the logit."""
        scale, shift = float(scale), float(shift)
        if not (0 < scale < math.inf and math.isfinite(shift)):
            raise ValueError(f"a scale of {scale:g} and a shift of {shift:g}")
        return cls(scale, shift)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits."""
        return logits * self.scale + self.shift


@dataclass(frozen=True)
class BranchCalibration:
    """The scales of a fitted branch.

    Args:
        evidence: for the score of an image: does it show the class? (`evidence_cases`)
        maps: for the score of a cell, by enlargement of the image: is it part of the class, rather than
            background?
    """

    evidence: LogitScale = LogitScale()
    maps: Mapping[float, LogitScale] = field(default_factory=dict)

    def map_scale(self, zoom: float) -> LogitScale:
        """Return the scale of maps at this enlargement; ConfigError says how to add one that is missing."""
        for known, scale in self.maps.items():
            if math.isclose(known, zoom, rel_tol=1e-6):
                return scale
        sizes = ",".join(f"{size:g}" for size in sorted({1.0, zoom, *self.maps}))
        raise ConfigError(
            f"this branch is not calibrated for maps in probabilities at zoom {zoom:g}: fit it again with "
            f"`sigcam fit --background auto --zooms {sizes}`, or draw them with scale='logit'."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        maps = {f"{zoom:g}": [each.scale, each.shift] for zoom, each in self.maps.items()}
        return {"evidence": [self.evidence.scale, self.evidence.shift], "maps": maps}

    @staticmethod
    def from_json(values: Any) -> BranchCalibration:
        """Return what `to_json` wrote; ValueError for anything else."""
        try:
            maps = {float(zoom): LogitScale.checked(*pair) for zoom, pair in values["maps"].items()}
            return BranchCalibration(LogitScale.checked(*values["evidence"]), maps)
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(str(error)) from error


Cases = tuple[Tensor, Tensor, Tensor]  # scores, targets and weights (n,)


# How much each kind of absent class counts: any other class of an image, the best class of a background, the
# best other class of an image. More of the first lifts labels above one half, of the last keeps images of
# nothing below it.
EVIDENCE_SHARES = (6.0, 3.0, 2.0)


def evidence_cases(
    images: Tensor, shown: Tensor, alone: Tensor, shares: Sequence[float] = EVIDENCE_SHARES
) -> Cases:
    """Return the cases of the question that evidence answers. Half of them are images, asked about a class
    that they show. The others ask about classes that are not there, of three kinds (`EVIDENCE_SHARES`).

    Args:
        images, shown: scores (n, C) of images, and which classes they show.
        alone: scores (m, C) of backgrounds.
        shares: of the three kinds.
    """
    best_other = images.masked_fill(shown, -torch.inf).amax(1)
    best_other = best_other[best_other.isfinite()]  # none if the image shows all classes
    kinds = images[~shown], alone.amax(1), best_other
    return weighted_cases([(1, images[shown])], list(zip(shares, kinds, strict=True)))


def weighted_cases(
    positives: Sequence[tuple[float, Tensor]], negatives: Sequence[tuple[float, Tensor]]
) -> Cases:
    """Return groups of scores, each with the weight of the whole group, as cases: positives and negatives
    have equal total weights."""
    scores, targets, weights = [torch.empty(0)], [torch.empty(0)], [torch.empty(0)]
    for target, groups in ((1.0, positives), (0.0, negatives)):
        groups = [(share, group) for share, group in groups if len(group)]
        total = sum(share for share, _ in groups)
        for share, group in groups:
            scores.append(group)
            targets.append(torch.full_like(group, target))
            weights.append(torch.full_like(group, share / (total * len(group))))
    return torch.cat(scores), torch.cat(targets), torch.cat(weights)


def fit_scale(logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0) -> LogitScale | None:
    """Return the scale and shift of a weighted logistic regression of targets (n,) on logits (n,); None if
    the logits do not separate them.

    Targets are smoothed as by Platt (1999), so that the scale stays finite; given `smoothing`, they are at
    least so far from 0 and 1.
    """
    z, t, w = (each.double().flatten().cpu() for each in (logits, targets, weights))
    positives, negatives = float(t.sum()), float((1 - t).sum())
    if not positives or not negatives:
        return None
    t = torch.where(t > 0, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    t = t.clamp(smoothing, 1 - smoothing)
    w = w / w.sum()
    spread = z.std().clamp(min=1e-12)
    design = torch.stack([(z - z.mean()) / spread, torch.ones_like(z)], 1)
    v = torch.zeros(2, dtype=torch.float64)

    def loss(v: Tensor) -> Tensor:
        return (
            w * torch.nn.functional.binary_cross_entropy_with_logits(design @ v, t, reduction="none")
        ).sum()

    for _ in range(100):  # Newton's method, with steps halved until the loss falls
        p = (design @ v).sigmoid()
        gradient = design.T @ (w * (p - t))
        hessian = (design * (w * p * (1 - p))[:, None]).T @ design + 1e-12 * torch.eye(2, dtype=torch.float64)
        step, now = torch.linalg.solve(hessian, gradient), loss(v)
        while float(loss(v - step)) > float(now) + 1e-15 and float(step.abs().max()) > 1e-12:
            step = step / 2
        v = v - step
        if float(step.abs().max()) < 1e-10:
            break
    scale = float(v[0] / spread)
    return LogitScale(scale, float(v[1] - v[0] * z.mean() / spread)) if scale > 0 else None
