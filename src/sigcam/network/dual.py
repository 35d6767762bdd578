"""A network with two heads: the user's own, untouched, and a sigmoid branch beside it (Eq. 1-3, 11)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError, CheckpointError
from sigcam.core.files import write_atomic
from sigcam.core.types import GridSize
from sigcam.models.state_dict import fingerprint
from sigcam.network.hooks import HookedPass, fresh_autocast_cache
from sigcam.network.layout import FeaturePoint
from sigcam.network.output_tail import Tail
from sigcam.network.sigmoid_head import SigmoidHead
from sigcam.network.split import Split, find_split


@dataclass(frozen=True)
class Branches:
    """What one pass of the backbone gives: both heads' outputs, and the features they read."""

    softmax: Tensor  # (B, C) what the model itself returns
    sigmoid: Tensor  # (B, C) logits of the sigmoid branch
    features: Tensor  # F (B, N, P, Q)
    pooled: Tensor  # input of the sigmoid head's first trainable layer


@dataclass(frozen=True)
class ForwardPass(Branches):
    """Branches still tied by autograd to `cut`, the output of the layer at `point` as it came, before folding
    to `features`."""

    cut: Tensor
    softmax_logits: Tensor  # (B, C) equal to `softmax`, but before an activation with which the model ends
    images: Tensor  # (B, C, H, W) what the model was given
    point: FeaturePoint

    @property
    def image(self) -> GridSize:
        """Height and width of the images."""
        return GridSize.of(self.images)


@dataclass(frozen=True)
class GradMode:
    """How autograd gets at the part of the model after some places."""

    inline: bool = True  # gradients from the pass that predicts; False: recording them changes the arithmetic
    forced: bool = False  # the model leaves F under a no_grad of its own


# ----------------------------------------------------------------------------------------- the network


class DualBranch(nn.Module):
    """The user's classifier and a sigmoid branch on the same features; calling it gives both from one pass.

    Only the sigmoid head is registered: `parameters()`, `train()` and `state_dict()` reach nothing else.
    Make one with `attach` or `load`.
    """

    def __init__(self, model: nn.Module, split: Split, sigmoid: SigmoidHead) -> None:
        super().__init__()
        self.sigmoid = sigmoid
        self.split = split
        self.requested: dict[str, str | None] = {"head": None, "layer": None}  # what the user told `attach`
        self.fitted = False
        self.class_names: tuple[str, ...] | None = None
        self.recipe: dict[str, Any] = {}
        self.transform: Callable[[Any], Tensor] | None = None
        self.input_shape = (3, 224, 224)  # of the image that it was attached with
        self.warned = False  # that the branch is not fitted
        self.linear = frozenset[str]()  # branches whose logits are W mean(F) + b, checked at attach
        self.example: Tensor | None = None  # that it was attached with
        self._recording = dict[tuple[FeaturePoint, ...], GradMode]()
        self._places = dict[str, FeaturePoint]()
        self._softmax_tail: Tail | None = None
        self.model = self.original = model  # `original` is the user's, where `model` is a private copy
        self.eval()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "original", "transform"):  # modules, but the user's: not registered
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
        """Where the sigmoid branch lives, and images are expected."""
        return next(self.sigmoid.parameters()).device

    def last_layer(self, branch: Literal["softmax", "sigmoid"]) -> nn.Module:
        """The branch's output layer (the first of several)."""
        name, head = self.split.last[0], self.split.heads[0]
        if branch == "softmax":
            return self.model.get_submodule(name)
        return self.sigmoid.copies[0].get_submodule(name[len(head) :].lstrip("."))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DualBranch:
        self.model._apply(fn, recurse)  # net.to(device) moves both, or the two could not meet
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, images: Tensor) -> Branches:
        """Both branches for (B, C, H, W) images; `.softmax` is bit-equal to the bare model's output in eval
        mode."""
        passage = self.run(images)
        return Branches(passage.softmax, passage.sigmoid, passage.features, passage.pooled)

    def run(self, images: Tensor, *, grad: bool = False) -> ForwardPass:
        """One pass. With `grad`, both heads' logits can be differentiated with respect to `.cut`."""
        return self.run_at((self.split.point,), images, grad=grad)[0]

    def run_at(
        self,
        places: Sequence[FeaturePoint],
        images: Tensor,
        *,
        grad: bool = False,
        swap: Tensor | None = None,
    ) -> list[ForwardPass]:
        """One pass, seen from several places: they differ in `.features` and `.cut` alone.

        Args:
            swap: what the model goes on with instead of the (one) place's output; the logits are then theirs.
        """
        recording = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad(), fresh_autocast_cache():
            how = self.grad_mode(tuple(places)) if grad else GradMode()
            tap = self._tap(places, images, grad=grad and how.inline, forced=how.forced, swap=swap)
            bare = tap.logits
            if grad and not how.inline:
                tap = self._tap(places, images, grad=True, forced=how.forced)
            with torch.set_grad_enabled(grad or recording):
                sigmoid, pooled = self.sigmoid(tap.inputs)
                tail = self._softmax_tail
                logits = tap.logits if tail is None else tail(tap.outputs).reshape(-1, self.classes)
                size = GridSize.of(images)
                return [
                    ForwardPass(bare.detach(), sigmoid, p.fold(cut, size), pooled, cut, logits, images, p)
                    for p, cut in zip(places, tap.cuts, strict=True)
                ]

    def rescore(self, passage: ForwardPass, index: int, features: Tensor) -> ForwardPass:
        """The logits of image `index` had its features been (R, N, P, Q) others: the part of the model after
        F runs on those, the part before it on the one image."""
        fold, image = passage.point.fold, passage.images[index : index + 1]
        swap = fold.undone(features, fold.one_image(passage.cut.detach(), index))
        try:
            return self.run_at((passage.point,), image, swap=swap)[0]
        except RuntimeError:  # what bypasses F has the batch's size: run the model on as many images
            return self.run_at((passage.point,), image.expand(len(features), -1, -1, -1), swap=swap)[0]

    def _tap(
        self,
        places: Sequence[FeaturePoint],
        images: Tensor,
        *,
        grad: bool = False,
        forced: bool = False,
        swap: Tensor | None = None,
    ) -> HookedPass:
        hides = getattr(self.model, "hides_nan", False) and not bool(images.isfinite().all())
        model = self.original if hides else self.model
        how: Any = {"grad": grad, "forced": forced, "outputs": self._softmax_tail is not None, "swap": swap}
        return HookedPass(model, self.split, places, **how).run(images)

    def feature_point(self, layer: str | nn.Module) -> FeaturePoint:
        """Where the features of another layer, given by name or itself, leave the network."""
        names = {module: name for name, module in self.model.named_modules()}
        name = layer if isinstance(layer, str) else names.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(self.model).__name__}.")
        if name in (self.split.layer, *self._places):
            return self._places.get(name, self.split.point)
        with torch.inference_mode(False), fresh_autocast_cache():
            split, _ = find_split(
                self.model, head=self.requested["head"], layer=name, example=self._example()
            )
        if split.heads != self.split.heads:
            raise AttachError(
                f"layer={name!r} lies inside or after the head {', '.join(self.split.heads)}: name one "
                f"before it."
            )
        self._places[name] = split.point
        return split.point

    def with_model(self, model: nn.Module) -> DualBranch:
        """The same branch beside another model whose modules have the same names: a finer copy, say."""
        other = copy.copy(self)
        other.model = model
        return other

    def _example(self) -> Tensor:
        """What it was attached with, where the model is now."""
        assert self.example is not None
        return self.example.to(next(self.model.parameters()))

    def grad_mode(self, places: tuple[FeaturePoint, ...]) -> GradMode:
        """How autograd gets at what follows the places; tried on the example when first asked."""
        if places not in self._recording:
            self._recording[places] = _choose_recording(self, places)
        return self._recording[places]

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes the branch alone, and what is needed to check that it fits, as safetensors in `dtype`."""
        from safetensors.torch import save

        path = Path(path)
        about = {
            "fingerprint": fingerprint(self.original),
            "heads": list(self.split.heads),
            "layer": self.split.layer,
            "input": list(self.input_shape),
            "named": self.requested,
            "classes": self.classes,
            "class_names": list(self.class_names) if self.class_names else None,
            "fitted": self.fitted,
            "recipe": self.recipe,
        }
        state = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        tensors = {
            name: t.to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True).contiguous()
            for name, t in state.items()
        }
        try:
            write_atomic(path, save(tensors, metadata={"sigcam-branch": json.dumps(about)}))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error

    def __repr__(self) -> str:
        state = "fitted" if self.fitted else "not fitted"
        heads = ", ".join(self.split.heads)
        return (
            f"DualBranch({type(self.model).__name__}: layer={self.split.layer!r}, head={heads!r}, "
            f"{self.classes} {'logit' if self.classes == 1 else 'classes'}, {state})"
        )


# ------------------------------------------------------------------------------------- attach and load


def _choose_recording(net: DualBranch, places: tuple[FeaturePoint, ...]) -> GradMode:
    """Whether gradients can come from the pass that predicts, bit for bit; checked by doing it."""
    example = net._example()
    with torch.no_grad():
        bare = net._tap(places, example)
        for forced in (False, True):
            tap = net._tap(places, example, grad=True, forced=forced)
            entering = [leaf for leaf in pytree.tree_leaves(tap.inputs) if isinstance(leaf, Tensor)]
            if any(leaf.requires_grad for leaf in entering):
                before = [leaf for leaf in pytree.tree_leaves(bare.inputs) if isinstance(leaf, Tensor)]
                same = all(torch.equal(a, b) for a, b in zip(before, entering, strict=True))
                return GradMode(same and torch.equal(bare.logits, tap.logits), forced)
    raise AttachError(
        f"no gradient passes from layer {places[0].layer!r} to the head {net.split.heads[0]!r}. "
        "Name another layer: attach(model, layer='...')."
    )


def linear_weight(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(W (C, N), b (C,)) of a linear layer or 1x1 convolution; None for any other."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or weight[0, 0].numel() != 1:
        return None
    bias = getattr(layer, "bias", None)
    return weight.flatten(1), bias if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
