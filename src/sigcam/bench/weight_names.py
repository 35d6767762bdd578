"""Published weights in torchvision's names and layout, for images normalised by ImageNet's mean and std.

The publishers scale pixels differently. With x the normalised image, their input is `scale * x + shift` per
channel; both go into the first convolution, which is exact wherever its window holds no padding.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.models.preprocess import IMAGENET_MEAN, IMAGENET_STD

KERAS_MEAN = (123.68, 116.779, 103.939)  # of pixels from 0 to 255: red, green, blue
KERAS_SCALE = [255 * std for std in IMAGENET_STD]
KERAS_SHIFT = [255 * mean - keras for mean, keras in zip(IMAGENET_MEAN, KERAS_MEAN, strict=True)]
SLIM_SCALE = [255 / 128 * std for std in IMAGENET_STD]  # (pixel - 128) / 128
SLIM_SHIFT = [255 / 128 * mean - 1 for mean in IMAGENET_MEAN]
INCEPTION_EPS = 1e-3  # of its BatchNorm
QUANTIZED_KERNEL, FOLDED_BIAS = "/weights_quant/FakeQuantWithMinMaxVars", "/Conv2D_Fold_bias"
VGG_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # their places in torchvision's features


def fold_input(kernel: Tensor, scale: Sequence[float], shift: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the kernel (O, I, h, w) and bias (O,) that do to x what `kernel` does to scale * x + shift."""
    scales, shifts = (torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1) for each in (scale, shift))
    return (kernel * scales).float(), (kernel * shifts).sum((1, 2, 3)).float()


def resnet_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of Keras' ResNet-50; its strides are those of `wsol:resnet50-v1-7`."""
    state = dict[str, Tensor]()
    for name in (key.removesuffix("/kernel") for key in tensors if key.endswith("/kernel")):
        kernel, bias = tensors[f"{name}/kernel"], _named(tensors, f"{name}/bias")
        if name == "fc1000":
            state |= {"fc.weight": kernel.T.contiguous(), "fc.bias": bias}
            continue
        convolution, norm = _resnet_names(name)
        kernel = kernel.permute(3, 2, 0, 1).contiguous()  # (h, w, I, O) to (O, I, h, w)
        if name == "conv1":  # its input channels are blue, green, red
            kernel, added = fold_input(kernel.flip(1), KERAS_SCALE, KERAS_SHIFT)
            bias = bias + added
        keras_norm = "bn_conv1" if name == "conv1" else name.replace("res", "bn", 1)
        parts = ("gamma", "beta", "moving_mean", "moving_variance")
        gamma, beta, mean, variance = (_named(tensors, f"{keras_norm}/{part}") for part in parts)
        state[f"{convolution}.weight"] = kernel
        state |= _norm(norm, gamma, beta, mean - bias, variance)
    return state


def _resnet_names(name: str) -> tuple[str, str]:
    """Return torchvision's names of a Keras convolution and of the BatchNorm after it."""
    if name == "conv1":
        return "conv1", "bn1"
    found = re.fullmatch(r"res([2-5])([a-z])_branch(1|2([abc]))", name)
    if found is None:
        raise DataError(f"ResNet-50 has no layer {name}")
    block = f"layer{int(found[1]) - 1}.{ord(found[2]) - ord('a')}"
    if found[3] == "1":
        return f"{block}.downsample.0", f"{block}.downsample.1"
    number = ord(found[4]) - ord("a") + 1
    return f"{block}.conv{number}", f"{block}.bn{number}"


def inception_state(tensors: Mapping[str, Tensor], convolutions: Sequence[str]) -> dict[str, Tensor]:
    """Return the state dict of TF-slim's InceptionV3, whose BatchNorm is folded into its convolutions.

    Args:
        convolutions: torchvision's names in the model's order, which is the alphabetical order of TF-slim's.
    """
    ending = QUANTIZED_KERNEL
    names = sorted(key.removesuffix(ending) for key in tensors if key.endswith(ending))
    body, heads = [n for n in names if "/Logits/" not in n], [n for n in names if "/Logits/" in n]
    if len(body) != len(convolutions) or len(heads) != 1:
        found = f"{len(body)} convolutions and {len(heads)} heads"
        raise DataError(f"InceptionV3 has {len(convolutions)} convolutions and a head, not {found}")
    state = dict[str, Tensor]()
    for ours, theirs in zip(convolutions, body, strict=True):
        kernel = tensors[theirs + ending].permute(0, 3, 1, 2).contiguous()  # (O, h, w, I) to (O, I, h, w)
        bias = _named(tensors, theirs + FOLDED_BIAS)
        if ours == convolutions[0]:
            kernel, added = fold_input(kernel, SLIM_SCALE, SLIM_SHIFT)
            bias = bias + added
        state[f"{ours}.conv.weight"] = kernel
        one, zero = torch.ones_like(bias), torch.zeros_like(bias)
        state |= _norm(f"{ours}.bn", one, bias, zero, one - INCEPTION_EPS)  # does nothing but add the bias
    kernel, bias = tensors[heads[0] + ending], _named(tensors, f"{heads[0]}/Conv2D_bias")
    classes = slice(1, None)  # the first is no class of ImageNet
    return state | {"fc.weight": kernel.flatten(1)[classes].clone(), "fc.bias": bias[classes].clone()}


def unscaled_inception(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return InceptionV3's state dict for torchvision's `transform_input`, which gives it 2 * pixel - 1."""
    kernel, norm = "Conv2d_1a_3x3.conv.weight", "Conv2d_1a_3x3.bn.bias"
    scale = [1 / (2 * std) for std in IMAGENET_STD]
    shift = [(0.5 - mean) / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    folded, added = fold_input(state[kernel], scale, shift)
    return {**state, kernel: folded, norm: state[norm] + added}


def vgg_state(arrays: Any) -> dict[str, Tensor]:
    """Return the state dict of VGG-16's convolutions, pickled as kernels (h, w, I, O) and biases."""
    state = dict[str, Tensor]()
    try:
        for i, place in enumerate(VGG_CONVOLUTIONS):
            layer = arrays["VGG16_0"][f"Conv_{i}"]
            kernel = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1).contiguous()
            state |= {
                f"features.{place}.weight": kernel,
                f"features.{place}.bias": torch.from_numpy(layer["bias"]),
            }
    except (KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"it does not hold the convolutions of VGG-16: no {error}") from error
    return state


def _norm(name: str, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a BatchNorm under its name."""
    parts = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise DataError(f"there is no tensor {name}")
    return tensors[name]
