"""Preprocessing inside an exported graph: pictures of any size, resized to the bit as Pillow does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigcam.core.errors import ConfigError
from sigcam.models.preprocess import Preprocess

FRACTION_BITS = 22  # of Pillow's weights for 8-bit pictures
HIGH_PART = 2.0**11


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution with a = -1/2."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {  # of a distance >= 0, and how far it reaches
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
}


class PillowResize(nn.Module):
    """(B, H, W, 3) uint8 pictures to normalised (B, 3, height, width) tensors, as `Preprocess` makes them."""

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess
        name, resize = preprocess.interpolation, preprocess.resize
        if name not in FILTERS:
            raise ConfigError(
                f"pictures are resized by {name} interpolation, which a file cannot hold, only "
                f"{' and '.join(FILTERS)}: export without preprocessing (preprocess=False)."
            )
        sides = (resize, resize) if isinstance(resize, int) else resize
        if sides is not None and (sides[0] < preprocess.height or sides[1] < preprocess.width):
            raise ConfigError(
                f"pictures are resized to {resize} and cropped to {preprocess.height} x {preprocess.width}, "
                "which is larger: export without preprocessing (preprocess=False)."
            )
        for key, values in (("mean", preprocess.mean), ("std", preprocess.std)):
            self.register_buffer(key, torch.tensor(values, dtype=torch.float32)[:, None, None])

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the network's input (B, 3, height, width)."""
        (top, _, rows), (left, _, columns) = self.placement(pictures)
        pixels = pictures.permute(0, 3, 1, 2).float()  # (B, 3, H, W)
        across = self._weights(pictures.shape[2], columns, left, self.preprocess.width)
        down = self._weights(pictures.shape[1], rows, top, self.preprocess.height)
        high, low = (pixels @ each.mT for each in across)
        pixels = _rounded(high, low)  # Pillow keeps 8 bits between the passes
        high, low = (each @ pixels for each in down)
        pixels = _rounded(high, low) / 255
        pixels = pixels.flip(1) if self.preprocess.bgr else pixels
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return (pixels - mean) / std

    def placement(self, pictures: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for rows and columns: the first one of the crop, the picture's size, and its size once
        resized; float64 scalars."""
        p, resize = self.preprocess, self.preprocess.resize
        sizes = [torch.full((), size, dtype=torch.float64) for size in pictures.shape[1:3]]
        crop = (p.height, p.width)
        if isinstance(resize, int):
            short, long = torch.minimum(*sizes), torch.maximum(*sizes)
            other = (resize * long / short).floor()
            resized = [torch.where(size == short, float(resize), other) for size in sizes]
        else:
            resized = [torch.full_like(s, float(n)) for s, n in zip(sizes, resize or crop, strict=True)]
        starts = [((whole - kept) / 2).round() for whole, kept in zip(resized, crop, strict=True)]
        return list(zip(starts, sizes, resized, strict=True))

    def _weights(self, pixels: int, resized: Tensor, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The weights (count, pixels) of an axis, from `first` on of the resized picture, in two parts whose
        products with pixels float32 adds exactly: whole multiples of 2^-11, and the rest."""
        kernel, reach = FILTERS[self.preprocess.interpolation]
        scale = pixels / resized
        stretch = scale.clamp(min=1)  # a smaller picture averages over more pixels
        centre = (torch.arange(count, dtype=torch.float64)[:, None] + first + 0.5) * scale
        numbers = torch.arange(pixels, dtype=torch.float64)
        low = (centre - reach * stretch + 0.5).clamp(min=0).floor()
        high = (centre + reach * stretch + 0.5).floor()
        weights = kernel(((numbers + 0.5 - centre) / stretch).abs())
        weights = torch.where((numbers >= low) & (numbers < high), weights, 0.0)
        weights = weights / weights.sum(1, keepdim=True)
        unit = 2.0**FRACTION_BITS
        weights = torch.sign(weights) * (weights.abs() * unit + 0.5).floor() / unit  # as Pillow rounds them
        high = (weights * HIGH_PART).floor() / HIGH_PART
        return high.float(), (weights - high).float()


def _rounded(high: Tensor, low: Tensor) -> Tensor:
    """The sum of both parts as a grey level, a half rounded up."""
    whole = high.floor()
    return (whole + (high - whole + low + 0.5).floor()).clamp(0, 255)
