"""Tiny classifiers as people write them, each with one habit; and what attaching must leave as it was."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convs(*widths: int, stride: int = 2) -> nn.Sequential:
    """Convolution, BatchNorm and ReLU for each step from one width to the next."""
    steps = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*steps)


class FunctionalRelu(nn.Module):
    """Activations and pooling are functions; the last layer before F is a BatchNorm."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class SharedRelu(FunctionalRelu):
    """One in-place ReLU module called after every layer."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__(classes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class HandSwish(FunctionalRelu):
    """x * sigmoid(x): a sigmoid follows the last layer, but is not its activation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x * torch.sigmoid(x)))
        return self.fc((torch.sigmoid(x) * x).mean((2, 3)))


class Residual(nn.Module):
    """An inline residual sum, with no block module that returns it."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem, self.conv, self.fc = convs(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(F.relu(x + self.conv(x)).mean((2, 3)))


class RawHead(nn.Module):
    """A head that is a module with bare parameters, and a norm of its own."""

    def __init__(self, channels: int, classes: int, norm: bool) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(channels, classes) * 0.1)
        self.offset = nn.Parameter(torch.randn(classes) * 0.1)
        self.norm = nn.LayerNorm(channels) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.kernel + self.offset


class RawParameters(nn.Module):
    """Ends in a RawHead."""

    def __init__(self, classes: int = 5, norm: bool = False) -> None:
        super().__init__()
        self.body, self.top = convs(3, 8, 12), RawHead(12, classes, norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x).mean((2, 3)))


class CosineHead(nn.Module):
    """Scaled cosines to class prototypes: a scale that must not start at zero."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, channels))
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, dim=1), F.normalize(self.prototypes, dim=1))


class Returns(nn.Module):
    """A plain classifier whose logits come back in some wrapping: `how` takes (logits, features)."""

    def __init__(self, how: Any, classes: int = 5, head: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.fc, self.how = convs(3, 8, 12), head or nn.Linear(12, classes), how

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return self.how(self.fc(features.mean((2, 3))), features)


WRAPPINGS: dict[str, Any] = {
    "tensor": lambda logits, features: logits,
    "tuple": lambda logits, features: (logits, features),
    "dict": lambda logits, features: {"features": features, "logits": logits},
    "nameless dict": lambda logits, features: {"class_scores": logits, "features": features},
    "object": lambda logits, features: SimpleNamespace(loss=None, logits=logits),
    "1x1 map": lambda logits, features: logits[:, :, None, None],
    "squeezed": lambda logits, features: logits[:, :, None, None].squeeze(),
}


class FrozenTrunk(nn.Module):
    """The trunk runs under no_grad (`how` = "no_grad"), is detached, or all of forward records nothing."""

    def __init__(self, how: str, classes: int = 5) -> None:
        super().__init__()
        self.body, self.fc, self.how = convs(3, 8, 12), nn.Linear(12, classes), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.how != "no_grad" and torch.is_grad_enabled()):
            x = self.body(x).mean((2, 3))
        if self.how == "detach":
            x = x.detach()
        with torch.set_grad_enabled(self.how != "everything" and torch.is_grad_enabled()):
            return self.fc(x)


class ConvThenMean(nn.Module):
    """A C-channel convolution, then the mean over cells: no module returns the logits."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body, self.last = convs(3, 8, 12), nn.Conv2d(12, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)).mean(dim=(2, 3))


class ReluAfterHead(nn.Module):
    """A head class with a hidden layer that calls a functional ReLU on its own logits."""

    class Head(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(12, 10), nn.Linear(10, classes)
            nn.init.constant_(self.out.bias, 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.out(F.relu(self.hidden(x))))

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body, self.head = convs(3, 8, 12), self.Head(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class FlatMlp(nn.Module):
    """An MLP on the flattened map: takes images of one size only."""

    def __init__(
        self, size: tuple[int, int] = (32, 32), channels: int = 3, last: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))
        cells = (size[0] // 4) * (size[1] // 4)
        self.classifier = nn.Sequential(nn.Linear(8 * cells, 16), nn.ReLU(), last or nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class PlainVit(nn.Module):
    """Patches by unfold and a linear layer, torch's encoder layers, a class token and `registers`."""

    def __init__(
        self,
        image: tuple[int, int],
        patch: int = 8,
        registers: int = 0,
        batch_first: bool = True,
        depth: int = 2,
    ) -> None:
        super().__init__()
        width, self.patch, self.batch_first = 16, patch, batch_first
        tokens = (image[0] // patch) * (image[1] // patch) + 1 + registers
        self.embed = nn.Linear(3 * patch * patch, width)
        self.extra = nn.Parameter(torch.randn(1, 1 + registers, width))
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.1)
        layers = (
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=batch_first, norm_first=True)
            for _ in range(depth)
        )
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, self.patch, stride=self.patch).transpose(1, 2))
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.position
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.norm(x[:, 0]))


class Encoder(nn.Module):
    """Convolutional patches and torch's TransformerEncoder, which has a fast path without gradient."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head, self.pooled = nn.Linear(16, 5), pooled

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
        return self.head(x.mean(1) if self.pooled else x[:, 0])


class SoftmaxVit(nn.Module):
    """A ViT whose attention has modules on (B, heads, L, L) scores, which look like a map and are none."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.to_qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
            self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)
            self.q_norm, self.k_norm = nn.LayerNorm(width // 2), nn.LayerNorm(width // 2)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.to_qkv(self.norm(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)  # (B, heads, L, width)
            scores = self.q_norm(q) @ self.k_norm(k).mT
            return x + (self.dropout(self.attend(scores)) @ v).transpose(1, 2).flatten(2)

    def __init__(self, size: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 16 * 16, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(self.Block(width), self.Block(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, 16, stride=16).transpose(1, 2))
        x = self.blocks(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
        return self.head(x[:, 0])


class SharedLayer(nn.Module):
    """One convolution used twice with the same weights."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem, self.block, self.fc = convs(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.block(self.stem(x)))
        return self.fc(F.relu(self.block(x)).mean((2, 3)))


class TwoStreams(nn.Module):
    """Two trunks side by side; `stem` gives them a common beginning, `heads` an output layer each."""

    def __init__(self, stem: bool = False, heads: bool = False, classes: int = 5) -> None:
        super().__init__()
        self.stem = convs(3, 3) if stem else nn.Identity()
        self.left, self.right = convs(3, 8), convs(3, 8)
        self.fc = nn.Linear(8 if heads else 16, classes)
        self.fc2 = nn.Linear(8, classes) if heads else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.left(x).mean((2, 3)), self.right(x).mean((2, 3))
        if self.fc2 is not None:
            return (self.fc(left) + self.fc2(right)) / 2
        return self.fc(torch.cat([left, right], 1))


class TwoViews(nn.Module):
    """One head, run on the image and on its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = convs(3, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.fc(self.body(view).mean((2, 3))) for view in (x, x.flip(-1)))


class Normalise(nn.Module):
    """Mean and standard deviation as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / 0.25


class Adapter(nn.Module):
    """A learnable 1x1 convolution before somebody else's model, registered after it."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model = model
        self.adapter = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.model(self.adapter(x))


def footprint(model: nn.Module) -> list[Any]:
    """What attaching must leave as it was: modes, hooks, flags, gradients and values of every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [(m.training, *(len(getattr(m, kind)) for kind in kinds)) for m in model.modules()]
    flags = [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()]
    buffers = [(b._version, b.sum().item()) for b in model.buffers()]
    return [modules, flags, buffers, torch.get_rng_state().sum().item(), torch.is_grad_enabled()]
