"""Shift of the softmax head: a constant added to every weight changes maps but no probability (Eq. 8)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sigcam.methods.targets import at_least_float32, class_logits
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight


def weight_std(net: DualBranch) -> float | None:
    """Return the standard deviation of the softmax head's weights, the unit of a shift.

    None if the head has one class or is not global average pooling and a linear layer.
    """
    layer = _softmax_layer(net) if net.classes > 1 else None
    return None if layer is None else float(layer[0].std())


def shift_head(net: DualBranch, forward_pass: ForwardPass, delta: float) -> tuple[DualBranch, ForwardPass]:
    """Return the network and its pass with `delta` added to every weight of the softmax head.

    The head must be global average pooling and a linear layer: its maps need only the last layer.
    """
    layer = _softmax_layer(net)
    assert layer is not None
    shifted_layer = nn.Module()
    shifted_layer.weight, shifted_layer.bias = layer[0] + delta, layer[1]
    *parents, leaf = net.split.last[0].split(".")
    root = parent = nn.Module()
    for name in parents:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, shifted_layer)
    pooled = at_least_float32(forward_pass.features).mean((2, 3))  # (1, N)
    logits = forward_pass.softmax_logits.detach() + delta * pooled.sum(1, keepdim=True)
    return net.with_model(root), replace(forward_pass, softmax_logits=logits)


@torch.no_grad()
def probabilities(net: DualBranch, forward_pass: ForwardPass, delta: float = 0.0) -> Tensor:
    """Return the softmax probabilities (C,) of the shifted head; (2,) for a single logit.

    The change is computed in float64, so that rounding is not mistaken for an effect of the shift.
    """
    logits = forward_pass.softmax_logits.detach().double()
    if delta and (layer := _softmax_layer(net)) is not None:
        pooled = forward_pass.features.detach().double().mean((2, 3))  # (1, N)
        weight = layer[0].double()
        logits = logits + pooled @ (weight + delta).T - pooled @ weight.T
    if net.classes == 1:
        logits = class_logits(logits) / 2  # the softmax of these is the sigmoid
    return logits.softmax(1)[0]


def _softmax_layer(net: DualBranch) -> tuple[Tensor, Tensor] | None:
    """Return weight (C, N) and bias (C,) of a softmax head that is global average pooling and linear."""
    layer = linear_weight(net.last_layer("softmax")) if "softmax" in net.linear else None
    return None if layer is None else (layer[0].detach(), layer[1].detach())
