"""DualBranch: a classifier with its own head untouched and a sigmoid branch beside it (Eq. 1-3, 11)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.calibration import BranchCalibration
from sigcam.network.compiled import (
    COMPILED_BATCH,
    MANY_IMAGES,
    CompiledOutputs,
    CompiledPass,
    compiled,
    is_faster,
)
from sigcam.network.feature_layer import FeaturePoint
from sigcam.network.hooks import GradMode, HookedPass, choose_grad_mode, fresh_autocast_cache
from sigcam.network.image_errors import blame_images
from sigcam.network.linear import constant_weights
from sigcam.network.output_tail import Tail
from sigcam.network.sigmoid_head import SigmoidHead
from sigcam.network.split import Split, find_split
from sigcam.network.trace import plain_layers

FeaturePoints = Sequence[FeaturePoint]
_BRANCHES: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Branches:
    """The outputs of both heads and the features they read, from one pass of the backbone."""

    softmax: Tensor  # (B, C) the model's own output
    sigmoid: Tensor  # (B, C) logits of the sigmoid branch
    features: Tensor  # F (B, N, P, Q)
    pooled: Tensor  # input of the sigmoid head's first trainable layer


@dataclass(frozen=True)
class ForwardPass(Branches):
    """Branches with the autograd graph from `cut`, the unfolded output of the layer at `point`."""

    cut: Tensor
    softmax_logits: Tensor  # (B, C) `softmax` before the activation with which the model may end
    images: Tensor  # (B, C, H, W) the model's input
    point: FeaturePoint
    altered: dict[str, ForwardPass] | None = None  # for altered images, by their hash, to be read again

    @property
    def image(self) -> GridSize:
        """Height and width of the images."""
        return GridSize.of(self.images)


class DualBranch(nn.Module):
    """A classifier and a sigmoid branch on the same features; one call gives both outputs.

    Only the sigmoid head is registered: `parameters()`, `train()` and `state_dict()` reach nothing else.
    Create one with `attach` or `load`.

    Args:
        model: the network to run; a private copy of `original` where that was optimised.
        requested: `head` and `layer` as passed to `attach`.
        softmax_tail: recomputes logits where the model returns probabilities.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        sigmoid: SigmoidHead,
        *,
        example: Tensor,
        original: nn.Module | None = None,
        requested: dict[str, str | None] | None = None,
        softmax_tail: Tail | None = None,
        transform: Callable[[Any], Tensor] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.sigmoid, self.split, self._example = sigmoid, split, example
        self.model = model
        self.original = original or model
        self.requested = requested or {"head": None, "layer": None}
        self.transform = transform
        self.class_names = tuple(class_names) if class_names else None
        self.fitted = False
        self.calibration = BranchCalibration()
        self.recipe: dict[str, Any] = {}
        self.warned = False  # whether the warning about an unfitted branch was given
        self.linear = frozenset[str]()  # branches whose logits are W mean(F) + b, found by `prepare`
        self._softmax_tail = softmax_tail
        self._grad_modes = dict[tuple[FeaturePoint, ...], GradMode]()
        self._native: DualBranch | None = None  # of a copy for other images: the one that takes the example
        self._joining = dict[FeaturePoint, bool]()
        self.compiled: CompiledPass | None = None  # for passes without gradients
        self._feature_points = {split.layer: split.point}
        self.eval()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "original", "transform", "_native"):  # not registered as submodules
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def head(self) -> nn.Module | tuple[nn.Module, ...]:
        """The softmax head's module; a tuple where the model combines several."""
        heads = tuple(self.model.get_submodule(name) for name in self.split.heads)
        return heads[0] if len(heads) == 1 else heads

    @property
    def layer(self) -> nn.Module:
        """The module whose output is F."""
        return self.model.get_submodule(self.split.layer)

    @property
    def classes(self) -> int:
        """Number of logits, C."""
        return self.split.classes

    @property
    def device(self) -> torch.device:
        """The device of the sigmoid branch, on which images are expected."""
        return next(self.sigmoid.parameters()).device

    @property
    def example(self) -> Tensor:
        """The (1, C, H, W) input that the branch was attached with, on the model's device."""
        return self._example.to(next(self.model.parameters()))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the example."""
        channels, height, width = self._example.shape[1:]
        return channels, height, width

    def last_layer(self, branch: Literal["softmax", "sigmoid"]) -> nn.Module:
        """The branch's output layer; the first of several."""
        name, head = self.split.last[0], self.split.heads[0]
        if branch == "softmax":
            return self.model.get_submodule(name)
        return self.sigmoid.copies[0].get_submodule(name[len(head) :].lstrip("."))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DualBranch:
        self.model._apply(fn, recurse)  # net.to(device) moves the model too
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, images: Tensor) -> Branches:
        """Return both branches; `.softmax` is bit-equal to the model's output in eval mode."""
        with blame_images(self, images):
            fp = self.run(images)
        return Branches(fp.softmax, fp.sigmoid, fp.features, fp.pooled)

    def evidence(self, logits: Tensor) -> Tensor:
        """Return the branch's logits as evidence in [0, 1]. If the branch was fitted with background, it is
        calibrated: at one half, the class is as likely shown as another class or background."""
        return self.calibration.evidence(logits).sigmoid()

    def run(self, images: Tensor, *, grad: bool = False) -> ForwardPass:
        """Run one pass. With `grad`, both heads' logits are differentiable with respect to `.cut`."""
        return self.run_at((self.split.point,), images, grad=grad)[0]

    def run_at(
        self, points: FeaturePoints, images: Tensor, *, grad: bool = False, swap: Tensor | None = None
    ) -> list[ForwardPass]:
        """Run one pass and return it once per feature point, with that point's `.features` and `.cut`. `swap`
        replaces the output at the (only) point."""
        recording = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad(), fresh_autocast_cache():
            mode = self.grad_mode(tuple(points)) if grad else GradMode()
            hooked = self._passed(points, images, grad=grad and mode.inline, forced=mode.forced, swap=swap)
            softmax = hooked.logits
            if grad and not mode.inline:
                hooked = self._hooked(points, images, grad=True, forced=mode.forced)
            with torch.set_grad_enabled(grad or recording), constant_weights() if grad else nullcontext():
                return self._read(hooked, softmax, images)

    def run_from_images(self, images: Tensor) -> ForwardPass:
        """Run one pass with logits that are differentiable with respect to the images; weights are constant,
        so the model's parameters get no gradient."""
        recording = torch.inference_mode(False), torch.enable_grad(), constant_weights()
        with recording[0], recording[1], recording[2], fresh_autocast_cache(), plain_layers():
            hooked = self._hooked((self.split.point,), images, whole=True)
            with hooked:  # it makes constants of the sigmoid branch's weights too
                return self._read(hooked, hooked.logits, images)[0]

    def _read(
        self, hooked: HookedPass | CompiledOutputs, softmax: Tensor, images: Tensor
    ) -> list[ForwardPass]:
        """Run the sigmoid branch after a pass of the model; return the whole once per feature point."""
        sigmoid, pooled = self.sigmoid(hooked.inputs)
        tail, size = self._softmax_tail, GridSize.of(images)
        logits = hooked.logits if tail is None else tail(hooked.outputs).reshape(-1, self.classes)
        return [
            ForwardPass(softmax.detach(), sigmoid, p.fold(cut, size), pooled, cut, logits, images, p)
            for p, cut in zip(hooked.points, hooked.cuts, strict=True)
        ]

    def rescore(self, forward_pass: ForwardPass, index: int, features: Tensor) -> ForwardPass:
        """Return the logits of image `index` with other features, (R, N, P, Q): what precedes F runs on the
        one image, what follows on all R."""
        point, image = forward_pass.point, forward_pass.images[index : index + 1]
        output = forward_pass.cut.detach().narrow(point.fold.batch_axis, index, 1)
        swap = point.fold.unfold(features, output)
        if not self._joins_batches(point, image, output):
            image = image.expand(len(features), -1, -1, -1)
        return self.run_at((point,), image, swap=swap)[0]

    def _joins_batches(self, point: FeaturePoint, image: Tensor, output: Tensor) -> bool:
        """Whether what follows F takes several features where all else saw one image; tried once, with two.
        It does not where a path around F has the batch's size."""
        if point not in self._joining:
            swap = torch.cat([output, output / 2], point.fold.batch_axis)
            (expected,) = self.run_at((point,), image.expand(2, -1, -1, -1), swap=swap)
            try:
                (joined,) = self.run_at((point,), image, swap=swap)
                self._joining[point] = _close(joined.softmax, expected.softmax)
            except Exception as error:  # any user network, any failure
                if is_out_of_memory(error):
                    raise
                self._joining[point] = False
        return self._joining[point]

    def with_features(self, forward_pass: ForwardPass, features: Tensor) -> ForwardPass:
        """Return the outputs of the images with other features, (B, N, P, Q), in place of their own; what
        precedes F runs on one image, unless a path around F needs them all."""
        point, images, cut = forward_pass.point, forward_pass.images, forward_pass.cut.detach()
        swap = point.fold.unfold(features, cut)
        if self._joins_batches(point, images[:1], cut.narrow(point.fold.batch_axis, 0, 1)):
            images = images[:1]
        return self.run_at((point,), images, swap=swap)[0]

    def _passed(
        self, points: FeaturePoints, images: Tensor, *, grad: bool, forced: bool, swap: Tensor | None
    ) -> HookedPass | CompiledOutputs:
        usual = not grad and swap is None and self._softmax_tail is None
        if usual and self.compiled is not None and self.compiled.takes(points, images):
            return self.compiled(images)
        return self._hooked(points, images, grad=grad, forced=forced, swap=swap)

    def _hooked(self, points: FeaturePoints, images: Tensor, **options: Any) -> HookedPass:
        hides_nan = getattr(self.model, "hides_nan", False) and not bool(images.isfinite().all())
        hooked = HookedPass(self.model, self.split, points, outputs=self._softmax_tail is not None, **options)
        with plain_layers() if hides_nan else nullcontext():
            return hooked.run(images)

    def feature_point(self, layer: str | nn.Module) -> FeaturePoint:
        """Return the point at which the features of another layer, given by name or itself, can be taken."""
        names = {module: name for name, module in self.model.named_modules()}
        name = layer if isinstance(layer, str) else names.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(self.model).__name__}.")
        if name not in self._feature_points:
            with torch.inference_mode(False), fresh_autocast_cache():
                head, example = self.requested["head"], self.example
                split, _ = find_split(self.model, head=head, layer=name, example=example)
            if split.heads != self.split.heads:
                head = ", ".join(self.split.heads)
                raise AttachError(f"layer={name!r} lies inside or after the head {head}: name one before it.")
            self._feature_points[name] = split.point
        return self._feature_points[name]

    def grad_mode(self, points: tuple[FeaturePoint, ...]) -> GradMode:
        """Return how autograd records from the points on; tried once, on the example."""
        if self._native is not None:
            return self._native.grad_mode(points)
        if points not in self._grad_modes:
            with torch.no_grad():
                plain = self._hooked(points, self.example)
                bits, logits = plain.bits(), plain.logits
                del plain  # the next pass needs the memory
                self._choose_grad_mode(points, bits, logits)
        return self._grad_modes[points]

    def _choose_grad_mode(self, points: tuple[FeaturePoint, ...], bits: bytes, logits: Tensor) -> None:
        exact = bits if self.model is self.original else None
        run = partial(self._hooked, points, self.example)
        self._grad_modes[points] = choose_grad_mode(run, exact, logits)

    @torch.no_grad()
    def prepare(self, *, grad: bool = False) -> Tensor:
        """Run the example, to find what the sigmoid branch reads and which branches are linear in F's mean;
        return its (1, C) logits. With `grad`, also find how autograd records from F on, which a network needs
        whose branches are not linear."""
        point = self.split.point
        hooked = self._hooked((point,), self.example)
        self.sigmoid.prepare(hooked.inputs)
        (forward_pass,) = self._read(hooked, hooked.logits, self.example)
        self.linear = frozenset(b for b in _BRANCHES if self._is_gap_linear(forward_pass, b))
        if grad and self.linear != {*_BRANCHES}:
            bits, logits = hooked.bits(), hooked.logits
            del hooked, forward_pass  # the next pass needs the memory
            self._choose_grad_mode((point,), bits, logits)
            return logits
        return forward_pass.softmax

    def _is_gap_linear(self, forward_pass: ForwardPass, branch: Literal["softmax", "sigmoid"]) -> bool:
        """Whether the branch's logits are its last layer's weight times F's mean over the grid (Eq. 3)."""
        weight = linear_weight(self.last_layer(branch))
        mean = forward_pass.features.mean((2, 3), dtype=torch.double).float()  # (B, N)
        if len(self.split.heads) > 1 or weight is None or weight[0].shape != (self.classes, mean.shape[1]):
            return False
        logits = forward_pass.softmax_logits if branch == "softmax" else forward_pass.sigmoid
        predicted = (mean @ weight[0].float().T + weight[1].float()).double()
        scale = logits.double().abs().max().clamp(min=1e-12)
        tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
        agrees = (predicted - logits.double()).abs().max() <= tolerance * scale
        return bool(agrees and weight[0].any())  # an all-zero head would agree with anything

    def reread(self, forward_pass: ForwardPass) -> ForwardPass:
        """Return a pass of another branch beside the same model with the logits of this branch instead."""
        with torch.set_grad_enabled(forward_pass.pooled.requires_grad), constant_weights():
            return replace(forward_pass, sigmoid=self.sigmoid.from_pooled(forward_pass.pooled))

    def with_model(self, model: nn.Module) -> DualBranch:
        """Return the same branch beside another model with the same module names, such as a finer copy."""
        other = copy.copy(self)
        other.model, other._native = model, self._native or self
        other.compiled = self.compiled if model is self.model else None
        return other

    def for_many(self, images: int) -> DualBranch:
        """Return the network for a job of so many images: an optimised copy is compiled if that is faster."""
        if images < MANY_IMAGES or self.model is self.original or self.compiled is not None:
            return self
        other, made = copy.copy(self), compiled(self.original, self.split, self.example)
        if made is None:
            return self
        point, batch = (self.split.point,), self.example.repeat(COMPILED_BATCH, 1, 1, 1)
        with torch.no_grad():
            pays = is_faster(
                lambda: made(batch), lambda: self._hooked(point, batch, grad=False, forced=False, swap=None)
            )
        other.compiled = made if pays else None
        return other

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the sigmoid branch, and what `load` needs to check that it fits, to a safetensors file."""
        from sigcam.network.branch_file import save_branch

        save_branch(self, Path(path), dtype)

    def push_to_hub(
        self,
        repo: str,
        *,
        model: str | None = None,
        license: str | None = None,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload the branch and a card to USER/REPO of the Hugging Face hub, which is made if there is none;
        return its address with the commit, hf://USER/REPO@COMMIT, for `load`.

        Args:
            model: the classifier as the commands name it, such as timm:resnet50; then the card shows how to
                open it.
            license: the licence to state in the card, such as "mit"; None states none.
            private: make a new repository private.
            token: a token that may write there; by default the one that `hf auth login` stored.
        """
        from sigcam.network.hub import push_branch

        return push_branch(self, repo, model=model, license=license, private=private, token=token)

    def __repr__(self) -> str:
        parts = f"layer={self.split.layer!r}, head={', '.join(self.split.heads)!r}"
        classes = f"{self.classes} {'logit' if self.classes == 1 else 'classes'}"
        state = "fitted" if self.fitted else "not fitted"
        return f"DualBranch({type(self.model).__name__}: {parts}, {classes}, {state})"


def _close(logits: Tensor, expected: Tensor) -> bool:
    """Whether both are equal up to the rounding of a low precision; another image's logits are far off."""
    logits, expected = logits.double(), expected.double()
    scale = float(expected.nan_to_num().abs().max().clamp(min=1e-12))
    return torch.allclose(logits, expected, rtol=0, atol=0.02 * scale, equal_nan=True)


def linear_weight(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(W (C, N), b (C,)) of a linear layer or 1x1 convolution; None for any other."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or weight[0, 0].numel() != 1:
        return None
    bias = getattr(layer, "bias", None)
    return weight.flatten(1), bias if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
