"""Probe: what a CAM method may ask about a batch: features, scores, gradients, scores of altered inputs."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sigcam.core.errors import ConfigError
from sigcam.methods.targets import (
    Branch,
    Target,
    at_least_float32,
    branch_logits,
    class_score,
    finer_score,
    head_of,
    nearest_classes,
)
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight
from sigcam.network.pass_memory import smaller_batch

_REPORT = ContextVar[Callable[[float], None] | None]("report", default=None)
MAX_VARIANTS = 2**24  # numbers in the altered features of one pass, where batch_size is not given
MAX_KEPT = 2**26  # numbers that are kept of the passes of altered images


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Switch autocast off, so that products keep the precision of their factors."""
    return torch.autocast(tensor.device.type, enabled=False)


@contextmanager
def shares_reported(report: Callable[[float], None]) -> Iterator[None]:
    """Call `report` with the share of a batch that is done, while a slow method runs in the block."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def report_share(share: float) -> None:
    """Say that a method is done with this share of a batch."""
    report = _REPORT.get()
    if report is not None:
        report(share)


@dataclass(eq=False, repr=False)
class Probe:
    """One forward pass of a batch, seen from one branch, with K classes per image.

    Every property is computed on first use. Axes are (B, K, N, P, Q), with size 1 where a value does not
    depend on one.
    """

    net: DualBranch
    forward_pass: ForwardPass
    branch: Branch
    classes: Tensor  # (B, K)
    target: Target = class_score
    batch_size: int | None = None  # images, or variants of features, to give `rescore` at a time
    top_n: int | None = None  # channels that a perturbation method may try
    samples: int = 1  # masks, noises or steps

    @cached_property
    def features(self) -> Tensor:
        """F (B, 1, N, P, Q), at least float32."""
        return at_least_float32(self.forward_pass.features.detach())[:, None]

    @property
    def cells(self) -> int:
        """P x Q."""
        return self.features.shape[-2] * self.features.shape[-1]

    @cached_property
    def logits(self) -> Tensor:
        """(B, C) logits of the branch."""
        return branch_logits(self.forward_pass, self.branch)

    @cached_property
    def scores(self) -> Tensor:
        """(B, K) the target's scores, which the maps explain."""
        return self._scores(self.logits)

    @property
    def linear(self) -> bool:
        """Whether the logits are a linear function of the features' mean over the grid (Eq. 3)."""
        return head_of(self.branch) in self.net.linear and self.forward_pass.point == self.net.split.point

    @cached_property
    def last_weight(self) -> Tensor:
        """W (C, N) of a global average + linear head (Eq. 3)."""
        head = head_of(self.branch)
        layer = linear_weight(self.net.last_layer(head)) if self.linear else None  # W, b
        if layer is None:
            raise ConfigError(
                f"this method reads the last layer's weights, and the {head} head of "
                f"{type(self.net.model).__name__} is not global average pooling + linear on its features. "
                "Use 'grad-cam', which needs no such form."
            )
        weight = at_least_float32(layer[0].detach())  # (C, N)
        return weight - weight.mean(0) if self.branch == "centred" else weight

    @cached_property
    def head_weight(self) -> Tensor:
        """d scores / d mean of F, (B, K, N), or (1, K, N) if the same for all images; for global average +
        linear heads. For a class's logit, its row of the last layer."""
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
        """d scores / d F, (B, K, N, P, Q), at least float32. Of the sum over the batch, so that images stay
        independent. An expanded view if it is the same for all cells."""
        if self.linear:
            shape = self.features.shape
            return self.mean_grads.expand(shape[0], -1, -1, shape[3], shape[4])
        with torch.enable_grad():
            gradients = [_derivative(score, self.forward_pass.cut) for score in self._columns(self.logits)]
        fold, image = self.forward_pass.point.fold, self.forward_pass.image
        return torch.stack([at_least_float32(fold(gradient, image)) for gradient in gradients], 1)

    @cached_property
    def mean_grads(self) -> Tensor:
        """The gradients' mean over the grid, (B, K, N, 1, 1)."""
        if self.linear:
            return self.head_weight[..., None, None] / self.cells
        return self.grads.mean((-2, -1), keepdim=True)

    @property
    def is_flat(self) -> bool:
        """Whether the scores are a linear function of F, so that they have no second derivative."""
        return self.linear and self.target is class_score

    @cached_property
    def curvature(self) -> Tensor:
        """The Hessian of the scores by F, times F: (B, K, N, P, Q), at least float32."""
        if not self.linear:
            try:
                return self._hessian_products(self.forward_pass)
            except RuntimeError:  # fused attention has no second derivative
                with sdpa_kernel(SDPBackend.MATH):
                    images, point = self.forward_pass.images, self.forward_pass.point
                    return self._hessian_products(self.net.run_at((point,), images, grad=True)[0])
        weight, features = self.last_weight, self.features
        logits = at_least_float32(self.logits.detach()).requires_grad_()
        with no_autocast(weight):
            along = features[:, 0].mean((2, 3)) @ weight.T  # (B, C)
            with torch.enable_grad():
                columns = [_second_derivative(score, logits, along) for score in self._columns(logits)]
            product = torch.stack(columns, 1) @ weight / self.cells  # (B, K, N)
        return product[..., None, None].expand(*product.shape, *features.shape[-2:])

    def _hessian_products(self, forward_pass: ForwardPass) -> Tensor:
        """Return the Hessian of the scores of a pass by its F, times F; tokens before the grid stay as they
        are."""
        cut, fold, image = forward_pass.cut, forward_pass.point.fold, forward_pass.image
        along = fold.unfold(fold(cut.detach(), image), torch.zeros_like(cut))
        with torch.enable_grad():
            scores = self._columns(branch_logits(forward_pass, self.branch))
            products = [_second_derivative(score, cut, along) for score in scores]
        return torch.stack([at_least_float32(fold(product, image)) for product in products], 1)

    def of_images(self, images: Tensor) -> "Probe":
        """Return the probe of altered images, as many, for the same scores: rivals stay those of these."""
        forward_pass = self.net.run_at((self.forward_pass.point,), images, grad=not self.linear)[0]
        other = replace(self, forward_pass=forward_pass)
        if self.target is finer_score:
            other.rivals = self.rivals
        return other

    @cached_property
    def ablated(self) -> Tensor:
        """(B, K, N) the scores with each channel of F set to zero; in float64, since one channel changes
        little. In closed form for a global average + linear head, else by re-running what follows F."""
        features = self.features[:, 0]
        count, channels = features.shape[:2]
        scores = features.new_empty((count, self.classes.shape[1], channels), dtype=torch.float64)
        batch_size = self.batch_size or max(1, MAX_VARIANTS // features[0].numel())
        if self.batch_size and not self.linear:  # a variant takes no more than a pass of its image
            batch_size = smaller_batch(min(batch_size, channels), self.net, self.forward_pass.images)
        for i in range(count):
            for part in torch.arange(channels, device=features.device).split(batch_size):
                if self.linear:
                    lost = features[i, part].mean((1, 2))[:, None] * self.last_weight[:, part].T  # (R, C)
                    logits = self.logits[i].detach().double() - lost
                    scores[i, :, part] = self._scores(logits, i).T
                else:
                    variants = features[i].repeat(len(part), 1, 1, 1)
                    variants[torch.arange(len(part)), part] = 0
                    scores[i, :, part] = self.rescore(i, features=variants).double().T
        return scores

    def rescore(
        self,
        index: int,
        *,
        images: Tensor | None = None,
        features: Tensor | None = None,
        net: DualBranch | None = None,
    ) -> Tensor:
        """Return (R, K) scores of image `index` with R other images, by `net` if a faster copy is given, or
        with other features (R, N, P, Q)."""
        if images is not None:
            altered = self._altered(images, net or self.net)
        else:
            assert features is not None
            altered = self.net.rescore(self.forward_pass, index, features)
        return self._scores(at_least_float32(branch_logits(altered, self.branch)), index)

    def _altered(self, images: Tensor, net: DualBranch) -> ForwardPass:
        """Return the outputs for altered images, from what another branch has kept of the same ones."""
        kept = self.forward_pass.altered
        if kept is None:
            return net.run(images)
        data = images.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        key = hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()
        if key in kept:
            return self.net.reread(kept[key])
        altered = net.run(images)
        nothing = images.new_empty(0)
        if len(kept) * altered.pooled.numel() < MAX_KEPT:
            kept[key] = replace(altered, features=nothing, cut=nothing, images=nothing)
        return altered

    def image_logits(self, images: Tensor, net: DualBranch | None = None) -> Tensor:
        """Return (R, C) logits of the branch for other images, differentiable with respect to them; by `net`
        if a faster copy is given."""
        logits = branch_logits(forward_pass := (net or self.net).run_from_images(images), self.branch)
        if not forward_pass.features.requires_grad:
            kind = type(self.net.model).__name__
            raise ConfigError(f"no gradient passes from the images to the features of {kind}.")
        return at_least_float32(logits)

    def score_of(self, logits: Tensor, index: int, k: int) -> Tensor:
        """Return (R,) scores of image `index`'s k-th class, of its own logits or of others (R, C)."""
        score = self._scores(logits, index)[:, k]
        if torch.is_grad_enabled() and not score.requires_grad:
            raise ConfigError("the target is not differentiable with respect to the logits.")
        return score

    def _scores(self, logits: Tensor, index: int | None = None) -> Tensor:
        """Return (B, K) scores of the batch's logits, or (R, K) of R altered logits of image `index`."""
        if self.target is class_score and logits.shape[1] > 1:
            rows = slice(None) if index is None else [index] * len(logits)
            return logits.gather(1, self.classes[rows])
        return torch.stack(self._columns(logits, index), 1)

    def _columns(self, logits: Tensor, index: int | None = None) -> list[Tensor]:
        """Return the same by columns: the scores of each image's first class, second class and so on."""
        rows = slice(None) if index is None else [index] * len(logits)
        scores = []
        for k, column in enumerate(self.classes[rows].unbind(1)):
            if self.target is finer_score:  # the rivals of the unaltered image, or scores would not compare
                scores.append(finer_score(logits, column, self.rivals[k][rows]))
            else:
                scores.append(self.target(logits, column))
        if scores[0].shape != (len(logits),):
            what = f"target returned {tuple(scores[0].shape)} for logits {tuple(logits.shape)}"
            raise ConfigError(f"{what}: it must give one score per image, (B,).")
        return scores

    @cached_property
    def rivals(self) -> list[Tensor]:
        """For each image's first class, second class and so on, the (B, 3) most similar classes."""
        return [nearest_classes(self.logits.detach(), column) for column in self.classes.unbind(1)]


def _derivative(score: Tensor, by: Tensor) -> Tensor:
    """Return d sum(score) / d by; zero if the score does not depend on it."""
    if not score.requires_grad:
        raise ConfigError("the target is not differentiable with respect to the logits.")
    (gradient,) = torch.autograd.grad(at_least_float32(score).sum(), by, retain_graph=True, allow_unused=True)
    return torch.zeros_like(by) if gradient is None else gradient


def _second_derivative(score: Tensor, by: Tensor, along: Tensor) -> Tensor:
    """Return the Hessian of sum(score) by `by`, times `along`; zero if the gradient is constant."""
    if not score.requires_grad:
        raise ConfigError("the target is not differentiable with respect to the logits.")
    total = at_least_float32(score).sum()
    (gradient,) = torch.autograd.grad(total, by, create_graph=True, allow_unused=True)
    if gradient is None or not gradient.requires_grad:
        return torch.zeros_like(by)
    (product,) = torch.autograd.grad((gradient * along).sum(), by, retain_graph=True, allow_unused=True)
    return torch.zeros_like(by) if product is None else product
