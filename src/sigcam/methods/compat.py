"""GradCAM and siblings: explain, in the call shape of pytorch-grad-cam."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError, DataError
from sigcam.methods.explainer import explain
from sigcam.methods.registry import METHODS, method_name
from sigcam.methods.targets import Branch, Target, TargetName, finer_score, nearest_classes
from sigcam.network.attachment import attach, unwrap
from sigcam.network.dual import DualBranch

Array = np.ndarray[Any, Any]
RowScore = Callable[[Tensor], Tensor]  # one image's logits (C,) -> one number
Targets = int | RowScore | Sequence[int | RowScore] | Tensor | Array | None
Layers = Sequence[str | nn.Module] | None


class _Cam:
    """Maps of one method; call it with a (B, C, H, W) batch.

    Args:
        model: a classifier, whose own head is then explained, without clamping; or what `attach` returns,
            whose sigmoid branch is.
        target_layers: modules of the model, or their names; several are fused. By default it is found.
        reshape_transform: none is needed.
        branch: "sigmoid", "softmax" or "centred", where another one is wanted.
        batch_size: masked images (Score-CAM) or variants of F (Ablation-CAM) in one pass.
    """

    method: str

    def __init_subclass__(cls, method: str = "grad-cam") -> None:
        cls.method = method

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: None = None,
        *,
        branch: Branch | None = None,
        batch_size: int | None = None,
    ) -> None:
        if reshape_transform is not None:
            raise DataError("reshape_transform is not needed, the model shows how tokens fold: leave it out.")
        self.branch: Branch = branch or ("sigmoid" if isinstance(model, DualBranch) else "softmax")
        self.batch_size = batch_size
        self.net, self.layers = _attached(model, target_layers)

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Targets = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> Array:
        """(B, H, W) maps in [0, 1], float32: of what is predicted, or of a class or a function of an image's
        logits (C,), one for all images or one for each."""
        return self._maps(input_tensor, targets, "class", aug_smooth, eigen_smooth)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to undo, since no hook outlives a call; no exception is swallowed."""

    def _maps(
        self, images: Tensor, targets: Targets, score: TargetName | Target, aug: bool, eigen: bool
    ) -> Array:
        """Maps of the score of the classes in `targets`, or of the functions in there."""
        if eigen:
            raise DataError(
                "eigen_smooth is not offered; EigenGradCAM does the same to gradients x features."
            )
        images = images.to(self.net.device)
        wanted = _wanted(targets, len(images), self.net.classes)
        if not isinstance(wanted, list):
            return self._explained(images, wanted, score, aug)
        if METHODS[self.method].perturbs is None:
            return self._explained(images, None, _of_rows(wanted), aug)
        one_by_one = zip(images.split(1), wanted, strict=True)
        return np.concatenate([self._explained(x, None, _of_rows([one]), aug) for x, one in one_by_one])

    def _explained(
        self, images: Tensor, classes: Tensor | None, target: TargetName | Target, aug: bool
    ) -> Array:
        how: dict[str, Any] = {"layers": self.layers, "aug_smooth": aug, "batch_size": self.batch_size}
        ex = explain(self.net, images, self.method, branch=self.branch, classes=classes, target=target, **how)
        return ex.maps.float().cpu().numpy()


def _attached(model: nn.Module, layers: Layers) -> tuple[DualBranch, Layers]:
    """The network around the model, and what is left to say to `explain(layers=...)`."""
    if layers is not None and (isinstance(layers, str | nn.Module) or not len(layers)):
        raise DataError(
            "target_layers is a list of modules or names, e.g. [model.layer4]; left out, it is found."
        )
    if layers is not None and len(layers) == 1 and not isinstance(model, DualBranch):
        layer, model = layers[0], unwrap(model)
        name = layer if isinstance(layer, str) else {m: n for n, m in model.named_modules()}.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(model).__name__}.")
        return attach(model, layer=name), None
    net = model if isinstance(model, DualBranch) else attach(model)
    for layer in layers or ():
        net.feature_point(layer)  # an error now rather than with the first images
    return net, layers


def _wanted(targets: Targets, batch: int, classes: int) -> Tensor | list[RowScore] | None:
    """(B,) classes, or B functions of an image's logits; None stands for what is predicted."""
    if targets is None:
        return None
    many = isinstance(targets, Sequence) or getattr(targets, "ndim", 0) > 0
    items: list[Any] = [*cast(Sequence[Any], targets)] if many else [targets] * batch
    if len(items) != batch:
        raise DataError(f"{len(items)} targets for {batch} image(s): give one for each, or one alone.")
    plain = [_plain_class(item, classes) for item in items]
    if None not in plain:
        return torch.tensor(plain)
    if not all(map(callable, items)):
        raise DataError("targets are whole numbers, or functions of an image's logits, one per image.")
    return items


def _plain_class(target: Any, classes: int) -> int | None:
    """The class, if the target asks for its logit alone; other targets with a category ask for more."""
    if type(target).__name__ == "ClassifierOutputTarget" and classes > 1:  # with one logit it means that one
        target = target.category
    try:
        return operator.index(target)
    except TypeError:
        return None


def _of_rows(targets: list[RowScore]) -> Target:
    """The targets as one function of a batch's logits; a single one serves any number of rows."""

    def custom(logits: Tensor, classes: Tensor) -> Tensor:
        each = targets if len(targets) > 1 else targets * len(logits)
        scores = [score(row) for score, row in zip(each, logits, strict=True)]
        wrong = next((s for s in scores if not isinstance(s, Tensor) or s.numel() != 1), None)
        if wrong is not None:
            raise DataError(f"a target must give one number per image, as a tensor, not {wrong!r:.80}.")
        return torch.stack([score.reshape(()) for score in scores])

    return custom


class CAM(_Cam, method="cam"):
    """The class's row of the last layer, where the head is global average + linear (Zhou et al., 2016)."""


class GradCAM(_Cam, method="grad-cam"):
    """Each channel's mean gradient (Selvaraju et al., 2017)."""


class GradCAMPlusPlus(_Cam, method="grad-cam++"):
    """Positive gradients, each weighted by a ratio of its powers (Chattopadhay et al., 2018)."""


class XGradCAM(_Cam, method="xgrad-cam"):
    """Gradients averaged with the activations as weights (Fu et al., 2020)."""


class LayerCAM(_Cam, method="layer-cam"):
    """Each cell's positive gradient (Jiang et al., 2021)."""


class HiResCAM(_Cam, method="hires-cam"):
    """Each cell's own gradient (Draelos and Carin, 2020)."""


class ScoreCAM(_Cam, method="score-cam"):
    """Each channel's score as a mask of the image (Wang et al., 2020)."""


class AblationCAM(_Cam, method="ablation-cam"):
    """What the score loses with each channel set to zero (Desai and Ramaswamy, 2020)."""


class EigenCAM(_Cam, method="eigen-cam"):
    """The first principal component of the features (Muhammad and Yeasin, 2020)."""


class EigenGradCAM(_Cam, method="eigengrad-cam"):
    """The first principal component of gradients times features."""


class FinerCAM(_Cam):
    """What tells a class from those most like it (Finer-CAM; Zhang et al., 2025), by any method."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: None = None,
        base_method: type = GradCAM,
        *,
        branch: Branch | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform, branch=branch, batch_size=batch_size)
        self.method = method_name(base_method.__name__)

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Targets = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
        *,
        alpha: float = 1.0,
        comparison_categories: Sequence[int] = (1, 2, 3),
        target_idx: int | None = None,
    ) -> Array:
        """As for the others, of a class's logit minus `alpha` times the mean logit of the nearest classes.

        Args:
            comparison_categories: which, by nearness: (1, 2, 3) are the three nearest.
            target_idx: the class of all images.
        """
        ranks, wanted = list(comparison_categories), target_idx if targets is None else targets
        if alpha == 1 and ranks == [1, 2, 3]:
            return self._maps(input_tensor, wanted, "finer-cam", aug_smooth, eigen_smooth)
        if METHODS[self.method].perturbs is not None:
            raise DataError(f"{self.method} takes no other alpha and no other comparison_categories.")
        if not ranks or min(ranks) < 1:
            raise DataError(f"comparison_categories count from the nearest class, 1, not {ranks}.")

        def score(logits: Tensor, classes: Tensor) -> Tensor:
            nearest = nearest_classes(logits, classes, max(ranks))
            rivals = nearest[:, [rank - 1 for rank in ranks if rank <= nearest.shape[1]]]
            return finer_score(logits, classes, rivals, alpha)

        return self._maps(input_tensor, wanted, score, aug_smooth, eigen_smooth)
