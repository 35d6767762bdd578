"""Targets: the scalar that a map explains, from the logits of a branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.network.dual import ForwardPass

Branch = Literal["sigmoid", "softmax", "centred"]


Target = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), classes (B,) -> scores (B,)


TargetName = Literal["class", "probability", "finer-cam"]


def class_score(logits: Tensor, classes: Tensor) -> Tensor:
    """The class's own logit, (B,); with one logit, class 1 is that logit and class 0 its negative."""
    if logits.shape[1] == 1:
        return logits[:, 0] * (2 * classes - 1)
    return logits.gather(1, classes[:, None])[:, 0]


def sigmoid_score(logits: Tensor, classes: Tensor) -> Tensor:
    """The class's own probability, (B,), judged by itself."""
    return class_score(logits, classes).sigmoid()


def softmax_score(logits: Tensor, classes: Tensor) -> Tensor:
    """The class's probability among all, (B,)."""
    return sigmoid_score(logits, classes) if logits.shape[1] == 1 else class_score(logits.softmax(1), classes)


def finer_score(logits: Tensor, classes: Tensor, rivals: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """The class's logit minus `alpha` times the mean logit, weighted by probability, of the classes most
    like it (Finer-CAM; Zhang et al., 2025): what tells it from those.

    Args:
        rivals: (B, R) those classes; by default what `nearest_classes` gives.
    """
    rivals = nearest_classes(logits, classes) if rivals is None else rivals
    own, share = logits.gather(1, classes[:, None])[:, 0], logits.softmax(1).gather(1, rivals)
    return own - alpha * (share * logits.gather(1, rivals)).sum(1) / (share.sum(1) + 1e-9)


def nearest_classes(logits: Tensor, classes: Tensor, count: int = 3) -> Tensor:
    """(B, count) the other classes whose logits are nearest to the class's."""
    if logits.shape[1] == 1:
        raise DataError("target='finer-cam' compares a class with others, and this classifier has one logit.")
    distance = (logits - logits.gather(1, classes[:, None])).detach().abs()
    distance = distance.scatter(1, classes[:, None], float("inf"))
    return distance.topk(min(count, logits.shape[1] - 1), dim=1, largest=False).indices


def as_target(target: Target | TargetName, branch: Branch) -> Target:
    """The function behind a target's name, for the branch; a function is passed on."""
    if callable(target):
        return target
    probability = sigmoid_score if branch == "sigmoid" else softmax_score
    known = {"class": class_score, "probability": probability, "finer-cam": finer_score}
    if target not in known:
        raise DataError(f"unknown target {target!r}: there are {', '.join(known)}, or give a function.")
    return known[target]


def branch_logits(passage: ForwardPass, branch: Branch) -> Tensor:
    """(B, C) logits of the branch; "centred" is the softmax head with the mean over classes taken off."""
    if branch == "sigmoid":
        return passage.sigmoid
    logits = passage.softmax_logits
    if branch == "softmax":
        return logits
    if logits.shape[1] == 1:
        raise DataError(
            "branch='centred' takes the mean over classes off, and this classifier has one logit."
        )
    return logits - logits.mean(1, keepdim=True)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it came so: maps are never computed in half precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
