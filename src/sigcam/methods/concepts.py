"""factorize: what the features of several images have in common (deep feature factorisation)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sigcam.core.errors import ConfigError
from sigcam.core.types import GridSize
from sigcam.methods.inputs import ImageSource, as_batch
from sigcam.methods.postprocess import resize
from sigcam.methods.targets import at_least_float32
from sigcam.network.dual import DualBranch
from sigcam.network.image_errors import blame_images


@dataclass(frozen=True)
class Concepts:
    """Concepts in the features of a batch: where each one is, and which channels it stands for."""

    maps: Tensor  # (B, K, H, W) in [0, 1]; 1 is the strongest cell of a concept in all images
    vectors: Tensor  # (K, N) non-negative, of length 1, the concept that explains most first
    error: float  # share of the features' size that the concepts leave unexplained, in [0, 1]


def factorize(
    net: DualBranch,
    images: Tensor | ImageSource | Sequence[ImageSource],
    concepts: int = 8,
    *,
    layer: str | nn.Module | None = None,
    steps: int = 200,
    seed: int = 0,
) -> Concepts:
    """Return the concepts of a batch of images: non-negative factors of its features, by cell and by channel
    (Collins et al., 2018). A concept is the same thing in all images; negative features count as zero.

    Args:
        images: A preprocessed (B, C, H, W) batch, or PIL images or paths if `net.transform` is known.
        concepts: How many, K.
        layer: Another layer than the one that maps are drawn from, by name or itself.
        steps: Updates of the factors.
        seed: Random seed of the factors' first values.
    """
    batch, _ = as_batch(net, images)
    point = net.split.point if layer is None else net.feature_point(layer)
    with blame_images(net, batch), torch.no_grad():
        features = at_least_float32(net.run_at((point,), batch)[0].features.detach()).relu()
    count, channels, *grid = features.shape
    cells = features.movedim(1, -1).reshape(-1, channels)  # (B * P * Q, N)
    if isinstance(concepts, bool) or not isinstance(concepts, int) or not 1 <= concepts <= min(cells.shape):
        raise ConfigError(f"concepts is a whole number from 1 to {min(cells.shape)} here, not {concepts!r}.")
    where, vectors = nonnegative_factors(cells, concepts, steps=steps, seed=seed)
    left = cells - where @ vectors
    maps = where.view(count, *grid, concepts).movedim(-1, 1)
    maps = maps / maps.amax((0, 2, 3), keepdim=True).clamp(min=1e-30)
    error = float(left.norm() / cells.norm().clamp(min=1e-30))
    return Concepts(resize(maps, GridSize.of(batch), "bilinear"), vectors, error)


def nonnegative_factors(
    matrix: Tensor, count: int, *, steps: int = 200, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return non-negative H (L, K) and W (K, N), with rows of length 1, whose product is near a non-negative
    matrix (L, N), by multiplicative updates (Lee and Seung, 2001). The largest products come first."""
    generator = torch.Generator().manual_seed(seed)
    scale = (matrix.mean() / count).sqrt()
    left = torch.rand(len(matrix), count, generator=generator).to(matrix) * scale
    right = torch.rand(count, matrix.shape[1], generator=generator).to(matrix) * scale
    for _ in range(steps):
        left = left * (matrix @ right.T) / (left @ (right @ right.T)).clamp(min=1e-30)
        right = right * (left.T @ matrix) / ((left.T @ left) @ right).clamp(min=1e-30)
    lengths = right.norm(dim=1)
    left, right = left * lengths, right / lengths.clamp(min=1e-30)[:, None]
    order = (left.sum(0) * right.sum(1)).argsort(descending=True)
    return left[:, order], right[order]
