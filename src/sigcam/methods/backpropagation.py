"""Guided backpropagation and FullGrad: what flows back through ReLUs and biases to the pixels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sigcam.methods.postprocess import resize, unit_range
from sigcam.methods.probe import Probe, report_share
from sigcam.methods.registry import method
from sigcam.methods.targets import at_least_float32

_RELUS = ("relu", "relu_", "relu6")  # names of torch functions
_BIASED = ("conv1d", "conv2d", "conv3d", "linear")
_BATCH_NORM = inspect.signature(F.batch_norm)


@method("guided-backpropagation", gives="pixels", signed=False, aliases=("guidedbackprop",))
def guided_backpropagation(probe: Probe) -> Tensor:
    """The score's gradient with respect to each pixel, of which every ReLU lets only the positive part pass
    (Springenberg et al., 2015); without ReLUs it is the gradient."""
    return guided_gradients(probe).abs().sum(2)


@method("fullgrad", gives="pixels", signed=False, aliases=("fullgradient",))
def fullgrad(probe: Probe) -> Tensor:
    """Image times gradient, and bias times gradient of each layer: absolute values of each channel, scaled
    from 0 to 1, enlarged and added up (Srinivas and Fleuret, 2019), for convolutional networks."""
    rows = []
    for image, classes in scored_images(probe, recorder := BiasCalls()):
        maps = []
        for score in classes:
            by_image, *by_layer = torch.autograd.grad(
                score, [image, *recorder.outputs], retain_graph=True, allow_unused=True
            )
            parts = [(image.detach() * by_image).abs()]
            parts += [g.mul(b).abs() for g, b in zip(by_layer, recorder.biases, strict=True)
                      if g is not None and g.ndim == 4]  # fmt: skip
            each = [unit_range(at_least_float32(part)).sum(1, keepdim=True) for part in parts]
            maps.append(sum(resize(low, probe.forward_pass.image, "bilinear") for low in each))
        rows.append(torch.cat([found[0] for found in maps if isinstance(found, Tensor)]))
    return torch.stack(rows)


def guided_gradients(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) guided gradients."""
    rows = []
    for image, classes in scored_images(probe, GuidedCalls()):
        gradients = [torch.autograd.grad(score, image, retain_graph=True)[0][0] for score in classes]
        rows.append(torch.stack([at_least_float32(gradient) for gradient in gradients]))
    return torch.stack(rows)


def scored_images(probe: Probe, mode: SeenCalls) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each image (1, C, H, W), and the scores of its classes, run under the mode."""
    images = probe.forward_pass.images
    for i in range(len(images)):
        image = images[i : i + 1].detach().clone().requires_grad_()
        mode.clear()
        with torch.enable_grad():
            with mode:
                logits = probe.image_logits(image)
            scores = [probe.score_of(logits, i, k).sum() for k in range(probe.classes.shape[1])]
        yield image, scores
        report_share((i + 1) / len(images))


class SeenCalls(TorchFunctionMode):
    """Sees the calls of torch functions whose result depends on the image."""

    def clear(self) -> None:
        """Forget what was seen."""

    def see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """Return what the call shall return."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.requires_grad:
            return self.see(getattr(func, "__name__", ""), args, kwargs or {}, out)
        return out


class GuidedCalls(SeenCalls):
    """Lets the positive part of the gradient pass each ReLU."""

    def see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        if name in _RELUS:
            out.register_hook(lambda gradient: gradient.clamp(min=0))
        return out


class BiasCalls(SeenCalls):
    """Keeps the outputs of all layers that add a bias, and the bias of each, in the output's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.biases: list[Tensor] = []

    def clear(self) -> None:
        self.outputs.clear()
        self.biases.clear()

    def see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        bias = kwargs.get("bias", args[2] if len(args) > 2 else None) if name in _BIASED else None
        if name == "batch_norm":
            bias = _batch_norm_bias(**_BATCH_NORM.bind(*args, **kwargs).arguments)
        if bias is None:
            return out
        self.outputs.append(out)
        spatial = (1,) * (out.ndim - 2 if name != "linear" else 0)
        self.biases.append(bias.detach().reshape(-1, *spatial))
        return out.clone()  # that a later step may change in place


def _batch_norm_bias(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **others: Any,
) -> Tensor:
    """Return what batch normalisation adds to each channel that it scales."""
    shift = -running_mean / (running_var + eps).sqrt()
    shift = shift if weight is None else shift * weight
    return shift if bias is None else shift + bias
