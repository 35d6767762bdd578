"""Probe: what a CAM method may ask about a batch; the scores that maps explain; resizing and scaling of
maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.dual import DualBranch, Passage, gap_weight
from sigcam.errors import DataError
from sigcam.trace import Size

Branch = Literal["sigmoid", "softmax", "centred"]
Target = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), classes (B,) -> scores (B,)


def full(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it came so: maps are never computed in half precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def class_score(logits: Tensor, classes: Tensor) -> Tensor:
    """The class's own logit, (B,); with one logit, class 1 is that logit and class 0 its negative."""
    if logits.shape[1] == 1:
        return logits[:, 0] * (2 * classes - 1)
    return logits.gather(1, classes[:, None])[:, 0]


def branch_logits(passage: Passage, branch: Branch) -> Tensor:
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


class Probe:
    """One passage of a batch, one class per image, one branch; each answer is computed when first asked
    for."""

    def __init__(
        self,
        net: DualBranch,
        passage: Passage,
        *,
        branch: Branch,
        classes: Tensor,
        target: Target = class_score,
    ) -> None:
        self.net, self.passage, self.branch, self.classes, self.target = net, passage, branch, classes, target

    @cached_property
    def features(self) -> Tensor:
        """F (B, N, P, Q), at least float32."""
        return full(self.passage.features.detach())

    @cached_property
    def logits(self) -> Tensor:
        """(B, C) logits of the branch."""
        return branch_logits(self.passage, self.branch)

    @cached_property
    def scores(self) -> Tensor:
        """(B,) what the maps explain."""
        return self.target(self.logits, self.classes)

    @cached_property
    def grads(self) -> Tensor:
        """d scores / d F, (B, N, P, Q), float32; of the sum over the batch, so that images stay
        independent."""
        (gradient,) = torch.autograd.grad(full(self.scores).sum(), self.passage.cut, retain_graph=True)
        return full(self.net.split.fold(gradient, self.passage.image))

    @cached_property
    def head_weight(self) -> Tensor:
        """Rows of the last layer for the classes, (B, N), of a head that is global average + linear (Eq.
        3)."""
        source: Literal["softmax", "sigmoid"] = "sigmoid" if self.branch == "sigmoid" else "softmax"
        found = gap_weight(self.net.last_layer(source)) if source in self.net.linear else None
        if found is None:
            raise DataError(
                f"'cam' reads the last layer's weights, and the {source} head of "
                f"{type(self.net.model).__name__} is not "
                "global average pooling + linear on its features. Use 'grad-cam', which needs no such form."
            )
        weight = full(found[0].detach())  # (C, N)
        if self.branch == "centred":
            weight = weight - weight.mean(0)
        if len(weight) == 1:
            return weight * (2 * self.classes[:, None] - 1)
        return weight[self.classes]


def resize(maps: Tensor, size: Size, mode: Literal["bicubic", "bilinear"]) -> Tensor:
    """(B, P, Q) to (B, H, W), pixel centres aligned as OpenCV does."""
    if maps.shape[-2:] == size:
        return maps
    return F.interpolate(maps[:, None], size, mode=mode, align_corners=False)[:, 0]


def unit_range(maps: Tensor, eps: float = 0.0) -> Tensor:
    """Each map's minimum to 0 and maximum to 1; a map that is constant or not finite becomes all zero."""
    flat = maps.flatten(1)
    low, high = flat.amin(1)[:, None, None], flat.amax(1)[:, None, None]
    usable = torch.isfinite(flat).all(1)[:, None, None] & (high > low)
    span = torch.where(usable, high - low + eps, 1.0)
    return torch.where(usable, (maps - low) / span, 0.0)
