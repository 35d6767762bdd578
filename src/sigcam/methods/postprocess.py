"""Finish raw maps as score maps (PROTOCOL 4.3), and compare two of them."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.methods.registry import METHODS, MapConfig, Scale


def resize(maps: Tensor, size: GridSize, mode: Literal["bicubic", "bilinear"]) -> Tensor:
    """Resize (B, K, P, Q) maps to (B, K, H, W), with OpenCV's pixel alignment."""
    if tuple(maps.shape[-2:]) == size:
        return maps
    return F.interpolate(maps, size, mode=mode, align_corners=False)


def unit_range(maps: Tensor, eps: float = 0.0) -> Tensor:
    """Scale each map from 0 to 1; a map that is constant or not finite becomes all zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    usable = torch.isfinite(high - low) & (high > low)  # NaN values make the extremes NaN
    span = torch.where(usable, high - low + eps, 1.0)
    return torch.where(usable, (maps - low) / span, 0.0)


def finish_maps(maps: Tensor, method: str, size: GridSize, scale: Scale) -> Tensor:
    """Return (B, K, P, Q) maps as score maps (B, K, H, W), finished as the method asks (PROTOCOL 4.3)."""
    min_max = METHODS[method].finish == "min-max"
    shrinks = maps.shape[-2] >= size[0] and maps.shape[-1] >= size[1]
    if METHODS[method].gives == "pixels" and shrinks:  # else most pixels would be skipped
        maps = F.adaptive_avg_pool2d(maps, size)
    if scale != "unit":
        return resize(maps, size, "bicubic" if min_max and scale != "probability" else "bilinear")
    if min_max:  # path A
        varied = maps.amax((-2, -1), keepdim=True) > maps.amin((-2, -1), keepdim=True)
        maps = torch.where(varied, maps, 0.0)  # rounding in the resize would be stretched
        return unit_range(resize(maps, size, "bicubic"))
    maps = unit_range(maps.relu(), eps=1e-7)  # path B
    maps = unit_range(resize(maps, size, "bilinear").relu(), eps=1e-7)
    return unit_range(maps)


def fuse_layers(layers: list[Tensor], config: MapConfig, size: GridSize) -> Tensor:
    """Return (B, K, H, W) score maps of one layer or of several fused: the mean of the layers' unit maps,
    their product (RefineCAM; Domeniconi et al., 2026), or their maximum with all but the last layer scaled by
    tanh(2 M / max M) first (Layer-CAM; Jiang et al., 2021)."""
    if len(layers) == 1:
        return finish_maps(layers[0], config.method, size, config.scale)
    fusion = config.fusion or METHODS[config.method].fusion
    if fusion == "product":
        units = [finish_maps(maps, config.method, size, "unit") for maps in layers]
        return unit_range(torch.stack(units).prod(0))
    if fusion == "mean":
        units = [unit_range(maps.relu(), eps=1e-7) for maps in layers]
        return unit_range(torch.stack([resize(maps, size, "bilinear") for maps in units]).mean(0))
    peaks = [maps.amax((-2, -1), keepdim=True).clamp(min=1e-30) for maps in layers]
    *units, last = (maps.relu() / peak for maps, peak in zip(layers, peaks, strict=True))
    scaled = [resize(maps, size, "bilinear") for maps in (*((2 * unit).tanh() for unit in units), last)]
    return unit_range(torch.stack(scaled).amax(0))


def disagreement(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 minus the overlap of maps (..., H, W), each divided by its largest absolute value: the sum of
    absolute differences over the sum of maxima (of positive and of negative parts). 0 is equal, 1 is nothing
    in common; two blank maps are equal.

    For nearly equal maps it grows with their difference, where 1 minus the correlation grows with its square.
    """
    a, b = (maps.double().nan_to_num(0.0, 0.0, 0.0) for maps in (a, b))
    a, b = (maps / maps.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) for maps in (a, b))
    largest = torch.maximum(a.relu(), b.relu()) + torch.maximum((-a).relu(), (-b).relu())
    return (a - b).abs().sum((-2, -1)) / largest.sum((-2, -1)).clamp(min=1e-30)
