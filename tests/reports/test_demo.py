"""The main job, small: everything is written, predictions stand, the branch loads back."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import sigcam
from sigcam.models.classifier import load_classifier
from sigcam.reports.demo import SHOWN, run_demo


@pytest.mark.slow
def test_demo_writes_figures_branch_and_table_and_changes_no_prediction(tmp_path: Path):
    stages = []
    table = run_demo(tmp_path, images=64, test_images=48, progress=lambda *step: stages.append(step))
    assert table["predictions_changed"] == 0 and table["weights_unchanged"]
    assert table["accuracy_before"] == table["accuracy_after"]
    assert [(row["branch"], row["clamp"]) for row in table["maps"]] == [
        ("softmax", "signed"),
        ("softmax", "positive only"),
        ("centred", "signed"),
        ("sigmoid", "signed"),
        ("sigmoid", "positive only"),
    ]
    assert [row["score"] for row in table["nothing_there"]] == ["softmax probability", "sigmoid evidence"]
    assert all(0 <= row["auroc"] <= 1 for row in table["nothing_there"])
    assert all(0.05 < row["iou"] < 1 for row in table["maps"])
    for name in ("maps.png", "distortions.png"):
        with Image.open(tmp_path / name) as figure:
            assert figure.width > 900
    report = (tmp_path / "report.html").read_text()
    values = {float(value) for value in re.findall(r'data-value="([^"]+)"', report)}
    assert {row["iou"] for row in table["maps"]} | {row["auroc"] for row in table["nothing_there"]} <= values
    assert report.count("<article") == SHOWN and report.count("<img") == 2 * SHOWN + 2
    assert json.loads((tmp_path / "manifest.json").read_text())["numbers"] == table
    classifier = load_classifier("embedded", weights=tmp_path / "classifier.safetensors")
    net = sigcam.load(tmp_path / "branch.safetensors", classifier.model)
    assert net.fitted and net.class_names == classifier.classes
    assert all(done <= total for _, done, total in stages)
    with torch.no_grad():
        image = torch.randn(2, 3, 224, 224)
        assert torch.equal(net(image).softmax, classifier.model(image))
