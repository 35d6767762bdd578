"""A small data set and model for the tests of `sigcam bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.torchrun import LINEAR, MODEL

SMALL = """
import torch
from torch import nn
from sigcam.models import Preprocess

class Small(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.stage = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, classes)

    def forward(self, images):
        return self.fc(self.avgpool(self.stage(self.stem(images))).flatten(1))

def make(num_classes=1000):
    torch.manual_seed(0)
    return Small(num_classes), Preprocess(64, 64)
"""
QUIET: Any = lambda stage, done, total: None  # noqa: E731


def write_wsol_dataset(
    root: Path, name: str = "cub", classes: int = 3, per_class: int = 12, seed: int = 0, masks: bool = False
) -> None:
    """A data set in the WSOL layout: a bright square, of a colour per class, on noise; its box or mask."""
    random = np.random.default_rng(seed)
    home = root / name
    for split in ("train", "test"):
        at = home / "metadata" / split
        at.mkdir(parents=True)
        lines: dict[str, list[str]] = {
            "image_ids": [],
            "class_labels": [],
            "image_sizes": [],
            "localization": [],
        }
        for i in range(classes * per_class):
            label, id = i % classes, f"{split}/{i}.png"
            pixels = random.integers(0, 80, (64, 64, 3))
            x, y = random.integers(4, 30, 2)
            pixels[y : y + 28, x : x + 28, label] += 150
            path = home / "images" / id
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
            lines["image_ids"].append(id)
            lines["class_labels"].append(f"{id},{label}")
            lines["image_sizes"].append(f"{id},64,64")
            lines["localization"].append(
                f"{id},{id},{split}/ignored.png" if masks else f"{id},{x},{y},{x + 27},{y + 27}"
            )
            if masks:
                mask = np.zeros((64, 64), np.uint8)
                mask[y : y + 28, x : x + 28] = 255
                (home / "masks" / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask).save(home / "masks" / id)
                Image.fromarray(mask * 0).save(home / "masks" / split / "ignored.png")
        for file, rows in lines.items():
            (at / f"{file}.txt").write_text("\n".join(rows))


def write_model(path: Path) -> str:
    """Write a small convolutional network for any number of classes; return its `--model` name."""
    head = LINEAR.format(classes="num_classes")
    path.write_text(MODEL.replace("def make()", "def make(num_classes=3)").format(head=head))
    return f"file:{path}:make"
