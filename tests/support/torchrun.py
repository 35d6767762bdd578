"""Running the commands in several processes, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU(), nn.Conv2d(16, 12, 3, 2, 1), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), {head}).eval()
"""


LINEAR = "nn.Linear(12, {classes})"


MLP = "nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, {classes}))"


def model(root: Path, head: str = LINEAR, classes: int = 4) -> str:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "model.py"
    path.write_text(MODEL.format(head=head.format(classes=classes)))
    return f"file:{path}:make"


def run(processes: int, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command in one process as it is, in several under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    starter = [sys.executable, *(torchrun if processes > 1 else []), "-m", "sigcam"]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*starter, *map(str, words)], capture_output=True, text=True, env={**os.environ, **quiet}, timeout=300
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def branch(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "branch.safetensors")
