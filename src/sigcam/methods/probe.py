"""Probe: what a CAM method may ask about a batch; the scores that maps explain; resizing and scaling of
maps."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.targets import (
    Branch,
    Target,
    at_least_float32,
    branch_logits,
    class_score,
    finer_score,
    nearest_classes,
)
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight

VARIANTS = 2**24  # numbers in the altered features of one pass, unless batch_size says how many variants


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Products inside stay in the precision of their factors, whatever autocast is on around."""
    return torch.autocast(tensor.device.type, enabled=False)


class Probe:
    """One passage of a batch, K classes per image, one branch; each answer is computed when first asked for.

    Axes are (B, K, N, P, Q), of size 1 where an answer does not depend on one.

    Args:
        classes: (B, K).
        batch_size: images, or variants of features, that `rescore` is to be given at a time.
        top_n: how many channels a perturbation method may try.
    """

    def __init__(
        self,
        net: DualBranch,
        passage: ForwardPass,
        *,
        branch: Branch,
        classes: Tensor,
        target: Target = class_score,
        batch_size: int | None = None,
        top_n: int | None = None,
    ) -> None:
        self.net, self.passage, self.branch, self.classes, self.target = net, passage, branch, classes, target
        self.batch_size, self.top_n = batch_size, top_n

    @cached_property
    def features(self) -> Tensor:
        """F (B, 1, N, P, Q), at least float32."""
        return at_least_float32(self.passage.features.detach())[:, None]

    @property
    def cells(self) -> int:
        """P x Q."""
        return self.features.shape[-2] * self.features.shape[-1]

    @cached_property
    def logits(self) -> Tensor:
        """(B, C) logits of the branch."""
        return branch_logits(self.passage, self.branch)

    @cached_property
    def scores(self) -> Tensor:
        """(B, K) what the maps explain."""
        return self._scores(self.logits)

    @property
    def linear(self) -> bool:
        """Whether the logits are a linear function of the features' mean over the grid (Eq. 3)."""
        source = "sigmoid" if self.branch == "sigmoid" else "softmax"
        return source in self.net.linear and self.passage.point == self.net.split.point

    @cached_property
    def last_weight(self) -> Tensor:
        """W (C, N) of a head that is global average + linear (Eq. 3)."""
        source: Literal["softmax", "sigmoid"] = "sigmoid" if self.branch == "sigmoid" else "softmax"
        found = linear_weight(self.net.last_layer(source)) if self.linear else None
        if found is None:
            raise DataError(
                f"this method reads the last layer's weights, and the {source} head of "
                f"{type(self.net.model).__name__} is not global average pooling + linear on its features. "
                "Use 'grad-cam', which needs no such form."
            )
        weight = at_least_float32(found[0].detach())  # (C, N)
        return weight - weight.mean(0) if self.branch == "centred" else weight

    @cached_property
    def head_weight(self) -> Tensor:
        """(B, K, N), or (1, K, N) if the same for all images: the score's derivative by each channel's mean,
        of a head that is global average + linear; for a class's own logit, its row of the last layer."""
        weight = self.last_weight
        if self.target is class_score and len(weight) > 1:
            same = bool((self.classes == self.classes[:1]).all())
            return weight[self.classes[:1] if same else self.classes]
        logits = at_least_float32(self.logits.detach()).requires_grad_()
        with torch.enable_grad():
            columns = [_derivative(score, logits) for score in self._columns(logits)]  # each (B, C)
        with no_autocast(weight):
            return torch.stack(columns, 1) @ weight

    @cached_property
    def grads(self) -> Tensor:
        """d scores / d F, (B, K, N, P, Q), at least float32: of the sum over the batch, so that images stay
        independent. Where it is the same for all cells, a view that repeats one."""
        if self.linear:
            shape = self.features.shape
            per_cell = self.head_weight[..., None, None] / self.cells
            return per_cell.expand(shape[0], -1, -1, shape[3], shape[4])
        with torch.enable_grad():
            gradients = [_derivative(score, self.passage.cut) for score in self._columns(self.logits)]
        fold, image = self.passage.point.fold, self.passage.image
        return torch.stack([at_least_float32(fold(gradient, image)) for gradient in gradients], 1)

    @cached_property
    def mean_grads(self) -> Tensor:
        """The gradients' mean over the grid, (B, K, N, 1, 1)."""
        if self.linear:
            return self.head_weight[..., None, None] / self.cells
        return self.grads.mean((-2, -1), keepdim=True)

    @cached_property
    def ablated(self) -> Tensor:
        """(B, K, N) the scores with each channel of F set to zero, in float64, since one channel of many
        changes little: in closed form if the head is global average + linear, else by re-running what
        follows F."""
        features = self.features[:, 0]
        count, channels = features.shape[:2]
        scores = torch.empty(
            count, self.classes.shape[1], channels, dtype=torch.float64, device=features.device
        )
        some = self.batch_size or max(1, VARIANTS // features[0].numel())
        for i in range(count):
            for part in torch.arange(channels, device=features.device).split(some):
                if self.linear:
                    lost = features[i, part].mean((1, 2))[:, None] * self.last_weight[:, part].T  # (R, C)
                    logits = self.logits[i].detach().double() - lost
                    scores[i, :, part] = self._scores_of(i, logits).T
                else:
                    variants = features[i].repeat(len(part), 1, 1, 1)
                    variants[torch.arange(len(part)), part] = 0
                    scores[i, :, part] = self.rescore(i, features=variants).double().T
        return scores

    def rescore(self, index: int, *, images: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """(R, K) scores of image `index` had it been R other images, or had R other features (R, N, P, Q)."""
        if images is not None:
            altered = self.net.run(images)
        else:
            assert features is not None
            altered = self.net.rescore(self.passage, index, features)
        return self._scores_of(index, at_least_float32(branch_logits(altered, self.branch)))

    def _scores_of(self, index: int, logits: Tensor) -> Tensor:
        """(R, K) scores of R altered logits (R, C) of image `index`."""
        return self._scores(logits, torch.full((len(logits),), index, device=logits.device))

    def _scores(self, logits: Tensor, of: Tensor | None = None) -> Tensor:
        if self.target is class_score and logits.shape[1] > 1:
            return logits.gather(1, self.classes if of is None else self.classes[of])
        return torch.stack(self._columns(logits, of), 1)

    def _columns(self, logits: Tensor, of: Tensor | None = None) -> list[Tensor]:
        """The scores of each image's first class, second class, ...; `of` (R,) tells whose logits these
        are."""
        scores = []
        for k, column in enumerate((self.classes if of is None else self.classes[of]).unbind(1)):
            if self.target is finer_score:  # the unaltered image's rivals, or scores would not compare
                scores.append(
                    finer_score(logits, column, self.rivals[k] if of is None else self.rivals[k][of])
                )
            else:
                scores.append(self.target(logits, column))
        if scores[0].shape != (len(logits),):
            raise DataError(
                f"target returned {tuple(scores[0].shape)} for logits {tuple(logits.shape)}: it must give "
                "one score per image, (B,)."
            )
        return scores

    @cached_property
    def rivals(self) -> list[Tensor]:
        """For each image's first class, second class, ... the (B, 3) classes that are most like it."""
        return [nearest_classes(self.logits.detach(), column) for column in self.classes.unbind(1)]


def _derivative(score: Tensor, by: Tensor) -> Tensor:
    """d sum(score) / d by; zero where the score does not depend on it."""
    if not score.requires_grad:
        raise DataError("the target's score does not depend on the logits by any step that has a derivative.")
    (gradient,) = torch.autograd.grad(at_least_float32(score).sum(), by, retain_graph=True, allow_unused=True)
    return torch.zeros_like(by) if gradient is None else gradient
