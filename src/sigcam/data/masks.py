"""Object masks: 1 object, 0 background, 255 ignored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COMMON_SIZE = (224, 224)  # (height, width) for the masks of one image when their sizes differ


def open_masks(objects: Sequence[Path], ignored: Sequence[Path]) -> NDArray[np.uint8]:
    """Combine mask files, (H, W): 1 in any object mask, else 255 in any ignore mask (PROTOCOL 5.5)."""
    import numpy as np

    deep = ("I", "I;16", "I;16L", "I;16B", "I;16N")
    masks = [_open_grey(path, as_stored=deep) for path in (*objects, *ignored)]
    if len({mask.shape for mask in masks}) > 1:
        masks = [resize_mask(mask, COMMON_SIZE) for mask in masks]
    combined = np.zeros(masks[0].shape, np.uint8)
    for index, mask in reversed(list(enumerate(masks))):  # objects last, so that they win
        combined[mask > 0] = 1 if index < len(objects) else 255
    return combined


def open_levels(path: Path) -> NDArray[np.uint8]:
    """Return the values of a mask file as stored, (H, W); for a palette image, its indices."""
    import numpy as np

    return _open_grey(path, as_stored=("L", "P")).astype(np.uint8)


def resize_mask(mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize an (H, W) mask to (height, width) by nearest neighbour, bit-equal to OpenCV."""
    import numpy as np

    rows, columns = (  # these two divisions round as in OpenCV; i * H // height differs for some sizes
        np.minimum((np.arange(new) * (1 / (new / old))).astype(np.int64), old - 1)
        for new, old in zip(size, mask.shape, strict=True)
    )
    resized: NDArray[Any] = mask[rows[:, None], columns]
    return resized


def _open_grey(path: Path, as_stored: Collection[str]) -> NDArray[Any]:
    """Return the pixels of an image of one of these modes as stored, of any other mode as 8-bit grey."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image if image.mode in as_stored else image.convert("L"))
    except Exception as error:  # decoders raise almost anything on damaged files
        raise DataError(f"cannot read the mask {path}: {error}.") from error
