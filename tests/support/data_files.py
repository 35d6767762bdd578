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


CUB = {
    "images.txt": "1 001.Black/a_46.jpg\n2 001.Black/b.jpg\n3 002.Laysan/c.jpg",
    "classes.txt": "1 001.Black\n2 002.Laysan\n",
    "image_class_labels.txt": "1 1\n2 1\n3 2\n",
    "train_test_split.txt": "1 0\n2 1\n3 1\n",
    "bounding_boxes.txt": "1 60.0 27.0 325.0 304.0\n2 0.0 1.0 39.0 28.0\n\n3 5.0 5.0 1.0 1.0\n",
}


def make_cub(root: Path) -> Path:
    """Write three images and the lists of CUB-200-2011."""
    for name, text in CUB.items():
        write(root / name, text)
    put(root / "images/001.Black/a_46.jpg", (500, 335))
    put(root / "images/001.Black/b.jpg")
    put(root / "images/002.Laysan/c.jpg")
    return root


def make_class_folders(root: Path) -> Path:
    """Write two images of cats and one of a dog."""
    for name in ("cat/1.png", "cat/2 b.png", "dog/3.png"):
        put(root / name)
    return root


TENCH, GOLDFISH, SHARK = "n01440764", "n01443537", "n01484850"


def box_xml(*objects: tuple[str, int, int, int, int], size: tuple[int, int] = (40, 30)) -> str:
    """An XML file as ImageNet has them."""
    parts = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax>"
        f"<ymax>{y1}</ymax></bndbox></object>"
        for name, x0, y0, x1, y1 in objects
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{parts}</annotation>"
