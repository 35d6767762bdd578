"""examples/export/run.py where nothing is installed but the three packages that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "export" / "run.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with onnxruntime, numpy and Pillow."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    line = re.search(r"^pip install (.+)$", SCRIPT.read_text(), re.M)
    assert line and line[1] == "onnxruntime numpy pillow"
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    command = [folder / "bin" / "python", *install, *line[1].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"the package registry could not be reached: {done.stderr.strip()[-200:]}")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_three_packages_explain_a_photograph(
    python: Path, exported_file: Path, red_square: Image.Image, tmp_path: Path
) -> None:
    red_square.save(tmp_path / "photo.png")
    command = [python, SCRIPT, "photo.png", exported_file, "overlay.png"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"red: here, evidence 0\.8\d\d, probability 0\.9\d\d", first)
    assert re.fullmatch(r"green: not here, evidence 0\.0\d\d, probability 0\.0\d\d", second)
    sheet = np.asarray(Image.open(tmp_path / "overlay.png").convert("RGB")).astype(int)
    small = (480, 320)
    assert sheet.shape == (small[1] + 28, 2 * small[0], 3)
    x, y = 480 * 175 // 300, 320 * 100 // 200  # inside the rectangle
    assert sheet[y, x].min() > 100 and sheet[y, x + 480, 1:].max() < 60, (
        "on red the map, on green the photograph"
    )
    green = (sheet == (0, 200, 83)).all(2)
    rows, columns = np.nonzero(green)
    assert columns.max() < 480, "no box of a class that is nowhere"
    found = [columns.min(), rows.min(), columns.max(), rows.max()]
    assert np.abs(np.array(found) - np.array([100, 50, 250, 150]) * 1.6).max() < 32
    for words in ([], ["photo.png"]):
        said = subprocess.run([python, SCRIPT, *words], capture_output=True, text=True, check=False)
        assert said.returncode == 1 and "python run.py photo.jpg model.onnx overlay.png" in said.stderr
