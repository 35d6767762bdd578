"""Compute raw maps, at the size of the features, from one forward pass (Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sigcam.methods.map_config import MapConfig
from sigcam.methods.probe import Probe, no_autocast
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import as_target
from sigcam.network.dual import DualBranch, ForwardPass

MAX_WEIGHTS = 2**25  # numbers in the weights of the classes that are computed together


@dataclass(frozen=True)
class RawMaps:
    """Maps of one layer before post-processing, and what may explain a blank one."""

    maps: Tensor  # M (B, K, P, Q)
    positive_share: Tensor  # (B, K)
    all_zero: Tensor  # (B, K) every weight is zero
    none_positive: Tensor  # (B, K) no weight is positive

    def blank_reason(self, image: int, k: int, clamp: bool) -> str:
        """Say why the finished map is blank."""
        maps = self.maps[image, k]
        if not bool(torch.isfinite(maps).all()):
            return "its values are not finite: check the images and the model's weights"
        if bool(self.all_zero[image, k]):
            return "no gradient reaches the layer: name another one in attach(model, layer=...)"
        if clamp and bool(self.none_positive[image, k]):
            return "no channel has a positive weight, and clamping keeps positive ones only: see scale='raw'"
        if bool((maps <= 0).all()):
            return "all evidence is negative and the ReLU removes it: see scale='raw', or the sigmoid branch"
        return "it is constant"


def draw_raw_maps(net: DualBranch, forward_pass: ForwardPass, classes: Tensor, config: MapConfig) -> RawMaps:
    """Return the weighted sums of features (Eq. 4) for (B, K) classes, as many at a time as fit in memory."""
    features = forward_pass.features
    numbers = features[..., 0, 0].numel() if METHODS[config.method].light else features.numel()
    parts = [
        _draw_part(net, forward_pass, part, config)
        for part in classes.clamp(min=0).split(max(1, MAX_WEIGHTS // numbers), 1)
    ]
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return RawMaps(*(torch.cat(values, 1) for values in columns))


def _draw_part(net: DualBranch, forward_pass: ForwardPass, classes: Tensor, config: MapConfig) -> RawMaps:
    method, target = METHODS[config.method], as_target(config.target, config.branch)
    probe = Probe(
        net,
        forward_pass,
        branch=config.branch,
        classes=classes,
        target=target,
        batch_size=config.batch_size,
        top_n=config.top_n,
    )
    weights = method(probe).detach()  # w  (B, K, N, 1, 1) or (B, K, N, P, Q)
    if method.gives == "maps":
        ones = torch.ones_like(classes, dtype=weights.dtype)
        return RawMaps(weights.expand(-1, classes.shape[1], -1, -1), ones, ones == 0, ones == 0)
    if config.scale == "raw" and method.gives == "gradients":
        weights = weights * probe.cells  # from a gradient per cell to the weight of the mean
    if weights.stride(-1) == weights.stride(-2) == 0:
        weights = weights[..., :1, :1]  # the same for all cells
    clamped = weights.clamp(min=0) if config.clamp else weights  # keep evidence, drop inhibition
    with no_autocast(weights):
        maps, share = _weighted_sum(clamped, probe.features), _positive_share(weights, probe.features)
    flat = weights.flatten(2)
    values = maps, share, ~flat.any(2), ~(flat > 0).any(2)
    return RawMaps(*(v.expand(*classes.shape, *v.shape[2:]) for v in values))


def _weighted_sum(weights: Tensor, features: Tensor) -> Tensor:
    """Return M (B, K, P, Q), the sum over channels of weights times features (Eq. 4); one matrix product if
    the weights are the same for all cells."""
    if weights.shape[-2:] != (1, 1):
        return (weights * features).sum(2)
    flat = features[:, 0].flatten(2)  # (B, N, P*Q)
    rows = weights[..., 0, 0]  # (B, K, N), or (1, K, N) for all images
    maps = (flat.mT @ rows[0].mT).mT if len(rows) == 1 else rows @ flat
    return maps.reshape(len(flat), -1, *features.shape[-2:])


def _positive_share(weights: Tensor, features: Tensor) -> Tensor:
    """Return (B, K) the positive part of all weight x feature products, as a fraction of their sizes."""
    if weights.shape[-2:] != (1, 1):
        products = (weights * features).flatten(2)
        return products.clamp(min=0).sum(2) / products.abs().sum(2).clamp(min=1e-30)
    positive, size = features.clamp(min=0).sum((-2, -1)), features.abs().sum((-2, -1))  # (B, 1, N)
    weights = weights[..., 0, 0]
    share = (weights.clamp(min=0) @ positive.mT + (-weights).clamp(min=0) @ (size - positive).mT)[..., 0]
    return share / (weights.abs() @ size.mT)[..., 0].clamp(min=1e-30)
