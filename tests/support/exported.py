"""An exported file for the tests of what runs it, and a picture for it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import sigcam
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import BranchCalibration, LogitScale


def colours() -> nn.Module:
    """A classifier of pictures of 32 x 32 pixels in 8 x 8 cells: red, green or blue."""
    convolution, linear = nn.Conv2d(3, 3, 4, 4), nn.Linear(3, 3)
    with torch.no_grad():
        convolution.weight.copy_(torch.eye(3)[:, :, None, None].expand(3, 3, 4, 4) / 16)  # the mean of a cell
        convolution.bias.zero_()  # type: ignore[union-attr]
        linear.weight.copy_(18 * torch.eye(3) - 6)
        linear.bias.fill_(-3.0)
    return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


@pytest.fixture(scope="session")
def exported_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the maps of two of three colours; a place of that colour has a probability of nearly 1."""
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'sigcam[export]'")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # made once for all processes: it takes some seconds
    path = folder / "exported.onnx"
    with (folder / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            preprocess = Preprocess(32, 32, mean=(0.0,) * 3, std=(1.0,) * 3)
            names, example = ["red", "green", "blue"], torch.rand(1, 3, 32, 32)
            net = sigcam.attach(colours(), transform=preprocess, class_names=names, example=example)
            weights = net.head.state_dict()
            net.sigmoid.load_state_dict({f"copies.0.{key}": value for key, value in weights.items()})
            net.calibration = BranchCalibration(LogitScale(1.0, 2.0), {1.0: LogitScale()})
            net.fitted = True
            sigcam.export(net, path, k=2)
    return path


@pytest.fixture(scope="session")
def red_square() -> Image.Image:
    """A picture of 300 x 200 pixels, black but for a red rectangle."""
    picture = Image.new("RGB", (300, 200))
    picture.paste("red", (100, 50, 250, 150))
    return picture
