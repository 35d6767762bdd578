"""Write small images, masks and lists; check what readers return or refuse."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples


def put(
    path: Path, size: tuple[int, int] = (40, 30), colour: int | str | tuple[int, int, int] = "red"
) -> Path:
    """Write an image of one colour; a number is a grey level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)
    return path


def put_mask(path: Path, rows: list[list[int]]) -> Path:
    """Write a grey image with these pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(rows, np.uint8)).save(path)
    return path


def write(path: Path, text: str) -> Path:
    """Write a text file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refuses(call: Callable[[], object], *words: str) -> None:
    """Assert that the call raises a DataError of one line with all of these words."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def says(sentence: str, call: Callable[[], object]) -> None:
    """Assert that the call raises a DataError with exactly this message."""
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == sentence


def mask_of(samples: Samples, index: int) -> list[list[int]]:
    """The pixels of a sample's mask."""
    open_mask = samples[index].open_mask
    assert open_mask is not None
    mask = open_mask()
    assert mask.dtype == np.uint8
    return mask.tolist()


def check_paths(samples: Samples) -> None:
    """Assert that every sample has an existing file, opens as RGB, and can be pickled."""
    for sample in pickle.loads(pickle.dumps(samples)):
        assert sample.path is not None and sample.path.is_file()
        assert sample.open().mode == "RGB"
