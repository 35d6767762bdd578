"""shapes: synthetic birds that differ in three small parts. Needs no files.

A class is a crest or a cap, a barred or a spotted wing, a forked or a fanned tail: 2 x 2 x 2 = 8 birds. The
rest (colours, build, pose, size, position, background, distractors) depends on the seed, not on the class.
"""

from functools import partial
from itertools import product
from pathlib import Path

from sigcam.core.errors import ConfigError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples

PARTS = (("crested", "capped"), ("barred", "spotted"), ("forktail", "fantail"))
SHAPE_CLASSES = tuple(map(" ".join, product(*PARTS)))
SHAPE_SPLITS = ("train", "val", "test")


def shapes(count: int = 2000, *, split: str = "train", seed: int = 0, size: int = 224) -> Samples:
    """Return `count` birds with label, mask and a tight box that covers 10% to 60% of the image.

    Sample i depends only on (seed, split, i, size); its class is i modulo 8. Images are drawn when opened.
    """
    from sigcam.data.shape_drawing import ShapeKey, draw_bird_mask, draw_image, tight_box

    if count < 1:
        raise ConfigError(f"shapes cannot make {count} images: ask for 1 or more, e.g. shapes:500.")
    if split not in SHAPE_SPLITS:
        raise ConfigError(f"shapes has no split {split!r}: choose one of {', '.join(SHAPE_SPLITS)}.")
    if seed < 0:
        raise ConfigError(f"shapes cannot use the seed {seed}: seeds are 0 or more.")
    if size < 32:
        raise ConfigError(f"shapes cannot draw at {size} pixels: the parts need a size of 32 or more.")
    keys = [ShapeKey(seed, split, index, size) for index in range(count)]
    items = (
        Sample(
            id=f"{split}/{key.index:06d}",
            open=partial(draw_image, key),
            label=key.index % len(SHAPE_CLASSES),
            boxes=(tight_box(key),),
            open_mask=partial(draw_bird_mask, key),
            size=ImageSize(size, size),
        )
        for key in keys
    )
    return Samples(tuple(items), SHAPE_CLASSES)


def scenes(count: int, *, seed: int = 0, size: int = 224) -> Samples:
    """Return the images of the test split without their birds: no label, no mask."""
    from sigcam.data.shape_drawing import ShapeKey, draw_image

    keys = [ShapeKey(seed, "test", index, size) for index in range(count)]
    items = (Sample(f"scene/{key.index:06d}", partial(draw_image, key, bird=False)) for key in keys)
    return Samples(tuple(items), ())


def read_shapes(path: str | Path, *, split: str = "train") -> Samples:
    """Return the birds that a word names: `shapes`, or `shapes:500` for 500 of them."""
    word, colon, count = str(path).partition(":")
    if word != "shapes" or (colon and not count.isdecimal()):
        raise ConfigError(f"cannot read {str(path)!r} as shapes: write shapes, or shapes:500 for a count.")
    return shapes(int(count), split=split) if colon else shapes(split=split)


def is_shapes(path: str | Path) -> bool:
    """Return whether this is the word `shapes` or `shapes:COUNT`; a Path is never one."""
    return isinstance(path, str) and path.partition(":")[0] == "shapes"
