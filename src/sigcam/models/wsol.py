"""The paper's backbones: VGG-16, ResNet-50 and InceptionV3 with finer feature maps (PROTOCOL 1.1, 1.2).

Plain names are for gradient methods, `-cam` for vanilla CAM (global average pooling and one linear layer);
`-28` has feature maps of 28 x 28 instead of 14 x 14 for images of 224 pixels, `-7` of 7 x 7, as published.
`resnet50-v1` is ResNet-50 as first published: a stage's stride is in its first convolution, not its second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VGG, get_model_weights, inception_v3, resnet50
from torchvision.models.inception import BasicConv2d, InceptionA, InceptionC
from torchvision.models.vgg import make_layers

from sigcam.core.errors import ModelError
from sigcam.models.state_dict import load_weights

IMAGENET_CLASSES = 1000
VGG_LAYERS = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512]


@dataclass(frozen=True)
class Backbone:
    """A network and the published weights it starts from."""

    build: Callable[[int], nn.Module]  # from a number of classes to a network with random weights
    source: str  # name of the original network: torchvision's, if it has weights for it
    old_file: str | None  # former name of torchvision's weights file; None if it has none
    has_head: bool  # whether the published weights include a head for 1000 classes
    head_prefixes: tuple[str, ...]  # of the parameters that are new for any other number of classes

    def initial_state(
        self, model: nn.Module, published: Mapping[str, Tensor], classes: int
    ) -> dict[str, Tensor]:
        """Return a state dict for the model: published tensors, and the model's own for new parameters."""
        own, state = model.state_dict(), dict(published)
        new = () if self.has_head and classes == IMAGENET_CLASSES else self.head_prefixes
        if self.source == "vgg16":  # leaving out a pool shifts the indices of the layers, not their order
            convolutions = [state.pop(key) for key in _convolution_keys(state)]
            state |= dict(zip(_convolution_keys(own), convolutions, strict=True))
        state = {k: t for k, t in state.items() if not k.startswith(("AuxLogits.", *new))}
        if not self.has_head:  # the layers after the features do not exist here
            state = {key: tensor for key, tensor in state.items() if key in own}
        return state | {key: tensor for key, tensor in own.items() if key.startswith(new)}


class Vgg(VGG):  # type: ignore[misc]
    """VGG-16 without its last max pooling; features are averaged to 7 x 7 for the three linear layers."""

    def __init__(self, classes: int, *, fine: bool) -> None:
        super().__init__(_vgg_features(fine), classes)
        self.avgpool = nn.AdaptiveAvgPool2d(7)


class CamVgg(nn.Module):
    """VGG-16 without its last max pooling; one more convolution, global average pooling, one linear layer."""

    def __init__(self, classes: int, *, fine: bool) -> None:
        super().__init__()
        self.features = _vgg_features(fine)
        self.conv6 = nn.Conv2d(512, 1024, 3, padding=1)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1024, classes)
        _init_convolutions(self, partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"))
        _init_linear(self.fc)

    def forward(self, images: Tensor) -> Tensor:
        features = self.relu(self.conv6(self.features(images)))  # (B, 1024, P, Q)
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


class CamInception(nn.Sequential):
    """InceptionV3 up to Mixed_6e without its last stride; two more convolutions, one linear layer."""

    def __init__(self, classes: int, *, fine: bool) -> None:
        super().__init__()
        halve = partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True)
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, kernel_size=3, stride=2, padding=1)
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, kernel_size=3)
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, kernel_size=3, padding=1)
        self.maxpool1 = halve(padding=1)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, kernel_size=1)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, kernel_size=3)
        self.maxpool2 = halve(padding=1)
        self.Mixed_5b = InceptionA(192, pool_features=32)
        self.Mixed_5c = InceptionA(256, pool_features=64)
        self.Mixed_5d = InceptionA(288, pool_features=64)
        self.maxpool3 = nn.Identity() if fine else halve()
        self.Mixed_6a = FlatInceptionB(288)
        self.Mixed_6b = InceptionC(768, channels_7x7=128)
        self.Mixed_6c = InceptionC(768, channels_7x7=160)
        self.Mixed_6d = InceptionC(768, channels_7x7=160)
        self.Mixed_6e = InceptionC(768, channels_7x7=192)
        self.SPG_A3_1b = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(768, 1024, 3, padding=1), nn.ReLU())
        self.SPG_A3_2b = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(1024, 1024, 3, padding=1), nn.ReLU())
        self.dropout = nn.Dropout(0.5)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        # Pooling before the 1x1 convolution gives the same logits up to rounding.
        self.SPG_A4 = nn.Conv2d(1024, classes, 1)
        _init_convolutions(self, nn.init.xavier_uniform_)

    def forward(self, images: Tensor) -> Tensor:
        for module in self:
            images = module(images)
        return images.flatten(1)


class FlatInceptionB(nn.Module):
    """InceptionV3's Mixed_6a with stride 1 and padding 1 instead of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(channels, 384, kernel_size=3, padding=1)
        self.branch3x3dbl_1 = BasicConv2d(channels, 64, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, kernel_size=3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat((self.branch3x3(x), double, self.pool(x)), 1)


def _convolution_keys(state: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of VGG's convolutions, in order."""
    names = [key for key in state if key.startswith("features.")]
    return sorted(names, key=lambda key: (int(key.split(".")[1]), key))


def _vgg_features(fine: bool) -> nn.Sequential:
    """Return the 13 convolutions with the first four max poolings, or three if `fine`."""
    layers: nn.Sequential = make_layers([*VGG_LAYERS[:13], *VGG_LAYERS[14:]] if fine else VGG_LAYERS)
    return layers


def _init_convolutions(model: nn.Module, init_weight: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            init_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _init_linear(layer: nn.Linear) -> None:
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)


def _resnet(classes: int, *, fine: bool, v1: bool = False, native: bool = False) -> nn.Module:
    """Return torchvision's ResNet-50 without the stride of layer4 and, if `fine`, of layer3.

    Args:
        v1: strides in a stage's first convolution, and Keras' epsilon: the form of Keras' weights.
        native: all strides as published.
    """
    norm: Any = partial(nn.BatchNorm2d, eps=1e-3) if v1 else nn.BatchNorm2d
    model: Any = resnet50(weights=None, num_classes=classes, norm_layer=norm)
    for block in (model.layer2[0], model.layer3[0], model.layer4[0]) if v1 else ():
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    flat = () if native else (model.layer3[0], model.layer4[0]) if fine else (model.layer4[0],)
    for block in flat:
        for convolution in (block.conv1, block.conv2, block.downsample[0]):
            convolution.stride = (1, 1)
        block.stride = 1
    _init_linear(model.fc)
    return model  # type: ignore[no-any-return]


def _inception(classes: int) -> nn.Module:
    """Return torchvision's InceptionV3 without its auxiliary head and without scaling of the input."""
    options: dict[str, Any] = {"aux_logits": False, "transform_input": False, "init_weights": False}
    model: Any = inception_v3(weights=None, num_classes=classes, **options)
    nn.init.trunc_normal_(model.fc.weight, std=0.1, a=-2, b=2)
    return model  # type: ignore[no-any-return]


_resnet_v1 = partial(_resnet, v1=True)
_VGG: tuple[str, str | None] = ("vgg16", "vgg16-397923af.pth")
_RESNET: tuple[str, str | None] = ("resnet50", "resnet50-19c8e357.pth")
_RESNET_V1: tuple[str, str | None] = ("resnet50-v1", None)
_INCEPTION: tuple[str, str | None] = ("inception_v3", "inception_v3_google-1a9a5a14.pth")
WSOL_BACKBONES = {
    f"{name}{suffix}": Backbone(partial(build, fine=bool(suffix)), *source, has_head, head_prefixes)
    for name, build, source, has_head, head_prefixes in (
        ("vgg16", Vgg, _VGG, True, ("classifier.",)),
        ("vgg16-cam", CamVgg, _VGG, False, ("conv6.", "fc.")),
        ("resnet50", _resnet, _RESNET, True, ("fc.",)),
        ("resnet50-cam", _resnet, _RESNET, True, ("fc.",)),
        ("resnet50-v1", _resnet_v1, _RESNET_V1, True, ("fc.",)),
        ("resnet50-v1-cam", _resnet_v1, _RESNET_V1, True, ("fc.",)),
        ("inception_v3-cam", CamInception, _INCEPTION, False, ("SPG_",)),
    )
    for suffix in ("", "-28")
} | {
    "resnet50-v1-7": Backbone(partial(_resnet_v1, fine=False, native=True), *_RESNET_V1, True, ("fc.",)),
    "inception_v3": Backbone(_inception, *_INCEPTION, True, ("fc.",)),
}


def build_wsol(
    name: str, num_classes: int | None, published: Callable[..., Mapping[str, Tensor]] | None
) -> nn.Module:
    """Return the backbone, with random weights or those that `published(preset, old file name)` returns.

    For another number of classes than ImageNet's, everything after the features is new (PROTOCOL 1.3).
    """
    spec, backbone = f"wsol:{name}", WSOL_BACKBONES.get(name)
    if backbone is None:
        raise ModelError(
            f"no backbone of the paper is called {name!r}: choose one of {', '.join(WSOL_BACKBONES)}."
        )
    if published and num_classes is None and not backbone.has_head:
        remedy = "train one with `sigcam train-classifier`, give --weights (weights=), or num_classes=N"
        raise ModelError(f"{spec} has no published head: {remedy}.")
    if published and backbone.old_file is None:
        raise ModelError(
            f"torchvision has no weights of {spec}: give --weights imagenet, or a file (weights=)."
        )
    classes = num_classes or IMAGENET_CLASSES
    model = backbone.build(classes)
    if published:
        preset = get_model_weights(backbone.source).IMAGENET1K_V1
        state = backbone.initial_state(model, published(preset, backbone.old_file), classes)
        load_weights(model, state, source=preset.url, target=spec, num_classes=num_classes)
    return model
