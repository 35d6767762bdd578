"""Targets: the scalar that a map explains, computed from the logits of a branch."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.errors import ConfigError
from sigcam.network.dual import ForwardPass

Branch = Literal["sigmoid", "softmax", "centred"]
Target = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), classes (B,) -> scores (B,)
TargetName = Literal["class", "probability", "finer-cam"]


def class_logits(logits: Tensor) -> Tensor:
    """Return one logit per class: (B, C), or (B, 2) for a single logit, whose negative is that of class 0."""
    return logits if logits.shape[1] > 1 else torch.cat([-logits, logits], 1)


def class_score(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the class's logit, (B,)."""
    return class_logits(logits).gather(1, classes[:, None])[:, 0]


def sigmoid_score(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the sigmoid of the class's logit, (B,)."""
    return class_score(logits, classes).sigmoid()


def softmax_score(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the class's softmax probability, (B,)."""
    return sigmoid_score(logits, classes) if logits.shape[1] == 1 else class_score(logits.softmax(1), classes)


def finer_score(logits: Tensor, classes: Tensor, rivals: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """Return the class's logit minus `alpha` times the mean logit, weighted by probability, of the most
    similar classes, (B,) (Finer-CAM; Zhang et al., 2025).

    Args:
        rivals: (B, R) the similar classes; by default those of `nearest_classes`.
    """
    rivals = nearest_classes(logits, classes) if rivals is None else rivals
    score, share = logits.gather(1, classes[:, None])[:, 0], logits.softmax(1).gather(1, rivals)
    return score - alpha * (share * logits.gather(1, rivals)).sum(1) / (share.sum(1) + 1e-9)


def nearest_classes(logits: Tensor, classes: Tensor, count: int = 3) -> Tensor:
    """Return (B, count) the other classes whose logits are nearest to the class's."""
    if logits.shape[1] == 1:
        raise ConfigError("target='finer-cam' compares a class with others; this classifier has one logit.")
    distance = (logits - logits.gather(1, classes[:, None])).detach().abs()
    distance = distance.scatter(1, classes[:, None], float("inf"))
    return distance.topk(min(count, logits.shape[1] - 1), dim=1, largest=False).indices


def as_target(target: Target | TargetName, branch: Branch) -> Target:
    """Return the target's function; a name may stand for different functions on different branches."""
    if callable(target):
        return target
    probability = sigmoid_score if branch == "sigmoid" else softmax_score
    known = {"class": class_score, "probability": probability, "finer-cam": finer_score}
    if target not in known:
        raise ConfigError(f"unknown target {target!r}: there are {', '.join(known)}, or give a function.")
    return known[target]


def head_of(branch: Branch) -> Literal["softmax", "sigmoid"]:
    """Return the head that a branch reads; "centred" reads the softmax head."""
    return "sigmoid" if branch == "sigmoid" else "softmax"


def branch_logits(forward_pass: ForwardPass, branch: Branch) -> Tensor:
    """Return (B, C) logits of the branch; "centred" subtracts the mean over classes from softmax logits."""
    if branch == "sigmoid":
        return forward_pass.sigmoid
    logits = forward_pass.softmax_logits
    if branch == "softmax":
        return logits
    if logits.shape[1] == 1:
        raise ConfigError("branch='centred' subtracts the mean over classes; this classifier has one logit.")
    return logits - logits.mean(1, keepdim=True)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, in which maps are computed; keep float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
