"""Preprocessing: from an image to the tensor that a classifier takes."""

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
    """An image to a normalized (3, height, width) tensor: squashed or, with `resize`, center-cropped."""

    height: int = 224
    width: int = 224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    resize: int | tuple[int, int] | None = None  # shorter edge or (height, width) before the crop
    bgr: bool = False

    def picture(self, image: Image.Image) -> Image.Image:
        """Return the part of the image that the network sees, resized, in RGB."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        target = (self.height, self.width) if self.resize is None else self.resize
        size = [target] if isinstance(target, int) else list(target)
        # Pillow resizes, as in the models' own presets: a uint8 tensor would differ by one level at times.
        image = F.resize(image.convert("RGB"), size, interpolation=InterpolationMode(self.interpolation))
        if self.resize is not None:
            image = F.center_crop(image, [self.height, self.width])
        return image

    def region(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return which part of an image of this (width, height) the network sees, xyxy in its pixels; it
        reaches beyond the image where the crop is larger."""
        width, height = size
        if self.resize is None:
            return 0.0, 0.0, float(width), float(height)
        if isinstance(self.resize, int):
            long = int(self.resize * max(size) / min(size))
            rows, columns = (long, self.resize) if width <= height else (self.resize, long)
        else:
            rows, columns = self.resize
        top, left = round((rows - self.height) / 2), round((columns - self.width) / 2)
        sx, sy = width / columns, height / rows
        return left * sx, top * sy, (left + self.width) * sx, (top + self.height) * sy

    def __call__(self, image: Image.Image) -> Tensor:
        from torchvision.transforms.v2 import functional as F

        pixels = F.pil_to_tensor(self.picture(image))
        pixels = F.to_dtype(pixels, torch.float32, scale=True)  # (3, H, W) in [0, 1]
        pixels = pixels.flip(0) if self.bgr else pixels
        normalized: Tensor = F.normalize(pixels, list(self.mean), list(self.std))
        return normalized


def declared_transform(model: nn.Module) -> Transform | None:
    """Return the preprocessing that a model declares: its `.transform`, or timm's config, squashing."""
    transform = getattr(model, "transform", None)
    if callable(transform) and transform not in list(model.modules()):  # it may be a layer
        return transform  # type: ignore[no-any-return]
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, Mapping) and {"input_size", "mean", "std", "interpolation"} <= set(config):
        return replace(timm_preprocess(model), resize=None)
    return None


def timm_preprocess(model: nn.Module) -> Preprocess:
    """Return timm's evaluation preprocessing of a model."""
    from timm.data import resolve_model_data_config

    data = resolve_model_data_config(model)
    height, width = data["input_size"][1:]
    scaled = (math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"]))
    resize = scaled if data["crop_mode"] == "squash" else max(scaled)
    return Preprocess(height, width, tuple(data["mean"]), tuple(data["std"]), data["interpolation"], resize)


def hf_preprocess(settings: Mapping[str, Any], config: Any) -> Preprocess:
    """Convert the settings of a transformers image processor; without them, use ImageNet's."""
    get = settings.get
    size, fixed = get("size") or {}, getattr(config, "image_size", None) or 224
    height, width = (fixed, fixed) if isinstance(fixed, int) else tuple(fixed)[-2:]
    if not settings:
        return Preprocess(height, width, resize=math.floor(height / 0.875))
    edge = size.get("shortest_edge")
    resize: int | tuple[int, int] | None = edge
    if get("do_center_crop"):
        height, width = settings["crop_size"]["height"], settings["crop_size"]["width"]
        resize = edge or (size["height"], size["width"])
    elif "height" in size:
        height, width = size["height"], size["width"]
    elif edge:  # ConvNeXt: crops a fraction of the edge below 384 pixels, squashes above
        height, width = edge, edge
        resize = int(edge / get("crop_pct", 1)) if edge < 384 else None
    # The model sees (255 f u - offset - mean) / std of a pixel u in [0, 1], rewritten as (u - mean') / std'.
    gain = 255 * (get("rescale_factor", 1 / 255) if get("do_rescale", True) else 1)
    offset = 1.0 if get("rescale_offset") else 0.0
    mean, std = [0.0] * 3, [1.0] * 3
    if get("do_normalize"):
        mean, std = settings["image_mean"], settings["image_std"]
    std = [s * s for s in std] if get("include_top") else std  # EfficientNet divides twice
    means, stds = tuple((m + offset) / gain for m in mean), tuple(s / gain for s in std)
    kernel = Image.Resampling.BILINEAR if get("resample") is None else Image.Resampling(settings["resample"])
    bgr = bool(get("do_flip_channel_order"))  # MobileViT
    return Preprocess(height, width, means, stds, kernel.name.lower(), resize, bgr)
