"""Small networks in float64 for the tests of methods, where F is in each, and each as a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.methods.explainer import explain
from sigcam.methods.registry import METHODS as REGISTERED
from sigcam.methods.targets import Branch
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.method_oracles import GRADIENT_METHODS, OTHER_METHODS, Array, Plain
from support.nets import PlainVit
from support.oracles import path_a, path_b
from support.tiny import Gap, Normed, Vgg

METHODS = (*GRADIENT_METHODS, *OTHER_METHODS)
BRANCHES: tuple[Branch, ...] = ("sigmoid", "softmax", "centred")
CHOSEN = [0, 3]  # the class of each of two images


class Spelled(Normed):
    """The same with a module where F is, for a plain forward hook."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn1(self.conv1(x))))
        x = self.act(F.relu(self.bn2(self.conv2(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Signed(Gap):
    """GAP and a linear layer on features of either sign."""

    def __init__(self, classes: int = 4, channels: int = 6) -> None:
        super().__init__(classes, channels)
        self.body[1] = nn.Tanh()


@dataclass(frozen=True)
class Case:
    """A network, an image size that is not square, and where F is in it."""

    make: Callable[[], nn.Module]
    size: tuple[int, int]
    layer: str
    fold: Callable[[Tensor], Tensor] = lambda output: output


CASES = {
    "gap": Case(Gap, (16, 24), "body"),
    "signed": Case(Signed, (16, 24), "body"),
    "vgg": Case(Vgg, (8, 32), "features.4"),
    "normed": Case(Normed, (16, 24), "act"),
    "vit": Case(  # a class token and a register before 4 x 6 patches
        lambda: PlainVit((16, 24), patch=4, registers=1),
        (16, 24),
        "layers.1.norm1",
        lambda tokens: tokens[2:].T.unflatten(1, (4, 6)),
    ),
}


def fitted(model: nn.Module, size: tuple[int, int], seed: int = 0) -> DualBranch:
    """A network in float64 with a branch of random weights that counts as fitted, and logits of some size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):  # as trained: else its channels' sum is zero everywhere
                module.weight.uniform_(0.5, 1.5, generator=generator)
    net = attach(model, example=torch.randn(1, 3, *size, generator=generator))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    net.fitted = True
    return net.to(torch.float64)


@cache
def network(name: str, seed: int = 0) -> DualBranch:
    torch.manual_seed(seed)
    return fitted(CASES[name].make(), CASES[name].size, seed)


def pictures(name: str, count: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(count, 3, *CASES[name].size, generator=generator, dtype=torch.float64)


def plain(net: DualBranch, branch: Branch, name: str) -> Plain:
    """The user's model as it is, or with the branch in the place of its head, or with its last layer
    centred."""
    model = copy.deepcopy(net.model).eval().requires_grad_(True)
    if branch == "sigmoid":
        setattr(model, net.split.heads[0], copy.deepcopy(net.sigmoid.copies[0]).eval())
    elif branch == "centred":
        last = model.get_submodule(net.split.last[0])
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight -= last.weight.mean(0)
            last.bias -= last.bias.mean()
    if type(model) is Normed:
        model.__class__ = Spelled
        model.act = nn.Identity()
    return Plain(model, CASES[name].layer, net.split.last[0], CASES[name].fold)


def close(got: Tensor | Array, expected: Array, tolerance: float) -> bool:
    """Equal to within the tolerance times the largest value."""
    return bool(np.abs(np.asarray(got) - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-300))


def quick(method: str) -> dict[str, int]:
    """Few samples, for methods that take any."""
    return {"samples": 6} if REGISTERED[method].samples else {}


def raw(net: DualBranch, x: Tensor, method: str, **options: Any) -> Tensor:
    return explain(net, x, method, **{"scale": "raw", "size": "features", **options}).maps


def linear_layer(net: DualBranch, branch: Branch) -> nn.Linear:
    found = net.last_layer("sigmoid" if branch == "sigmoid" else "softmax")
    assert isinstance(found, nn.Linear)
    return found


def unit(low: Array, name: str, method: str = "") -> Array:
    """The low map finished at image size, as PROTOCOL.md 4.3."""
    return (path_a if method == "cam" else path_b)(low, *CASES[name].size)


def ours(method: str, name: str, classes: list[int] = CHOSEN, **options: Any) -> Array:
    options = {"branch": "softmax", "clamp": False, **options}
    maps: Array = explain(network(name), pictures(name), method, classes=classes, **options).maps.numpy()
    return maps


def differ(one: Array, other: Array, by: float = 1e-3) -> bool:
    """Whether the maps of every image differ by more than that somewhere."""
    return all(np.abs(a - b).max() > by for a, b in zip(one, other, strict=True))
