"""From one forward pass to low-resolution maps (Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sigcam.methods.map_config import MapConfig
from sigcam.methods.probe import Probe, no_autocast
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import as_target
from sigcam.network.dual import DualBranch, ForwardPass

WEIGHTS_AT_ONCE = 2**25  # numbers in the weights of as many classes as are asked together


@dataclass(frozen=True)
class RawMaps:
    """Maps of one layer, before they are finished, and what a blank one may be due to."""

    maps: Tensor  # M (B, K, P, Q)
    positive_share: Tensor  # (B, K)
    dead: Tensor  # (B, K) all weights are zero
    denied: Tensor  # (B, K) no weight is positive


def draw_raw_maps(net: DualBranch, passage: ForwardPass, chosen: Tensor, how: MapConfig) -> RawMaps:
    """Weights by the method, clamped, times the features (Eq. 4), for as many classes at a time as fit."""
    method = METHODS[how.method]
    numbers = passage.features.numel() if not method.light else passage.features[..., 0, 0].numel()
    parts = []
    for classes in chosen.clamp(min=0).split(max(1, WEIGHTS_AT_ONCE // numbers), 1):
        probe = Probe(
            net,
            passage,
            branch=how.branch,
            classes=classes,
            target=as_target(how.target, how.branch),
            batch_size=how.batch_size,
            top_n=how.top_n,
        )
        weights = method(probe).detach()  # w  (B, K, N, 1, 1) or (B, K, N, P, Q)
        if method.gives == "maps":
            ones = torch.ones_like(classes, dtype=weights.dtype)
            parts.append(RawMaps(weights.expand(-1, classes.shape[1], -1, -1), ones, ones == 0, ones == 0))
            continue
        if how.scale == "raw" and method.gives == "gradients":
            weights = weights * probe.cells  # a gradient per cell, as a weight of the mean
        if weights.stride(-1) == weights.stride(-2) == 0:
            weights = weights[..., :1, :1]  # one view for all cells
        kept = weights.clamp(min=0) if how.clamp else weights  # keep evidence, drop inhibition
        with no_autocast(weights):
            maps, share = _combined(kept, probe.features), _positive_share(weights, probe.features)
        flat = weights.flatten(2)
        dead, denied = ~flat.any(2), ~(flat > 0).any(2)
        parts.append(RawMaps(*(v.expand(*classes.shape, *v.shape[2:]) for v in (maps, share, dead, denied))))
    return RawMaps(
        *(torch.cat(values, 1) for values in zip(*(vars(part).values() for part in parts), strict=True))
    )


def _combined(weights: Tensor, features: Tensor) -> Tensor:
    """M (B, K, P, Q), the sum over channels of weights times features (Eq. 4): one product where the weights
    are the same for all cells."""
    if weights.shape[-2:] != (1, 1):
        return (weights * features).sum(2)
    flat = features[:, 0].flatten(2)  # (B, N, P*Q)
    rows = weights[..., 0, 0]  # (B, K, N), or (1, K, N) for all images
    maps = (flat.mT @ rows[0].mT).mT if len(rows) == 1 else rows @ flat
    return maps.reshape(len(flat), -1, *features.shape[-2:])


def _positive_share(weights: Tensor, features: Tensor) -> Tensor:
    """(B, K) sum of positive parts over sum of sizes of all weight x feature products."""
    if weights.shape[-2:] != (1, 1):
        products = (weights * features).flatten(2)
        return products.clamp(min=0).sum(2) / products.abs().sum(2).clamp(min=1e-30)
    up, size = features.clamp(min=0).sum((-2, -1)), features.abs().sum((-2, -1))  # (B, 1, N)
    weights = weights[..., 0, 0]
    positive = (weights.clamp(min=0) @ up.mT + (-weights).clamp(min=0) @ (size - up).mT)[..., 0]
    return positive / (weights.abs() @ size.mT)[..., 0].clamp(min=1e-30)
