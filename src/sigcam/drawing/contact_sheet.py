"""A contact sheet: some pictures of a data set with their boxes and masks, to see whether they fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.sample import Sample, Samples
from sigcam.drawing.overlay import font, grid, with_boxes, with_outline

GROUND = (236, 236, 238)
BOX, OBJECT = "#e53935", "#ffeb3b"  # red, yellow


def contact_sheet(
    samples: Samples, *, count: int = 24, columns: int = 6, cell: int = 224, seed: int = 0, title: str = ""
) -> Image.Image:
    """Pictures drawn at random, each with boxes in red, its object's outline in yellow, class and id below.

    Pictures keep their shape. Those that cannot be read make room for others.
    """
    order = np.random.default_rng(seed).permutation(len(samples))
    shown = list[tuple[int, Image.Image]]()
    for index in map(int, order):
        if len(shown) == count:
            break
        try:
            shown.append((index, annotated(samples[index], cell)))
        except (DataError, OSError):
            continue
    if not shown:
        raise DataError(f"none of the {len(samples)} pictures can be read: there is nothing to show.")
    shown.sort(key=lambda pair: pair[0])
    wide = min(columns, len(shown))
    rows = [shown[i : i + wide] for i in range(0, len(shown), wide)]
    return grid(
        [[picture for _, picture in row] for row in rows],
        columns=[""] * wide,
        captions=[[_caption(samples[index], samples.classes, cell) for index, _ in row] for row in rows],
        title=title,
        cell=cell,
    )


def annotated(sample: Sample, cell: int) -> Image.Image:
    """The picture in a square of `cell` pixels, its shape kept, with its boxes and its mask's outline."""
    picture = sample.open()
    width, height = sample.size or picture.size  # of the original: the file may be a squashed copy
    scale = cell / max(width, height)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    picture = picture.resize(small, Image.Resampling.LANCZOS)
    if sample.open_mask is not None:
        picture = with_outline(picture, sample.open_mask(), OBJECT)
    sx, sy = small[0] / width, small[1] / height
    boxes = [  # x1 and y1 are the last pixel inside
        (x0 * sx, y0 * sy, min((x1 + 1) * sx, small[0]) - 1, min((y1 + 1) * sy, small[1]) - 1)
        for x0, y0, x1, y1 in sample.boxes or ()
    ]
    page = Image.new("RGB", (cell, cell), GROUND)
    page.paste(with_boxes(picture, boxes, BOX), ((cell - small[0]) // 2, (cell - small[1]) // 2))
    return page


def _caption(sample: Sample, classes: Sequence[str], width: int) -> str:
    """The class, in two lines where it is long, and the file's name."""
    words = ["no label"] if sample.label is None else classes[sample.label].split()
    fits = [n for n in range(1, len(words) + 1) if font(14).getlength(" ".join(words[:n])) <= width]
    first = fits[-1] if fits else len(words)
    name = "\n".join(" ".join(part) for part in (words[:first], words[first:]) if part)
    return f"{name}\n{sample.id.rsplit('/', 1)[-1]}"
