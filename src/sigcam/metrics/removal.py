"""ROAD: the class's score while pixels are removed, and what replaces them (Rong et al., 2022)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.metrics.base import Ids, ImageMetric, image_names, same_length, unit

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the pixels that are removed
NEIGHBOUR_WEIGHTS = ((1 / 12, 1 / 6, 1 / 12), (1 / 6, 0.0, 1 / 6), (1 / 12, 1 / 6, 1 / 12))
RESIDUAL, MAX_STEPS = 1e-6, 1000  # at which the solver stops, in the images' unit


class RoadLeast(ImageMetric):
    """Mean probability of the class with 10% to 90% of pixels removed, least relevant first (ROAD)."""

    value_dtype = torch.float64

    def update(self, scores: Tensor, ids: Ids = None) -> None:
        """Add (B, S) probabilities, one for each fraction of removed pixels."""
        names = image_names(scores, ids, self.images)
        scores = unit(scores, "B, S", "scores", names, self.device)
        self.add(scores.double().mean(1), ids)


class RoadMost(RoadLeast):
    """Mean probability of the class with 10% to 90% of pixels removed, most relevant first; lower is better
    (ROAD)."""

    higher_is_better = False


def removal_curves(
    score: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    classes: Tensor,
    *,
    fractions: Sequence[float] = FRACTIONS,
    batch_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Probability of each image's class with fractions of its pixels removed, lowest map values first, and
    highest first, both (B, S), as in ROAD (Rong et al., 2022).

    Args:
        score: returns class probabilities (K, C) of (K, channels, H, W) images.
        images: (B, channels, H, W), as `score` takes them.
        maps: (B, H, W); pixels of equal value are taken in reading order.
    """
    names = image_names(images, None, torch.zeros(()))
    same_length(maps, "maps", names)
    same_length(classes, "classes", names)
    pixels = images.shape[-2:].numel()
    if maps.shape[1:] != images.shape[-2:] or not fractions or not 0 < min(fractions) <= max(fractions) < 1:
        sizes = f"maps {tuple(maps.shape)}, images {tuple(images.shape)}, fractions {tuple(fractions)}"
        raise DataError(f"maps must be as large as images and fractions between 0 and 1: {sizes}.")
    maps, classes = maps.to(images.device), classes.to(images.device)
    curves = list[Tensor]()
    with torch.no_grad():
        for descending in (False, True):
            order = maps.flatten(1).argsort(dim=1, descending=descending, stable=True)
            ranks = order.argsort(dim=1).view_as(maps)  # 0 for the pixel that goes first
            scores = list[Tensor]()
            for fraction in fractions:
                for i in torch.arange(len(images), device=images.device).split(batch_size):
                    imputed = impute(images[i], ranks[i] < round(fraction * pixels))
                    scores.append(score(imputed).gather(1, classes[i][:, None])[:, 0])
            curves.append(torch.cat(scores).view(len(fractions), len(images)).T)
    return curves[0], curves[1]


def impute(images: Tensor, removed: Tensor, *, noise: float = 0.01, seed: int = 0) -> Tensor:
    """Return images (B, channels, H, W) with the removed pixels (B, H, W) replaced: each by the weighted mean
    of its neighbours, direct ones by 1/6 and diagonal ones by 1/12, at the border of those there are, plus
    Gaussian noise. The equations of all removed pixels are solved together, by conjugate gradients."""
    planes, gone = images.flatten(0, 1)[:, None], removed[:, None].repeat_interleave(images.shape[1], 0)
    planes = planes if planes.dtype == torch.float64 else planes.float()
    kernel = planes.new_tensor(NEIGHBOUR_WEIGHTS)[None, None]
    gone = gone.to(planes)  # (B * channels, 1, H, W)
    degree = F.conv2d(torch.ones_like(planes[:1]), kernel, padding=1)

    def left(values: Tensor) -> Tensor:  # what the equations' left sides make of the removed pixels' values
        return gone * (degree * values - F.conv2d(values, kernel, padding=1))

    def dot(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum((1, 2, 3), keepdim=True)

    known = planes * (1 - gone)
    values = gone * known.sum((1, 2, 3), keepdim=True) / (1 - gone).sum((1, 2, 3), keepdim=True).clamp(min=1)
    residual = gone * F.conv2d(known, kernel, padding=1) - left(values)
    direction = scaled = residual / degree
    size = dot(residual, scaled)
    for _ in range(MAX_STEPS):
        if float(residual.abs().amax()) <= RESIDUAL:
            break
        moved = left(direction)
        step = size / dot(direction, moved).clamp(min=1e-30)
        values, residual = values + step * direction, residual - step * moved
        scaled = residual / degree
        previous, size = size, dot(residual, scaled)
        direction = scaled + size / previous.clamp(min=1e-30) * direction
    generator = torch.Generator().manual_seed(seed)
    drawn = noise * torch.randn(images.shape[1:], generator=generator).to(planes)
    imputed = (known + values).view(images.shape).to(images) + (drawn * removed[:, None]).to(images)
    return torch.where(removed[:, None], imputed, images)
