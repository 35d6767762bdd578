"""The class-balanced loss (Eq. 12), its weights and its targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.errors import DataError


def balanced_bce(logits: Tensor, labels: Tensor, pos_weight: float | Tensor | None = None) -> Tensor:
    """Eq. 12: mean binary cross-entropy over B x C, positives weighted C - 1.

    Args:
        labels: (B,) class indices, or (B, C) with 1 for each class that is present.
        pos_weight: another weight, or one per class. With one logit the default is negatives / positives
            among the labels.
    """
    classes = logits.shape[1]
    targets = as_targets(labels, classes)
    if pos_weight is None:
        pos_weight = pos_weights("balanced", targets.sum(0), len(targets))
    weight = torch.as_tensor(pos_weight, dtype=logits.dtype, device=logits.device)
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), pos_weight=weight)


def pos_weights(given: float | str, positives: Tensor, images: int) -> Tensor:
    """(C,) weight of a positive label of each class: a number for all; "balanced", C - 1; or "counts",
    negatives / positives, which "balanced" is for one logit too."""
    classes = len(positives)
    if given == "counts" or (given == "balanced" and classes == 1):
        positives = positives.double()
        usable = (positives > 0) & (positives < images)
        return torch.where(usable, (images - positives) / positives.clamp(min=1), 1.0)
    value = classes - 1.0 if given == "balanced" else float(given)
    return torch.full((classes,), value, dtype=torch.float64)


def positives_of(labels: Tensor, classes: int) -> Tensor:
    """(C,) how many of the images show each class, from (B,) indices or (B, C) zeros and ones."""
    if labels.ndim == 2:
        return labels.long().sum(0)
    if classes == 1:
        return (labels == 1).sum()[None]
    return labels[labels >= 0].long().bincount(minlength=classes)


def as_targets(labels: Tensor, classes: int) -> Tensor:
    """Labels as (B, C) zeros and ones; with one logit, labels are 0 and 1."""
    check_labels(labels, classes)
    if labels.ndim == 2 and labels.shape[1] == classes:
        return labels
    labels = labels.long()
    return labels[:, None] if classes == 1 else F.one_hot(labels, classes)


def check_labels(labels: Tensor, classes: int) -> None:
    """DataError unless labels are (B,) indices of the classes, or (B, C) zeros and ones."""
    if labels.ndim == 2 and labels.shape[1] == classes:
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError("labels of shape (B, C) must be 0 or 1: which classes are present.")
        return
    if labels.ndim != 1 or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        raise DataError(
            f"labels must be (B,) class indices or (B, {classes}) zeros and ones, not {tuple(labels.shape)}."
        )
    most = max(classes, 2) - 1  # one logit tells two classes apart
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) > most):
        raise DataError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, the classifier's classes from 0 "
            f"to {most}."
        )
