"""Running the commands in this process, on a tiny model and two classes of pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.cli.main import main

NET = """
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2))

def broken():
    model = tiny()
    model[0].weight.data.fill_(float("nan"))
    return model
"""


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sigcam", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model file and a folder with two classes of four pictures each."""
    (tmp_path / "net.py").write_text(NET)
    rng = np.random.default_rng(0)
    for k, name in enumerate(("cat", "dog")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            pixels = rng.integers(0, 120, (40, 56, 3), dtype=np.uint8)
            pixels[:, :, k] += 130
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path


def spec(place: Path, function: str = "tiny") -> str:
    return f"file:{place / 'net.py'}:{function}"


def fitted(monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    words = (
        "fit",
        "--model",
        spec(place),
        "--data",
        place / "data",
        "--output",
        place / "fit",
        "--l2",
        0.1,
    )
    assert run(monkeypatch, *words) == 0
    return place / "fit" / "branch.safetensors"
