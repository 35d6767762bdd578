"""Preprocessing: from a picture to the tensor that a classifier takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Preprocess:
    """A picture to a normalised (3, height, width) tensor: squashed, or with `resize` cut from the middle."""

    height: int = 224
    width: int = 224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    resize: int | tuple[int, int] | None = None  # shorter edge, or (height, width), before the crop
    bgr: bool = False

    def picture(self, image: Image.Image) -> Image.Image:
        """What of a picture the network sees, (height, width) in RGB."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        target = (self.height, self.width) if self.resize is None else self.resize
        size = [target] if isinstance(target, int) else list(target)
        # PIL resizes, as in the models' own presets: a uint8 tensor would be off by one here and there.
        image = F.resize(image.convert("RGB"), size, interpolation=InterpolationMode(self.interpolation))
        seen: Image.Image = image if self.resize is None else F.center_crop(image, [self.height, self.width])
        return seen

    def __call__(self, image: Image.Image) -> Tensor:
        from torchvision.transforms.v2 import functional as F

        pixels = F.pil_to_tensor(self.picture(image))
        pixels = F.to_dtype(pixels, torch.float32, scale=True)  # (3, H, W) in [0, 1]
        pixels = pixels.flip(0) if self.bgr else pixels
        normalised: Tensor = F.normalize(pixels, list(self.mean), list(self.std))
        return normalised


def declared_transform(model: nn.Module) -> Transform | None:
    """The preprocessing that a model in memory carries: its own `.transform`, or timm's, squashing."""
    transform = getattr(model, "transform", None)
    if callable(transform) and transform not in list(model.modules()):  # a layer may bear that name
        return transform  # type: ignore[no-any-return]
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, Mapping) and {"input_size", "mean", "std", "interpolation"} <= set(config):
        return replace(_timm_preprocess(model), resize=None)
    return None


def _timm_preprocess(model: nn.Module) -> Preprocess:
    """timm's own evaluation preset of a model."""
    from timm.data import resolve_model_data_config

    data = resolve_model_data_config(model)
    height, width = data["input_size"][1:]
    scaled = (math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"]))
    resize = scaled if data["crop_mode"] == "squash" else max(scaled)
    return Preprocess(height, width, tuple(data["mean"]), tuple(data["std"]), data["interpolation"], resize)


def _hf_preprocess(own: Mapping[str, Any], config: Any) -> Preprocess:
    """What a transformers image processor does, as numbers; without one, ImageNet's at the config's size."""
    size, fixed = own.get("size") or {}, getattr(config, "image_size", None) or 224
    height, width = (fixed, fixed) if isinstance(fixed, int) else tuple(fixed)[-2:]
    if not own:
        return Preprocess(height, width, resize=math.floor(height / 0.875))
    edge = size.get("shortest_edge")
    resize: int | tuple[int, int] | None = edge
    if own.get("do_center_crop"):
        height, width = own["crop_size"]["height"], own["crop_size"]["width"]
        resize = edge or (size["height"], size["width"])
    elif "height" in size:
        height, width = size["height"], size["width"]
    elif edge:  # ConvNeXt: the crop is a share of the edge, and from 384 on the picture is squashed
        height, width = edge, edge
        resize = int(edge / own.get("crop_pct", 1)) if edge < 384 else None
    # The model sees (255 f u - offset - mean) / std of a pixel u in [0, 1]: written as (u - mean') / std'.
    gain = 255 * (own.get("rescale_factor", 1 / 255) if own.get("do_rescale", True) else 1)
    offset = 1.0 if own.get("rescale_offset") else 0.0
    mean, std = (own["image_mean"], own["image_std"]) if own.get("do_normalize") else ([0.0] * 3, [1.0] * 3)
    std = [s * s for s in std] if own.get("include_top") else std  # EfficientNet divides twice
    mean, std = tuple((m + offset) / gain for m in mean), tuple(s / gain for s in std)
    kernel = Image.Resampling.BILINEAR if own.get("resample") is None else Image.Resampling(own["resample"])
    bgr = bool(own.get("do_flip_channel_order"))  # MobileViT
    return Preprocess(height, width, mean, std, kernel.name.lower(), resize, bgr)
