"""The class-balanced loss (Eq. 12), its weights and targets."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.errors import DataError


def balanced_bce(logits: Tensor, labels: Tensor, pos_weight: float | Tensor | None = None) -> Tensor:
    """Return the mean binary cross-entropy over B x C, positives weighted by C - 1 (Eq. 12).

    Args:
        labels: (B,) class indices, or (B, C) with 1 for each class that is present.
        pos_weight: another weight, or one per class. For one logit the default is negatives / positives
            of the labels.
    """
    classes = logits.shape[1]
    targets = as_targets(labels, classes)
    if pos_weight is None:
        pos_weight = pos_weights("balanced", targets.sum(0), len(targets))
    weight = torch.as_tensor(pos_weight, dtype=logits.dtype, device=logits.device)
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), pos_weight=weight)


def pos_weights(given: float | str, positives: Tensor, images: int) -> Tensor:
    """Return the (C,) weight of a positive label: a number; "balanced", C - 1; or "counts", negatives /
    positives of each class, which is what "balanced" means for one logit."""
    classes = len(positives)
    if given == "counts" or (given == "balanced" and classes == 1):
        positives = positives.double()
        usable = (positives > 0) & (positives < images)
        return torch.where(usable, (images - positives) / positives.clamp(min=1), 1.0)
    value = classes - 1.0 if given == "balanced" else float(given)
    return torch.full((classes,), value, dtype=torch.float64)


def positives_of(labels: Tensor, classes: int) -> Tensor:
    """Return the (C,) number of images of each class, from (B,) indices or (B, C) zeros and ones."""
    if labels.ndim == 2:
        return labels.long().sum(0)
    if classes == 1:
        return (labels == 1).sum()[None]
    return labels[labels >= 0].long().bincount(minlength=classes)


def as_targets(labels: Tensor, classes: int) -> Tensor:
    """Return labels as (B, C) zeros and ones; for one logit, labels are 0 and 1."""
    check_labels(labels, classes)
    if labels.ndim == 2 and labels.shape[1] == classes:
        return labels
    labels = labels.long()
    return labels[:, None] if classes == 1 else F.one_hot(labels, classes)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise DataError unless labels are (B,) class indices or (B, C) zeros and ones."""
    if labels.ndim == 2 and labels.shape[1] == classes:
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError("labels of shape (B, C) must be 0 or 1: which classes are present.")
        return
    if labels.ndim != 1 or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        shape = tuple(labels.shape)
        raise DataError(f"labels must be (B,) class indices or (B, {classes}) zeros and ones, not {shape}.")
    highest = max(classes, 2) - 1  # one logit separates two classes
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high > highest:
        raise DataError(f"labels run from {low} to {high}, the classifier's classes from 0 to {highest}.")
