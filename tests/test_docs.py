"""Every Python block of the README and the docs runs."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from torch.utils.data import TensorDataset

import sigcam

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_the_code_of_a_page_runs(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    images = torch.randn(6, 3, 64, 64)
    model = torchvision.models.resnet18(weights=None, num_classes=3)
    names = {
        "sigcam": sigcam,
        "model": model,
        "net": sigcam.attach(model),
        "images": images,
        "dataset": TensorDataset(images, torch.arange(6) % 3),
    }
    exec(compile(block, page, "exec"), names)


def test_the_pages_of_the_readme_exist():
    for target in re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_file(), target
