"""From low-resolution maps to score maps (PROTOCOL 4.3)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.methods.map_config import MapConfig, Scale
from sigcam.methods.raw_maps import RawMaps


def resize(maps: Tensor, size: GridSize, mode: Literal["bicubic", "bilinear"]) -> Tensor:
    """(B, K, P, Q) to (B, K, H, W), pixel centres aligned as OpenCV does."""
    if tuple(maps.shape[-2:]) == size:
        return maps
    return F.interpolate(maps, size, mode=mode, align_corners=False)


def unit_range(maps: Tensor, eps: float = 0.0) -> Tensor:
    """Each map's minimum to 0 and maximum to 1; a map that is constant or not finite becomes all zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    usable = torch.isfinite(high - low) & (high > low)  # the extremes of what holds a NaN are NaN
    span = torch.where(usable, high - low + eps, 1.0)
    return torch.where(usable, (maps - low) / span, 0.0)


def finish_maps(maps: Tensor, method: str, size: GridSize, scale: Scale) -> Tensor:
    """(B, K, P, Q) maps to score maps (PROTOCOL 4.3): path A for cam, path B for every other method."""
    if method == "cam":
        if scale == "raw":
            return resize(maps, size, "bicubic")
        varied = maps.amax((-2, -1), keepdim=True) > maps.amin((-2, -1), keepdim=True)
        maps = torch.where(varied, maps, 0.0)  # rounding in the resize would be stretched
        return unit_range(resize(maps, size, "bicubic"))
    if scale == "raw":
        return resize(maps, size, "bilinear")
    maps = unit_range(maps.relu(), eps=1e-7)
    maps = unit_range(resize(maps, size, "bilinear").relu(), eps=1e-7)
    return unit_range(maps)


def fuse_layers(layers: list[RawMaps], how: MapConfig, size: GridSize) -> Tensor:
    """(B, K, H, W) score maps of one layer, or of several in one: the mean of the layers' unit maps; for
    Layer-CAM the maximum, all but the last layer's scaled by tanh(2 M / max M) first (Jiang et al., 2021)."""
    if len(layers) == 1:
        return finish_maps(layers[0].maps, how.method, size, how.scale)
    if how.method != "layer-cam":
        units = [unit_range(layer.maps.relu(), eps=1e-7) for layer in layers]
        return unit_range(torch.stack([resize(maps, size, "bilinear") for maps in units]).mean(0))
    high = []
    for layer in layers:
        maps = layer.maps.relu()
        maps = maps / maps.amax((-2, -1), keepdim=True).clamp(min=1e-30)
        high.append(resize(maps if layer is layers[-1] else (2 * maps).tanh(), size, "bilinear"))
    return unit_range(torch.stack(high).amax(0))
