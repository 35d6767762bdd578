"""FeatureLayout folds a layer's output to (B, N, P, Q); FeaturePoint says which call of which layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.types import GridSize

AxisOrder = Literal["NCHW", "NHWC", "NLC", "LNC"]  # here N is the batch, C the channels, L the tokens


@dataclass(frozen=True)
class FeatureLayout:
    """The axis order of a layer's output, its number of tokens before the grid, and the grid it had when
    probed with an image of size `image`."""

    layout: AxisOrder
    grid: GridSize
    image: GridSize
    prefix: int = 0

    def __call__(self, output: Tensor, image: GridSize) -> Tensor:
        """Fold the output to (B, N, P, Q), for an input of `image` (height, width) pixels."""
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
        expected = self.grid[0] * image[0] / self.image[0]
        divisors = (rows for rows in range(1, tokens + 1) if tokens % rows == 0)
        rows = min(divisors, key=lambda rows: abs(rows - expected))
        return GridSize(rows, tokens // rows)

    @property
    def batch_axis(self) -> int:
        """The axis of the layer's output that holds the images."""
        return 1 if self.layout == "LNC" else 0

    def unfold(self, features: Tensor, like: Tensor) -> Tensor:
        """Turn (R, N, P, Q) features into the layer's own layout; the tokens before the grid come from
        `like`, its output for one image."""
        if self.layout == "NCHW":
            return features
        if self.layout == "NHWC":
            return features.permute(0, 2, 3, 1)
        tokens = features.flatten(2).transpose(1, 2)  # (R, P*Q, N)
        before = (like if self.layout == "NLC" else like.transpose(0, 1))[:, : self.prefix]
        tokens = torch.cat([before.expand(len(features), -1, -1), tokens], 1)
        return tokens if self.layout == "NLC" else tokens.transpose(0, 1)


@dataclass(frozen=True)
class FeaturePoint:
    """Where features are taken: a module's output at its `call`-th call of a pass, or what the functional
    activation right after it returns."""

    layer: str
    call: int
    activation: bool
    fold: FeatureLayout
