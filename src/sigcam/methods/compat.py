"""GradCAM and its siblings: `explain` with the call signature of pytorch-grad-cam."""

import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Self

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError, ConfigError, ExampleNeeded, NoLogits
from sigcam.methods.explainer import explain
from sigcam.methods.registry import METHODS, Fusion, method_name
from sigcam.methods.row_scores import NumpyArray, Targets, batch_target, parse_targets
from sigcam.methods.scored_model import Layers, attach_at, can_be_scored, scored_networks
from sigcam.methods.targets import Branch, Target, TargetName, finer_score, nearest_classes
from sigcam.network.dual import DualBranch
from sigcam.network.trace import eval_mode

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
        device: Not needed, nor use_cuda: maps are computed where the model is; ignored.
    """

    method = "grad-cam"
    fusion: Fusion | None = None  # the method's own
    net: DualBranch
    layers: Layers
    _can_be_smoothed = True  # not if maps are principal components as they are
    _refused = ""  # why the model is no classifier, or none with these layers
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
        device: str | torch.device | None = None,
        use_cuda: bool = False,
    ) -> None:
        self.model, self.target_layers = model, target_layers
        self.branch: Branch = branch or ("sigmoid" if isinstance(model, DualBranch) else "softmax")
        self.batch_size = batch_size
        self.activations_and_grads = _NoHooks()
        try:
            self.net, self.layers = attach_at(model, self._drawn_layers)
        except ExampleNeeded:
            pass  # the first images are the example
        except AttachError as error:
            if not isinstance(error, NoLogits) and not can_be_scored(model, self._drawn_layers):
                raise
            self._refused = str(error)  # unless targets score the output
        if reshape_transform is not None:
            _log_once("reshape_transform is not needed and not used: tokens fold automatically.")
        device = "cuda" if use_cuda else device
        if device is not None and torch.device(device).type != self.device.type:
            _log_once("device and use_cuda are not used: maps are computed where the model is.")

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
        """The model's output for the images of the last call; None before the first."""
        if self._images is None:
            return None
        with torch.no_grad():
            if hasattr(self, "net"):
                return self.net.run(self._images).softmax  # (B, C)
            with eval_mode(self.model):
                output: Tensor = self.model(self._images)
            return output

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: no hook outlives a call."""

    def attached(self, images: Tensor) -> tuple[DualBranch, Tensor]:
        """Return the network, for which the first images may be the example, and the images on its device."""
        if self._refused:
            raise NoLogits(self._refused)
        if not hasattr(self, "net"):
            self.net, self.layers = attach_at(self.model, self._drawn_layers, images[:1].detach())
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
        facts = METHODS[self.method]
        if eigen_smooth and not (facts.weights_channels and self._can_be_smoothed):
            _log_once(f"eigen_smooth is not used: {self.method} adds up no weighted channels.")
            eigen_smooth = False
        run = partial(explain, method=self.method, branch=self.branch, batch_size=self.batch_size)
        fusion = self.fusion if len(self._drawn_layers or ()) > 1 else None
        run = partial(run, aug_smooth=aug_smooth, eigen_smooth=eigen_smooth, fusion=fusion)
        try:
            net, images = self.attached(images)
        except NoLogits as error:
            parsed, images = parse_targets(targets, len(images), classes=1), images.to(self.device)
            if not isinstance(parsed, list):
                raise NoLogits(f"{error} Or pass functions of one image's output as targets.") from None
            networks = scored_networks(self.model, self._drawn_layers, images, parsed)
            each = zip(images.split(1), networks, strict=True)
            parts = [run(net, image, classes=1, layers=layers) for image, (net, layers) in each]
        else:
            run = partial(run, net, layers=self.layers)
            parsed = parse_targets(targets, len(images), net.classes)
            if not isinstance(parsed, list):
                parts = [run(images, classes=parsed, target=score)]
            elif facts.perturbs is None and facts.gives != "pixels":
                parts = [run(images, target=batch_target(parsed))]
            else:  # each target scores its image alone, or many variants of it
                pairs = zip(images.split(1), parsed, strict=True)
                parts = [run(image, target=batch_target([target])) for image, target in pairs]
        self._images = images
        return torch.cat([ex.maps for ex in parts]).float().cpu().numpy()

    @property
    def _drawn_layers(self) -> Layers:
        """The target layers, unless maps are of pixels."""
        return None if METHODS[self.method].gives == "pixels" else self.target_layers


class _NoHooks:
    """What programs release: there is nothing to release, since no hook outlives a call."""

    def release(self) -> None:
        """Do nothing."""


@cache
def _log_once(message: str) -> None:
    """Log a message, the first time only."""
    log.warning(message)


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
        device: str | torch.device | None = None,
        use_cuda: bool = False,
    ) -> None:
        super().__init__(
            model,
            target_layers,
            reshape_transform,
            branch=branch,
            batch_size=batch_size,
            device=device,
            use_cuda=use_cuda,
        )
        if ablation_layer is not None or ratio_channels_to_ablate != 1:
            _log_once("AblationCAM sets every channel to zero: no ablation_layer and no ratio is used.")


class EigenCAM(_Cam, method="eigen-cam"):
    """The first principal component of the features (Muhammad and Yeasin, 2020)."""

    _can_be_smoothed = False


class EigenGradCAM(_Cam, method="eigengrad-cam"):
    """The first principal component of gradients times features."""

    _can_be_smoothed = False


class GradCAMElementWise(_Cam, method="grad-cam-elementwise"):
    """Each cell's own gradient, where gradient times feature is positive."""


class ShapleyCAM(_Cam, method="shapley-cam"):
    """Gradients less half the Hessian times the features (Cai, 2025)."""


class SegEigenCAM(_Cam, method="seg-eigen-cam"):
    """The first principal component of gradients' sizes times features (Chung and Ying, 2025)."""

    _can_be_smoothed = False


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
        device: str | torch.device | None = None,
        use_cuda: bool = False,
    ) -> None:
        if base_method is not None:
            self.method = method_name(base_method.__name__)
            self._can_be_smoothed = getattr(base_method, "_can_be_smoothed", True)
        super().__init__(
            model,
            target_layers,
            reshape_transform,
            branch=branch,
            batch_size=batch_size,
            device=device,
            use_cuda=use_cuda,
        )


class RefineCAM(_OfMethod, method="grad-cam++"):
    """The product of several layers' maps (Domeniconi et al., 2026), by any method."""

    fusion = "product"


class FinerCAM(_OfMethod):
    """What sets a class apart from the most similar ones (Zhang et al., 2025), by any method."""

    def __call__(  # type: ignore[override]  # the order of pytorch-grad-cam's own
        self,
        input_tensor: Tensor,
        targets: Targets = None,
        eigen_smooth: bool = False,
        alpha: float = 1.0,
        comparison_categories: Sequence[int] | None = None,
        target_idx: int | None = None,
        aug_smooth: bool = False,
    ) -> NumpyArray:
        """Return maps of a class's logit minus `alpha` times the mean logit of the most similar classes.

        Args:
            comparison_categories: Their ranks by similarity; by default (1, 2, 3), the three most similar.
            target_idx: The class of all images.
        """
        ranks = [1, 2, 3] if comparison_categories is None else list(comparison_categories)
        targets = target_idx if targets is None else targets
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
