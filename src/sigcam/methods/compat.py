"""GradCAM and its siblings: `explain` with the call signature of pytorch-grad-cam."""

import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError, ConfigError, DataError, ExampleNeeded
from sigcam.methods.backpropagation import guided_gradients
from sigcam.methods.concepts import factorize
from sigcam.methods.explainer import explain
from sigcam.methods.inputs import choose_classes
from sigcam.methods.probe import Probe
from sigcam.methods.registry import METHODS, Fusion, method_name
from sigcam.methods.targets import Branch, Target, TargetName, finer_score, nearest_classes
from sigcam.network.attachment import attach, unwrap
from sigcam.network.dual import DualBranch

NumpyArray = np.ndarray[Any, Any]
RowScore = Callable[[Tensor], Tensor]  # one image's logits (C,) -> one number
Targets = int | RowScore | Sequence[int | RowScore] | Tensor | NumpyArray | None
Layers = Sequence[str | nn.Module] | None

log = logging.getLogger("sigcam")


class _Cam:
    """Maps of one method; call it with a (B, C, H, W) batch.

    Args:
        model: A classifier, whose own head is explained without clamping; or the result of `attach`, whose
            sigmoid branch is explained.
        target_layers: Modules of the model, or their names; several are fused. Found by default.
        reshape_transform: Not needed, since tokens fold automatically; ignored.
        branch: "sigmoid", "softmax" or "centred", to explain another branch than the default.
        batch_size: Number of masked images (Score-CAM) or variants of F (Ablation-CAM) per pass.
    """

    method: str
    fusion: Fusion | None = None  # the method's own
    net: DualBranch
    layers: Layers
    _images: Tensor | None = None

    def __init_subclass__(cls, method: str = "grad-cam") -> None:
        cls.method = method

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: object = None,
        *,
        branch: Branch | None = None,
        batch_size: int | None = None,
    ) -> None:
        if reshape_transform is not None:
            _log_once("reshape_transform is not needed and not used: tokens fold automatically.")
        self.branch: Branch = branch or ("sigmoid" if isinstance(model, DualBranch) else "softmax")
        self.batch_size = batch_size
        self._given = model, target_layers
        with suppress(ExampleNeeded):  # then the first images are the example
            self.net, self.layers = _attach_at(model, target_layers)

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Targets = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> NumpyArray:
        """Return (B, H, W) float32 maps in [0, 1] of the predicted class, or of the class or function of an
        image's logits (C,) in `targets`: one for all images, or one for each."""
        return self._maps(input_tensor, targets, "class", aug_smooth, eigen_smooth)

    @property
    def outputs(self) -> Tensor | None:
        """The model's output (B, C) for the images of the last call; None before the first."""
        if self._images is None:
            return None
        with torch.no_grad():
            return self.net.run(self._images).softmax

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: no hook outlives a call."""

    def attached(self, images: Tensor) -> tuple[DualBranch, Tensor]:
        """Return the network, for which the first images may be the example, and the images on its device."""
        if not hasattr(self, "net"):
            self.net, self.layers = _attach_at(*self._given, example=images[:1].detach())
        return self.net, images.to(self.net.device)

    def _maps(
        self,
        images: Tensor,
        targets: Targets,
        score: TargetName | Target,
        aug_smooth: bool,
        eigen_smooth: bool,
    ) -> NumpyArray:
        """Return maps of `score` for the classes in `targets`, or of the functions in `targets`."""
        net, images = self.attached(images)
        self._images = images
        parsed = _parse_targets(targets, len(images), net.classes)
        fusion = self.fusion if len(self.layers or ()) > 1 else None
        at_layers = partial(explain, net, method=self.method, branch=self.branch, layers=self.layers)
        smoothing = {"aug_smooth": aug_smooth, "eigen_smooth": eigen_smooth}
        run = partial(at_layers, fusion=fusion, batch_size=self.batch_size, **smoothing)
        if not isinstance(parsed, list):
            parts = [run(images, classes=parsed, target=score)]
        elif METHODS[self.method].perturbs is None and METHODS[self.method].gives != "pixels":
            parts = [run(images, target=_batch_target(parsed))]
        else:  # each target scores its image alone, or many variants of it
            pairs = zip(images.split(1), parsed, strict=True)
            parts = [run(image, target=_batch_target([target])) for image, target in pairs]
        return torch.cat([ex.maps for ex in parts]).float().cpu().numpy()


@cache
def _log_once(message: str) -> None:
    """Log a message, the first time only."""
    log.warning(message)


def _attach_at(model: nn.Module, layers: Layers, example: Tensor | None = None) -> tuple[DualBranch, Layers]:
    """Attach to the model; return the network and the `layers` argument that is left for `explain`."""
    if layers is not None and (isinstance(layers, str | nn.Module) or not len(layers)):
        raise ConfigError("target_layers is a list of modules or names, e.g. [model.layer4], or left out.")
    if layers is not None and len(layers) == 1 and not isinstance(model, DualBranch):
        layer, model = layers[0], unwrap(model)
        name = layer if isinstance(layer, str) else {m: n for n, m in model.named_modules()}.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(model).__name__}.")
        return attach(model, layer=name, example=example), None
    net = model if isinstance(model, DualBranch) else attach(model, example=example)
    for layer in layers or ():
        net.feature_point(layer)  # raise now rather than with the first images
    return net, layers


def _parse_targets(targets: Targets, batch: int, classes: int) -> Tensor | list[RowScore] | None:
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


def _batch_target(targets: list[RowScore]) -> Target:
    """Combine targets, one per row, into a function of a batch's logits; a single one serves all rows."""

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
    """The score lost with each channel set to zero (Desai and Ramaswamy, 2020)."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: object = None,
        ablation_layer: object = None,
        batch_size: int | None = None,
        ratio_channels_to_ablate: float = 1.0,
        *,
        branch: Branch | None = None,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform, branch=branch, batch_size=batch_size)
        if ablation_layer is not None or ratio_channels_to_ablate != 1:
            _log_once("AblationCAM sets every channel to zero: no ablation_layer and no ratio is used.")


class EigenCAM(_Cam, method="eigen-cam"):
    """The first principal component of the features (Muhammad and Yeasin, 2020)."""


class EigenGradCAM(_Cam, method="eigengrad-cam"):
    """The first principal component of gradients times features."""


class GradCAMElementWise(_Cam, method="grad-cam-elementwise"):
    """Each cell's own gradient, where gradient times feature is positive."""


class ShapleyCAM(_Cam, method="shapley-cam"):
    """Gradients less half the Hessian times the features (Cai, 2025)."""


class SegEigenCAM(_Cam, method="seg-eigen-cam"):
    """The first principal component of gradients' sizes times features (Chung and Ying, 2025)."""


class KPCA_CAM(_Cam, method="kpca-cam"):
    """The first component of the features by kernel PCA (Karmani et al., 2024)."""


class FEM(_Cam, method="fem"):
    """The cells in which channels are far above their mean (Fuad et al., 2020)."""


class RandomCAM(_Cam, method="random-cam"):
    """Random weights, as a control."""


class SmoothGradCAMpp(_Cam, method="smoothgrad-cam++"):
    """Grad-CAM++ averaged over noisy copies of the image (Omeiza et al., 2019)."""


class SSCAM(_Cam, method="ss-cam"):
    """Score-CAM averaged over noisy masks (Wang et al., 2020)."""


class ISCAM(_Cam, method="is-cam"):
    """Score-CAM averaged over masks of growing strength (Naidu et al., 2020)."""


class FullGrad(_Cam, method="fullgrad"):
    """Gradients of the biases in all layers (Srinivas and Fleuret, 2019), for which no layer is chosen."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: object = None,
        *,
        branch: Branch | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, None, reshape_transform, branch=branch, batch_size=batch_size)


class _OfMethod(_Cam):
    """Maps of the method of another class."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Layers = None,
        reshape_transform: object = None,
        base_method: type | None = None,
        *,
        branch: Branch | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform, branch=branch, batch_size=batch_size)
        self.method = self.method if base_method is None else method_name(base_method.__name__)


class RefineCAM(_OfMethod, method="grad-cam++"):
    """The product of several layers' maps (Domeniconi et al., 2026), by any method."""

    fusion = "product"


class FinerCAM(_OfMethod):
    """What sets a class apart from the most similar ones (Zhang et al., 2025), by any method."""

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
    ) -> NumpyArray:
        """Return maps of a class's logit minus `alpha` times the mean logit of the most similar classes.

        Args:
            comparison_categories: Their ranks by similarity: (1, 2, 3) are the three most similar.
            target_idx: The class of all images.
        """
        ranks, targets = list(comparison_categories), target_idx if targets is None else targets
        if alpha == 1 and ranks == [1, 2, 3]:
            return self._maps(input_tensor, targets, "finer-cam", aug_smooth, eigen_smooth)
        if METHODS[self.method].perturbs is not None:
            raise ConfigError(f"{self.method} takes no other alpha and no other comparison_categories.")
        if not ranks or min(ranks) < 1:
            raise ConfigError(f"comparison_categories count from the nearest class, 1, not {ranks}.")

        def score(logits: Tensor, classes: Tensor) -> Tensor:
            nearest = nearest_classes(logits, classes, max(ranks))
            rivals = nearest[:, [rank - 1 for rank in ranks if rank <= nearest.shape[1]]]
            return finer_score(logits, classes, rivals, alpha)

        return self._maps(input_tensor, targets, score, aug_smooth, eigen_smooth)


class DeepFeatureFactorization:
    """Concepts in the features of images (Collins et al., 2018), see `sigcam.factorize`.

    Args:
        computation_on_concepts: A module that is called on the concepts' channels (K, N), such as the model's
            last layer.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layer: str | nn.Module | None = None,
        reshape_transform: object = None,
        computation_on_concepts: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._cam = _Cam(model, None if target_layer is None else [target_layer], reshape_transform)
        self.computation_on_concepts = computation_on_concepts

    def __call__(self, input_tensor: Tensor, n_components: int = 16) -> tuple[NumpyArray, ...]:
        """Return concepts (N, K) and their maps (B, K, H, W), and with `computation_on_concepts` its (K, ...)
        result."""
        net, images = self._cam.attached(input_tensor)
        layers = self._cam.layers
        found = factorize(net, images, n_components, layer=layers[0] if layers else None)
        results = [found.vectors.T, found.maps]
        if self.computation_on_concepts is not None:
            with torch.no_grad():
                results.append(self.computation_on_concepts(found.vectors))
        return tuple(each.cpu().numpy() for each in results)


class GuidedBackpropReLUModel:
    """Gradients of one image; ReLUs let positive ones alone pass back (Springenberg et al., 2015)."""

    def __init__(self, model: nn.Module, device: object = None) -> None:
        self._cam = _Cam(model)

    def __call__(self, input_img: Tensor, target_category: int | None = None) -> NumpyArray:
        """Return the signed gradient (H, W, C) of the class, by default the predicted one, of a (1, C, H, W)
        image."""
        net, image = self._cam.attached(input_img)
        with torch.no_grad():
            forward_pass = net.run(image)
            classes, _ = choose_classes(net, forward_pass, target_category)
            gradients = guided_gradients(Probe(net, forward_pass, self._cam.branch, classes))
        return gradients[0, 0].movedim(0, -1).cpu().numpy()
