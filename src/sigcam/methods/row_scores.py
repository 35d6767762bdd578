"""Targets as pytorch-grad-cam takes them: classes, or functions of one image's output."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.targets import Target

NumpyArray = np.ndarray[Any, Any]
RowScore = Callable[[Tensor], Tensor]  # one image's output, of a classifier its logits (C,) -> one number
Targets = int | RowScore | Sequence[int | RowScore] | Tensor | NumpyArray | None


def parse_targets(targets: Targets, batch: int, classes: int) -> Tensor | list[RowScore] | None:
    """Return (B,) classes, or B functions of an image's logits; None for the prediction."""
    if targets is None:
        return None
    many = isinstance(targets, Sequence) or getattr(targets, "ndim", 0) > 0
    items: list[Any] = [*cast(Sequence[Any], targets)] if many else [targets] * batch
    if len(items) != batch:
        raise DataError(f"{len(items)} targets for {batch} image(s): give one for each, or one alone.")
    indices = [_class_index(item, classes) for item in items]
    if None not in indices:
        return torch.tensor(indices)
    if not all(map(callable, items)):
        raise DataError("targets are whole numbers, or functions of an image's logits, one per image.")
    return items


def _class_index(target: Any, classes: int) -> int | None:
    """Return the class if the target is its plain logit; None for any other target."""
    if type(target).__name__ == "ClassifierOutputTarget" and classes > 1:  # else it means the single logit
        target = target.category
    try:
        return operator.index(target)
    except TypeError:
        return None


def batch_target(targets: list[RowScore]) -> Target:
    """Combine targets, one per row, into a function of a batch's logits; a single one serves all rows."""

    def custom(logits: Tensor, classes: Tensor) -> Tensor:
        each = targets if len(targets) > 1 else targets * len(logits)
        return torch.stack([one_number(score(row)) for score, row in zip(each, logits, strict=True)])

    return custom


def one_number(score: Tensor) -> Tensor:
    """Return a target's score as a scalar tensor; DataError if it is no single number."""
    if not isinstance(score, Tensor) or score.numel() != 1:
        given = f"of shape {tuple(score.shape)}" if isinstance(score, Tensor) else f"{score!r:.80}"
        raise DataError(f"a target must give one number per image, as a tensor, not {given}.")
    return score.reshape(())
