"""Fold: how a layer's output becomes (B, N, P, Q) and back; Place: at which call of which layer that
happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.types import GridSize

AxisOrder = Literal["NCHW", "NHWC", "NLC", "LNC"]  # here N is the batch, C the channels, L the tokens


@dataclass(frozen=True)
class FeatureLayout:
    """How a layer's output folds to (B, N, P, Q): its layout, tokens before the grid, and the grid probed."""

    layout: AxisOrder
    grid: GridSize
    image: GridSize
    prefix: int = 0

    def __call__(self, output: Tensor, image: GridSize) -> Tensor:
        """The output as (B, N, P, Q), for an input of `image` (height, width) pixels."""
        if self.layout == "NCHW":
            return output
        if self.layout == "NHWC":
            return output.permute(0, 3, 1, 2)
        tokens = (output if self.layout == "NLC" else output.transpose(0, 1))[:, self.prefix :]  # (B, P*Q, N)
        rows, columns = self.grid_at(tokens.shape[1], image)
        return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)

    def grid_at(self, tokens: int, image: GridSize) -> GridSize:
        """(P, Q) of a sequence of `tokens` grid tokens: the probed grid, scaled as the image was."""
        if tokens == self.grid[0] * self.grid[1] and image == self.image:
            return self.grid
        wanted = self.grid[0] * image[0] / self.image[0]
        divisors = (rows for rows in range(1, tokens + 1) if tokens % rows == 0)
        rows = min(divisors, key=lambda rows: abs(rows - wanted))
        return GridSize(rows, tokens // rows)

    def one_image(self, output: Tensor, index: int) -> Tensor:
        """The layer's output for one image of the batch, as a batch of one."""
        return output.narrow(1 if self.layout == "LNC" else 0, index, 1)

    def undone(self, maps: Tensor, like: Tensor) -> Tensor:
        """What the layer would return for (R, N, P, Q) features; `like`, one image's output, gives the tokens
        before the grid."""
        if self.layout == "NCHW":
            return maps
        if self.layout == "NHWC":
            return maps.permute(0, 2, 3, 1)
        tokens = maps.flatten(2).transpose(1, 2)  # (R, P*Q, N)
        before = (like if self.layout == "NLC" else like.transpose(0, 1))[:, : self.prefix]
        tokens = torch.cat([before.expand(len(maps), -1, -1), tokens], 1)
        return tokens if self.layout == "NLC" else tokens.transpose(0, 1)


@dataclass(frozen=True)
class FeaturePoint:
    """Where features leave a network: a module's output at its `call`-th call of a pass, or what the
    functional activation right after it returns, and how that folds."""

    layer: str
    call: int
    activation: bool
    fold: FeatureLayout
