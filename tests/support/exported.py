"""An exported file for the tests of what runs it, and a picture for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="session")
def exported_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose three classes are red, green and blue; it maps two of them."""
    from support.exported_draft import make

    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    make(path)
    return path


@pytest.fixture(scope="session")
def red_square() -> Image.Image:
    """A picture of 300 x 200 pixels, black but for a red rectangle."""
    picture = Image.new("RGB", (300, 200))
    picture.paste("red", (100, 50, 250, 150))
    return picture
