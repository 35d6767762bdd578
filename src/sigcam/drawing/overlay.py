"""Draw maps, which are (H, W) tensors, boxes, outlines, captions and legends on PIL images; arrange grids."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor

from sigcam.core.memory import check_memory
from sigcam.metrics.boxes import foreground

# Evenly spaced colours to interpolate: lightness rises steadily in HEAT and peaks at zero in SIGNED.
HEAT = ("000004", "1b0c41", "4a0c6b", "781c6d", "a52c60", "cf4446", "ed6925", "fb9b06", "f7d13d", "fcffa4")
SIGNED = ("2a4b9b", "5a7fc4", "98b6de", "d3dff0", "f7f7f7", "f6d9cc", "e8a48c", "c9604f", "9c1f2e")
TRUTH_COLOUR = "#e53935"  # of ground-truth boxes
INK, PAPER = (28, 28, 30), (255, 255, 255)
MIN_WIDTH = 200  # pixels that the numbers of a colour bar need
font = ImageFont.load_default  # Pillow's own, which has no bold: headings are larger instead


def colours(values: Tensor, *, signed: bool = False, peak: float | None = None) -> Image.Image:
    """A map as colours: [0, 1] from dark to bright; a signed map is white at zero and has full colour at
    ± `peak`, by default its largest absolute value."""
    array = values.detach().float().cpu().numpy()
    if signed:
        array = (array / (peak or largest(values) or 1.0) + 1) / 2
    table = np.array([ImageColor.getrgb(f"#{code}") for code in (SIGNED if signed else HEAT)])
    positions = np.linspace(0, 1, len(table))
    channels = [np.interp(array, positions, table[:, channel]) for channel in range(3)]
    return Image.fromarray(np.stack(channels, -1).round().astype(np.uint8))


def largest(values: Tensor) -> float:
    """The largest absolute value of a signed map, where its colours end."""
    return float(values.detach().float().abs().max())


def gradient(*, signed: bool = False) -> str:
    """The colours from the lowest value to the highest, as a CSS background."""
    return f"linear-gradient(to right, {', '.join(f'#{code}' for code in (SIGNED if signed else HEAT))})"


RANGE = "of this map's range"
PROBABILITY = "probability 0.5"  # the middle of maps in probabilities


def ends(peak: float | None, unit: str = RANGE) -> tuple[str, str, str]:
    """Labels of a colour bar: left, middle, right; in logits for a signed map that ends at `peak`, else in
    `unit`, from 0 to 1."""
    if peak is None:
        return "0", unit, "1"
    return (f"-{peak:.3g}", "0 logits", f"+{peak:.3g}") if peak else ("", "0 logits", "")


def overlay(
    image: Image.Image, values: Tensor, *, signed: bool = False, peak: float | None = None
) -> Image.Image:
    """The image with its map on it: opaque where the map is strong, transparent where it is zero."""
    size = (values.shape[1], values.shape[0])
    check_memory(150 * values.numel(), f"an overlay of {size[0]} x {size[1]} pixels", "draw a smaller map")
    base = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR), dtype=float)
    strength: NDArray[Any] = values.detach().float().abs().cpu().numpy()
    strength = np.clip(strength / (peak or strength.max() or 1.0) if signed else strength, 0, 1)
    alpha = (0.75 * strength)[..., None]
    grey = (base.mean(2, keepdims=True) + base) / 2  # half the colour, so that the map's stands out
    coloured = np.asarray(colours(values, signed=signed, peak=peak), dtype=float)
    mixed = grey * (1 - alpha) + coloured * alpha
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


def with_boxes(image: Image.Image, boxes: Sequence[Sequence[float]], colour: str = "#00c853") -> Image.Image:
    """The image with xyxy boxes, drawn with a dark edge so that they show on any background."""
    image = image.copy()
    pen = ImageDraw.Draw(image)
    width = max(2, image.width // 110)
    for x0, y0, x1, y1 in boxes:
        if x1 > x0 and y1 > y0:
            pen.rectangle((x0, y0, x1, y1), outline="black", width=width + 1)
            pen.rectangle((x0, y0, x1, y1), outline=colour, width=width)
    return image


def with_outline(image: Image.Image, mask: NDArray[np.uint8], colour: str = "#ffeb3b") -> Image.Image:
    """The image with the border of the mask's object (value 1) drawn on it."""
    resized = Image.fromarray((mask == 1).astype(np.uint8)).resize(image.size, Image.Resampling.NEAREST)
    inside = np.asarray(resized) > 0
    interior = sliding_window_view(np.pad(inside, 2), (5, 5)).all((2, 3))
    drawn = np.asarray(image.convert("RGB")).copy()
    drawn[inside & ~interior] = ImageColor.getrgb(colour)
    return Image.fromarray(drawn)


def with_contour(
    image: Image.Image, values: Tensor, threshold: float, colour: str = "#00e5ff", *, absolute: bool = False
) -> Image.Image:
    """The image with the outline of the pixels above `threshold` of a unit map's peak, or of 1."""
    inside = (values > threshold if absolute else foreground(values[None], threshold)[0]).cpu().numpy()
    return with_outline(image, inside.astype(np.uint8), colour)


def with_strips(
    image: Image.Image,
    *,
    caption: str = "",
    legend: bool = False,
    peak: float | None = None,
    unit: str = RANGE,
) -> Image.Image:
    """The image, enlarged if too narrow for text, with a caption and the colour bar of `peak` below."""
    factor = -(-MIN_WIDTH // image.width)  # rounded up
    size = (image.width * factor, image.height * factor)
    parts = [image.convert("RGB").resize(size, Image.Resampling.NEAREST)]
    parts += [_caption_strip(caption, size[0])] if caption else []
    parts += [colour_bar(size[0], peak, unit)] if legend else []
    return Image.fromarray(np.vstack([np.asarray(part) for part in parts]))


def colour_bar(width: int, peak: float | None = None, unit: str = RANGE) -> Image.Image:
    """A colour bar with its labels; in logits for a signed map that ends at `peak`, else in `unit`."""
    edge, face = 8, font(12)
    bar = Image.new("RGB", (width, 40), PAPER)
    ramp = torch.linspace(0 if peak is None else -1, 1, width - 2 * edge).expand(12, -1)
    bar.paste(colours(ramp, signed=peak is not None), (edge, 6))
    pen = ImageDraw.Draw(bar)
    places = (edge, width // 2, width - edge)
    for text, x, anchor in zip(ends(peak, unit), places, ("la", "ma", "ra"), strict=True):
        pen.text((x, 21), text, INK, face, anchor=anchor)
    return bar


def _caption_strip(text: str, width: int) -> Image.Image:
    """A strip of this width with lines of text."""
    edge, face = 8, font(14)
    strip = Image.new("RGB", (width, 12 + 20 * (text.count("\n") + 1)), PAPER)
    for number, line in enumerate(_truncate(text, face, width - 2 * edge).split("\n")):
        ImageDraw.Draw(strip).text((edge, 6 + 20 * number), line, INK, face)
    return strip


def grid(
    rows: Sequence[Sequence[Image.Image]],
    *,
    columns: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
    title: str = "",
    cell: int = 224,
) -> Image.Image:
    """Images in rows under column headings, each with a caption below, on white."""
    gap, heading, text = 14, font(18), font(14)
    depth = max((c.count("\n") + 1 for row in captions or [] for c in row if c), default=0)
    top = (44 if title else 0) + gap + 26 * (max(c.count("\n") for c in columns) + 1)
    step = cell + gap + 20 * depth
    page = Image.new("RGB", (gap + (cell + gap) * len(columns), top + step * len(rows)), PAPER)
    pen = ImageDraw.Draw(page)
    if title:
        face = font(21)
        pen.text((gap, 14), _truncate(title, face, page.width - 2 * gap), INK, face)
    for column, name in enumerate(columns):
        middle = gap + column * (cell + gap) + cell // 2
        pen.text((middle, top - 8), _truncate(name, heading, cell), INK, heading, anchor="md", align="center")
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            x, y = gap + c * (cell + gap), top + r * step
            page.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.BILINEAR), (x, y))
            if captions and captions[r][c]:
                lines = _truncate(captions[r][c], text, cell)
                pen.multiline_text((x, y + cell + 3), lines, INK, text, spacing=3)
    return page


def _truncate(text: str, face: Any, width: int) -> str:
    """Each line shortened with an ellipsis to fit the width."""
    lines = []
    for line in text.split("\n"):
        while line and face.getlength(line) > width:
            line = line.removesuffix("…")[:-1].rstrip() + "…"
        lines.append(line)
    return "\n".join(lines)
