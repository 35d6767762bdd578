"""Images of a coloured patch on a dull background, and a small classifier that was trained on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.tiny import Gap

COLOURS = torch.tensor([[2.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0], [1.6, 1.6, 0]])


def patches(count: int = 280, seed: int = 0) -> TensorDataset:
    """Images (count, 3, 16, 16) with one patch of 6 x 6 pixels in the colour of their class, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 16, 16, generator=generator) * 0.1 + 0.2
    labels = torch.arange(count) % 4
    for i in range(count):
        top, left = torch.randint(0, 11, (2,), generator=generator).tolist()
        x[i, :, top : top + 6, left : left + 6] += COLOURS[labels[i]][:, None, None]
    return TensorDataset(x, labels)


def empty(count: int = 100, seed: int = 1) -> Tensor:
    """The same images without a patch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, generator=generator) * 0.1 + 0.2


class Mlp(Gap):
    """Pools by 2 x 2, and reads the pooled grid with two layers."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes, channels=12)
        self.fc = nn.Sequential(nn.Linear(12 * 16, 16), nn.GELU(), nn.Linear(16, classes))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(nn.functional.avg_pool2d(self.body(x), 2).flatten(1))
        return logits


def trained(make: type[Gap] = Gap) -> nn.Module:
    """The classifier, trained for a moment."""
    torch.manual_seed(0)
    model = make().train()
    x, labels = patches()[:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval()


def patch_network(make: type[Gap] = Gap) -> DualBranch:
    """A network with a new branch beside the trained classifier."""
    return attach(trained(make), example=patches(1)[:][0])
