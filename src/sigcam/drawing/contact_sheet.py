"""Contact sheet: some images of a data set with their boxes and masks, to check the annotations."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.sample import Sample, Samples
from sigcam.drawing.overlay import TRUTH_COLOUR, font, grid, with_boxes, with_outline

GROUND = (236, 236, 238)


def contact_sheet(
    samples: Samples, *, count: int = 24, columns: int = 6, cell: int = 224, seed: int = 0, title: str = ""
) -> Image.Image:
    """Randomly chosen images, each with its boxes in red, its object's outline in yellow, class and id below.

    Images keep their aspect ratio; unreadable ones are replaced by others.
    """
    shown = dict[int, Image.Image]()
    for index in np.random.default_rng(seed).permutation(len(samples)).tolist():
        with suppress(DataError, OSError):
            shown[index] = annotated(samples[index], cell)
        if len(shown) == count:
            break
    if not shown:
        raise DataError(f"none of the {len(samples)} pictures can be read: there is nothing to show.")
    indices, wide = sorted(shown), min(columns, len(shown))
    rows = [indices[i : i + wide] for i in range(0, len(indices), wide)]
    images = [[shown[i] for i in row] for row in rows]
    captions = [[_sample_caption(samples[i], samples.classes, cell) for i in row] for row in rows]
    return grid(images, columns=[""] * wide, captions=captions, title=title, cell=cell)


def annotated(sample: Sample, cell: int) -> Image.Image:
    """The image in a square of `cell` pixels, with its aspect ratio, boxes and mask outline."""
    image = sample.open()
    width, height = sample.size or image.size  # of the original: the file may be a squashed copy
    scale = cell / max(width, height)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = image.resize(small, Image.Resampling.LANCZOS)
    if sample.open_mask is not None:
        image = with_outline(image, sample.open_mask())
    sx, sy = small[0] / width, small[1] / height
    boxes = [  # x1 and y1 are the last pixel inside
        (x0 * sx, y0 * sy, min((x1 + 1) * sx, small[0]) - 1, min((y1 + 1) * sy, small[1]) - 1)
        for x0, y0, x1, y1 in sample.boxes or ()
    ]
    page = Image.new("RGB", (cell, cell), GROUND)
    page.paste(with_boxes(image, boxes, TRUTH_COLOUR), ((cell - small[0]) // 2, (cell - small[1]) // 2))
    return page


def _sample_caption(sample: Sample, classes: Sequence[str], width: int) -> str:
    """The class, in two lines if it is long, and the file name."""
    words = ["no label"] if sample.label is None else classes[sample.label].split()
    fits = [n for n in range(1, len(words) + 1) if font(14).getlength(" ".join(words[:n])) <= width]
    first = fits[-1] if fits else len(words)
    name = "\n".join(" ".join(part) for part in (words[:first], words[first:]) if part)
    return f"{name}\n{sample.id.rsplit('/', 1)[-1]}"
