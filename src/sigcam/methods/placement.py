"""From the part of a picture that a network sees to the picture: maps and boxes in the picture's pixels."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.memory import check_memory
from sigcam.core.types import GridSize, ImageSize
from sigcam.methods.postprocess import resize

Region = tuple[float, float, float, float]  # xyxy, in pixels of a picture


def shrunk(picture: Image.Image, region: Region, most: int | None) -> tuple[Image.Image, Region]:
    """Return the picture with at most `most` pixels a side, and the region in its pixels."""
    if most is None or max(picture.size) <= most:
        return picture, region
    factor = most / max(picture.size)
    width, height = (max(1, round(side * factor)) for side in picture.size)
    sx, sy = width / picture.width, height / picture.height
    x0, y0, x1, y1 = region
    small = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
    return small, (x0 * sx, y0 * sy, x1 * sx, y1 * sy)


def place_map(values: Tensor, size: ImageSize, region: Region, *, unit: bool) -> Tensor:
    """Return a map (H, W) of the region of a picture at the picture's size; it is 0 outside the region.

    Args:
        unit: keep the map's maximum, which the resize may step over.
    """
    x0, y0, x1, y1 = map(round, region)
    grid = GridSize(max(1, y1 - y0), max(1, x1 - x0))
    shown = f"a map of {size.width} x {size.height} pixels"
    check_memory(12 * max(grid[0] * grid[1], size[0] * size[1]), shown, "make the picture smaller")
    part = resize(values.detach().float()[None, None], grid, "bilinear")[0, 0]
    if unit:
        part = (part * (values.max() / part.max().clamp(min=1e-12))).clamp(max=1)
    if (x0, y0, *reversed(grid)) == (0, 0, *size):
        return part
    placed = torch.zeros(size.height, size.width, device=part.device)
    top, left, bottom, right = max(y0, 0), max(x0, 0), min(y1, size.height), min(x1, size.width)
    placed[top:bottom, left:right] = part[top - y0 : bottom - y0, left - x0 : right - x0]
    return placed


def place_boxes(boxes: Tensor, grid: GridSize, size: ImageSize, region: Region) -> Tensor:
    """Return the boxes (G, 4) of a map in whole pixels of the picture; boxes of nothing stay zero."""
    x0, y0, x1, y1 = region
    ends = torch.tensor([x1, y1], dtype=torch.float64) - 1
    start, scale = torch.tensor([x0, y0]), torch.tensor([(x1 - x0) / grid.width, (y1 - y0) / grid.height])
    corners = boxes.cpu().double().reshape(-1, 2, 2)  # (G, 2, xy)
    last = torch.tensor([grid.width - 1, grid.height - 1])
    placed = torch.where(corners >= last, ends, corners * scale + start).round()
    placed = placed.clamp(min=torch.zeros(2), max=torch.tensor([size.width - 1, size.height - 1]))
    return torch.where(boxes.cpu().any(1, keepdim=True), placed.reshape(-1, 4).long(), 0)


def fade_unseen(image: Image.Image, region: Sequence[float]) -> Image.Image:
    """Return the image, pale outside the region."""
    x0, y0, x1, y1 = map(round, region)
    if x0 <= 0 and y0 <= 0 and x1 >= image.width and y1 >= image.height:
        return image
    box = (max(x0, 0), max(y0, 0), min(x1, image.width), min(y1, image.height))
    pale = Image.blend(image, Image.new("RGB", image.size, "white"), 0.6)
    pale.paste(image.crop(box), box[:2])
    return pale
