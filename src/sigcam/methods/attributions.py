"""Attributions of a score to pixels by its gradients, through captum: signed (B, K, C, H, W), then maps.

A map is the sum over channels of the absolute attributions. The reference, where a method has one, is zero:
the mean colour for images that are normalised by their data set's mean. Images run one at a time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from sigcam.core.errors import ConfigError
from sigcam.methods.formulas import usual_batch
from sigcam.methods.function_calls import FunctionCalls, NoRule
from sigcam.methods.probe import Probe, report_share
from sigcam.methods.registry import method
from sigcam.methods.targets import at_least_float32
from sigcam.network.modules import ACTIVATIONS
from sigcam.network.pass_memory import smaller_batch

log = logging.getLogger("sigcam")
NOISE = 0.15  # of the image's range: the paper recommends 10 to 20 %
INCOMPLETE = 0.01  # of the score's difference

_MAX_POOLS = {f"max_pool{n}d": getattr(nn, f"MaxPool{n}d") for n in (1, 2, 3)}
_POOL_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
# names of torch functions
_MOVES = (  # they move or repeat numbers
    "view reshape flatten unflatten permute transpose swapaxes movedim squeeze unsqueeze expand expand_as "
    "repeat __getitem__ select narrow chunk split unbind cat concat stack pad roll flip contiguous clone to "
    "type float double half bfloat16 detach dropout dropout1d dropout2d alpha_dropout feature_dropout "
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold view_as reshape_as gather index_select"
)
_LINEAR = (  # sums with constant weights, or the largest of some numbers; "score" is that of the class
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear batch_norm mean sum add "
    "add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ neg __neg__ avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d max_pool1d max_pool2d max_pool3d "
    "interpolate amax score"
)
_SCALINGS = "mul mul_ __mul__ __rmul__ __imul__ multiply"
_PRODUCTS = f"{_SCALINGS} div div_ __truediv__ __itruediv__ matmul __matmul__ mm bmm einsum"


@method("saliency", gives="pixels", signed=False, package="captum", aliases=("gradient", "vanillagradient"))
def saliency(probe: Probe) -> Tensor:
    """The score's gradient with respect to each pixel (Simonyan et al., 2014)."""
    return _pixels(signed_saliency(probe))


@method("smoothgrad", gives="pixels", signed=False, package="captum", samples=50)
def smoothgrad(probe: Probe) -> Tensor:
    """The mean gradient over copies of the image with Gaussian noise of 15 % of its range (Smilkov et al.,
    2017)."""
    return _pixels(signed_smoothgrad(probe))


@method("integrated-gradients", gives="pixels", signed=False, package="captum", samples=50, aliases=("ig",))
def integrated_gradients(probe: Probe) -> Tensor:
    """The mean gradient on the straight way from the reference to the image, times their difference
    (Sundararajan et al., 2017)."""
    return _pixels(signed_integrated_gradients(probe))


@method("deeplift", gives="pixels", signed=False, package="captum", passes=2)
def deeplift(probe: Probe) -> Tensor:
    """Differences from the reference, passed back by the rescale rule (Shrikumar et al., 2017)."""
    return _pixels(signed_deeplift(probe))


@method("lrp", gives="pixels", needs="rules", signed=False, package="captum", passes=2)
def lrp(probe: Probe) -> Tensor:
    """Relevance passed back by the epsilon rule in every layer (Bach et al., 2015), which in a network of
    ReLUs is gradient times image; for networks without attention and layer normalisation."""
    return _pixels(signed_lrp(probe))


def signed_saliency(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) gradients."""
    from captum.attr import Saliency

    return _attributions(probe, lambda job: Saliency(job.scores).attribute(job.image, abs=False))


def signed_smoothgrad(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) mean gradients; each image gets the same noise, times its range."""
    from captum.attr import Saliency

    def attribute(job: Job) -> Tensor:
        image, generator = job.image, torch.Generator().manual_seed(0)
        spread, total = NOISE * (image.amax() - image.amin()), torch.zeros_like(image)
        for start in range(0, probe.samples, job.batch):
            count = min(job.batch, probe.samples - start)  # drawn one by one: the same for any batch
            noises = [torch.randn(image.shape, generator=generator) for _ in range(count)]
            noisy = (image + spread * torch.cat(noises).to(image)).requires_grad_()
            total += Saliency(job.scores).attribute(noisy, abs=False).sum(0, keepdim=True)
        return total / probe.samples

    return _attributions(probe, attribute)


def signed_integrated_gradients(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) attributions, whose sum is the score's difference from that of the reference."""
    from captum.attr import IntegratedGradients

    def attribute(job: Job) -> Tensor:
        found: Tensor = IntegratedGradients(job.scores).attribute(
            job.image, n_steps=probe.samples, internal_batch_size=job.batch
        )
        job.check_complete(found, "take more samples")
        return found

    return _attributions(probe, attribute)


def signed_deeplift(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) attributions, whose sum is the score's difference from that of the reference if
    activations and max pooling alone are nonlinear."""
    from captum.attr import DeepLift

    def attribute(job: Job) -> Tensor:
        calls = FunctionCalls(job.scores, _rescaled, job.image, _without_overlap)
        with warnings.catch_warnings(action="ignore"):  # that hooks are set, and removed
            found: Tensor = DeepLift(calls).attribute(job.image)
        job.check_complete(found, "only activations and max pooling have rules, other products gradients")
        return found

    return _attributions(probe, attribute)


def _rescaled(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], varied: list[Tensor]
) -> nn.Module | None:
    """Return the module for which captum has the rule of this function; its rule of a ReLU is that of every
    activation that works on each number by itself."""
    if name in _MAX_POOLS:
        pool: nn.Module = _MAX_POOLS[name](**_pool_settings(args, kwargs))
        return pool
    if name == "softmax":
        return nn.Softmax(kwargs.get("dim", args[1] if len(args) > 1 else -1))
    return nn.ReLU() if name in ACTIVATIONS and len(varied) == 1 else None


def _pool_settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a call of max pooling that are not the default."""
    given = dict(zip(_POOL_SETTINGS, args[1:], strict=False)) | kwargs
    return {key: given[key] for key in _POOL_SETTINGS if given.get(key)}


def _without_overlap(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Tensor] | None:
    """Return max pooling of copies of overlapping windows side by side: captum's rule takes one maximum for a
    number."""
    if name != "max_pool2d":
        return None
    image, settings = args[0], _pool_settings(args, kwargs)
    kernel, padding, dilation = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (settings["kernel_size"], settings.get("padding", 0), settings.get("dilation", 1))
    )
    stride = settings.get("stride", kernel)
    stride = (stride, stride) if isinstance(stride, int) else tuple(stride)
    if all(step >= size for step, size in zip(stride, kernel, strict=True)) and dilation == (1, 1):
        return None

    def pooled() -> Tensor:
        size = F.max_pool2d(image.detach(), **settings).shape[-2:]
        edges = list[int]()
        for axis in (1, 0):  # the last one first
            reach = (size[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
            edges += [padding[axis], max(0, reach - padding[axis] - image.shape[axis - 2])]
        padded = F.pad(image, edges, value=float(image.detach().amin()) - 1)  # never the maximum
        windows = F.unfold(padded, kernel, dilation, stride=stride)  # (B, C * k * k, P * Q)
        windows = windows.unflatten(1, (image.shape[1], -1)).transpose(2, 3).flatten(2)
        out: Tensor = F.max_pool1d(windows, kernel[0] * kernel[1]).unflatten(2, tuple(size))
        return out

    return pooled


def signed_lrp(probe: Probe) -> Tensor:
    """Return (B, K, C, H, W) relevances, whose sum is the score but for what biases take."""
    from captum.attr import LRP

    def attribute(job: Job) -> Tensor:
        def score(logits: Tensor) -> Tensor:
            if has_torch_function_unary(logits):  # one function to the rules
                found: Tensor = handle_torch_function(score, (logits,), logits)
                return found
            return job.score(logits)

        calls = FunctionCalls(lambda images: score(job.logits(images)), _with_rule, job.image)
        found: Tensor = LRP(calls).attribute(job.image)
        return found

    try:
        return _attributions(probe, attribute)
    except NoRule as error:
        raise ConfigError(
            f"lrp has no rule for {error}, which {type(probe.net.model).__name__} applies to what it "
            "computes from the image: use 'integrated-gradients'."
        ) from None


def _with_rule(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], varied: list[Tensor]
) -> nn.Module | None:
    """Return a module with the rule of this function; None if it moves numbers."""
    from captum.attr._utils.lrp_rules import EpsilonRule, IdentityRule

    if name in _MOVES.split():
        return None
    call, sizes = nn.Identity(), {tensor.numel() for tensor in varied}
    if name in ACTIVATIONS:
        call.rule = IdentityRule()
    elif name in _LINEAR.split() or (name in _PRODUCTS.split() and len(varied) == 1):
        call.rule = EpsilonRule()
    elif name in _SCALINGS.split() and len(sizes) == len(varied):
        call.rule = EpsilonRule()
        call.gated = True  # type: ignore[assignment]  # squeeze and excitation: the gate is a weight
    else:
        raise NoRule(name.strip("_"))
    return call


@dataclass
class Job:
    """The score of one class of one image, whose pixels are to be explained."""

    probe: Probe
    index: int
    k: int
    image: Tensor  # (1, C, H, W)
    batch: int  # images per pass
    report: Callable[[int], None]

    def scores(self, images: Tensor) -> Tensor:
        """Return (R,) scores of other images."""
        return self.score(self.logits(images))

    def logits(self, images: Tensor) -> Tensor:
        """Return (R, C) logits of other images."""
        self.report(len(images))
        return self.probe.image_logits(images)

    def score(self, logits: Tensor) -> Tensor:
        """Return (R,) scores of (R, C) logits."""
        return self.probe.score_of(logits, self.index, self.k)

    def check_complete(self, found: Tensor, advice: str) -> None:
        """Warn if the attributions do not add up to the score's difference from that of the reference."""
        with torch.no_grad():
            pair = torch.cat([self.image.detach(), torch.zeros_like(self.image)]).requires_grad_()
            score, reference = self.score(self.probe.image_logits(pair)).tolist()
        total = float(found.sum(dtype=torch.float64))
        if abs(total - (score - reference)) > INCOMPLETE * max(abs(score - reference), INCOMPLETE):
            log.warning(
                "image %d: attributions add up to %.3g, and the score changes from the reference by %.3g: %s",
                self.index,
                total,
                score - reference,
                advice,
            )


def _attributions(probe: Probe, attribute: Callable[[Job], Tensor]) -> Tensor:
    """Return (B, K, C, H, W) attributions of each class, computed once where an image has a class twice."""
    images = probe.forward_pass.images
    usual = probe.batch_size or usual_batch(images)
    batch = smaller_batch(min(usual, probe.samples), probe.net, images, grad="images")
    found, done = dict[tuple[int, int], Tensor](), 0
    chosen = probe.classes.tolist()
    count = sum(len(set(classes)) for classes in chosen)

    def report(images: int) -> None:
        nonlocal done
        done += images
        report_share(done / (count * probe.samples))

    for i, classes in enumerate(chosen):
        for k, number in enumerate(classes):
            if (i, number) not in found:
                image = images[i : i + 1].detach().clone().requires_grad_()
                found[i, number] = at_least_float32(
                    attribute(Job(probe, i, k, image, batch, report)).detach()
                )[0]
    return torch.stack([torch.stack([found[i, number] for number in chosen[i]]) for i in range(len(images))])


def _pixels(attributions: Tensor) -> Tensor:
    """Return (B, K, H, W) the sums over channels of absolute attributions."""
    return attributions.abs().sum(2)
