"""Object masks: 1 object, 0 background, 255 ignored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def open_masks(objects: Sequence[Path], ignored: Sequence[Path]) -> NDArray[np.uint8]:
    """(H, W): 1 where any mask is, 255 where an ignore mask and no object is, else 0 (PROTOCOL 5.5)."""
    import numpy as np

    grey = [_open_grey(path) for path in (*objects, *ignored)]
    if len({mask.shape for mask in grey}) > 1:  # a pixel of one is no pixel of the other
        grey = [resize_mask(mask, PROTOCOL_SIZE) for mask in grey]
    result = np.zeros(grey[0].shape, np.uint8)
    for index, mask in reversed(list(enumerate(grey))):  # objects last: they win
        result[mask > 0] = 1 if index < len(objects) else 255
    return result


def resize_mask(mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """The (H, W) mask at (height, width): pixel i is that at floor(i / (height / H)), as OpenCV has it."""
    import numpy as np

    rows, columns = (  # the two divisions round as OpenCV's do; i * H // height gives other pixels at times
        np.minimum((np.arange(new) * (1 / (new / old))).astype(np.int64), old - 1)
        for new, old in zip(size, mask.shape, strict=True)
    )
    resized: NDArray[Any] = mask[rows[:, None], columns]
    return resized


def _open_grey(path: Path) -> NDArray[Any]:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image if image.mode.startswith("I") else image.convert("L"))
    except Exception as error:  # as in open_picture: decoders raise nearly everything
        raise DataError(f"cannot read the mask {path}: {error}.") from error


def open_levels(path: Path) -> NDArray[np.uint8]:
    """The values of a mask file, (H, W), as they are stored."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image if image.mode in ("L", "P") else image.convert("L"), dtype=np.uint8)
    except Exception as error:  # as in open_picture: decoders raise nearly everything
        raise DataError(f"cannot read the mask {path}: {error}.") from error


PROTOCOL_SIZE = (224, 224)  # what masks of several sizes are brought to
