"""Tiny classifiers for the branch's own tests, each with one habit; and what a network must leave alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch

SIZE = 16


class Gap(nn.Module):
    """Convolution, ReLU module, global average, linear: the head of Eq. 3."""

    def __init__(self, classes: int = 4, channels: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x).mean((2, 3)))
        return logits


class Vgg(nn.Module):
    """Convolutions, max pooling, an MLP with dropout on the flattened map."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(8 * 4 * 4, 12), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(12, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class Normed(nn.Module):
    """BatchNorm and dropout in the trunk and in the head, both in train mode as made."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.drop = nn.Dropout2d(0.3)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.head = nn.Sequential(
            nn.Linear(8, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.5), nn.Linear(10, classes)
        )
        for name, tensor in self.state_dict().items():
            if "running_var" in name or (name.startswith("bn") and name.endswith("weight")):
                nn.init.uniform_(tensor, 0.5, 1.5)
            elif "running_mean" in name:
                nn.init.uniform_(tensor, -0.2, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class InPlace(nn.Module):
    """An in-place functional ReLU right after the last convolution."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x), inplace=True)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class OnPlace(Gap):
    """Changes its features in place, and when told to its input too."""

    greedy = False

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.sub_(0.1) if self.greedy else x - 0.1)
        features.mul_(2)
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits


class Probabilities(Gap):
    """Returns a softmax, by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(super().forward(x), dim=1)


class TwoHeads(Gap):
    """The mean of two heads' logits."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes)
        self.other = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.body(x).mean((2, 3))
        mean: Tensor = (self.fc(pooled) + self.other(pooled)) / 2
        return mean


class Failing(nn.Module):
    """Passes its input on, and raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.broken is not None:
            raise self.broken
        return x


def images(count: int = 3, seed: int = 0, size: int = SIZE) -> Tensor:
    """(B, 3, H, W) noise."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def attached(model: nn.Module, **options: Any) -> DualBranch:
    """A network around the model with a branch of random weights that counts as fitted."""
    net = attach(model, example=images(1), **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    net.fitted = True
    return net


def easy_data(count: int = 24, classes: int = 4, seed: int = 1) -> TensorDataset:
    """Images whose class is a colour and a brightness: any features tell them apart."""
    labels = torch.arange(count) % classes
    shift = torch.randn(classes, 3, 1, 1, generator=torch.Generator().manual_seed(seed)) * 2
    return TensorDataset(images(count, seed) * 0.3 + shift[labels], labels)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model, and about the process, that sigcam must leave alone."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[f"value of {name}"] = parameter.detach().clone()
        found[f"object {name}"] = id(parameter)
        found[f"requires_grad of {name}"] = parameter.requires_grad
        found[f"grad object of {name}"] = id(parameter.grad)
        found[f"grad of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    for name, module in model.named_modules():
        found[f"mode of {name}"] = module.training
        found[f"attributes of {name}"] = sorted(vars(module))
        found[f"type of {name}"] = type(module)
        for attribute, value in vars(module).items():
            if "hooks" in attribute:
                found[f"{attribute} of {name}"] = [(k, id(v)) for k, v in (value or {}).items()]
    found["global hooks"] = [
        len(value) for key, value in vars(torch.nn.modules.module).items() if key.endswith("_hooks")
    ]
    found["torch random"] = torch.get_rng_state()
    found["numpy random"] = repr(np.random.get_state())  # noqa: NPY002 (the global one is the point)
    found["python random"] = random.getstate()
    found["gradient mode"] = torch.is_grad_enabled()
    found["inference mode"] = torch.is_inference_mode_enabled()
    found["autocast cache"] = torch.is_autocast_cache_enabled()
    found["function modes"] = torch._C._len_torch_function_stack()
    return found


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Asserts that what happens inside leaves the model and the process as they were, raised or not."""
    before = state(model)
    try:
        yield
    finally:
        after = state(model)
        assert before.keys() == after.keys()
        for what, value in before.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, after[what]), what
            else:
                assert value == after[what], what
