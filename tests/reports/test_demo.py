"""The main job, small: everything is written, predictions stand, the branch loads back."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import sigcam
from sigcam.core.config import FitConfig
from sigcam.data import photographs
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.methods.explanation import is_calibrated
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.network.attachment import attach
from sigcam.reports import demo
from sigcam.reports.demo import SHOWN, _presence, run_demo
from sigcam.reports.demo_page import _photograph_section
from sigcam.training.branch import fit
from sigcam.training.features import extract
from sigcam.training.linear_probe import train_probe

HEADS = [("softmax", None, "signed"), ("softmax", None, "positive only"), ("centred", None, "signed")]
PAPER = [("sigmoid", "paper", "signed"), ("sigmoid", "paper", "positive only")]
OURS = [("sigmoid", "background", "signed"), ("sigmoid", "background", "positive only")]
ABSOLUTE = ("sigmoid", "background", "probability, cut at one half")
SCORES = [
    "softmax probability",
    "sigmoid evidence, the paper's fit",
    "sigmoid evidence, with background",
    "sigmoid evidence, with background and empty scenes",
]


@pytest.mark.slow
@pytest.mark.parametrize("images", [64, 320])  # too few to choose a weight of backgrounds, and enough
def test_demo_writes_figures_branch_and_table_and_changes_no_prediction(
    tmp_path: Path, images: int, monkeypatch: pytest.MonkeyPatch
):
    stages, seen = [], Counter[bytes]()

    def counted(*args: Any, **options: Any) -> Classifier:
        classifier = load_classifier(*args, **options)
        classifier.model.register_forward_pre_hook(
            lambda module, given: seen.update(image.contiguous().numpy().tobytes() for image in given[0])
        )
        return classifier

    monkeypatch.setattr(demo, "load_classifier", counted)
    table = run_demo(tmp_path, images=images, test_images=48, progress=lambda *step: stages.append(step))
    assert table["predictions_changed"] == 0 and table["weights_unchanged"]
    assert table["accuracy_before"] == table["accuracy_after"]
    classifier = load_classifier("embedded", weights=tmp_path / "classifier.safetensors")
    net = sigcam.load(tmp_path / "branch.safetensors", classifier.model)
    calibrated = is_calibrated(net)
    assert calibrated or images < 320
    rows = [(row["branch"], row["fit"], row["clamp"]) for row in table["maps"]]
    assert rows == [*HEADS, *PAPER, *OURS, *([ABSOLUTE] if calibrated else [])]
    assert [row["score"] for row in table["nothing_there"]] == SCORES
    assert all(0 <= row["auroc"] <= 1 for row in table["nothing_there"])
    assert all(0.05 < row["iou"] < 1 for row in table["maps"])
    pictures = [*shapes(images), *shapes(48, split="test"), *shapes(64, split="val"), *scenes(48)]
    again = {s.id: seen[classifier.transform(s.open()).numpy().tobytes()] for s in pictures}
    assert set(again.values()) == {1}  # passes of the backbone, in copies of it too
    for name in ("photograph.png", "absent.png", "maps.png", "distortions.png"):
        with Image.open(tmp_path / name) as figure:
            assert figure.width > 900
    report = (tmp_path / "report.html").read_text()
    values = {float(value) for value in re.findall(r'data-value="([^"]+)"', report)}
    assert {row["iou"] for row in table["maps"]} | {row["auroc"] for row in table["nothing_there"]} <= values
    assert report.count("<article") == SHOWN and report.count("<img") == 2 * SHOWN + 4
    story = ["1. One photograph", "2. Where is it?", "3. Is it there at all?", "4. Why a sigmoid branch?"]
    assert [report.index(f">{title}<") for title in story] == sorted(report.index(f">{t}<") for t in story)
    assert json.loads((tmp_path / "manifest.json").read_text())["numbers"] == table
    assert net.fitted and net.class_names == classifier.classes
    assert all(done <= total for _, done, total in stages)
    with torch.no_grad():
        image = torch.randn(2, 3, 224, 224)
        assert torch.equal(net(image).softmax, classifier.model(image))
    if calibrated:
        assert table["maps"][-1]["threshold"] == 0.5  # not chosen
    if table["background"]:
        _, paper, ours, with_scenes = table["nothing_there"]
        assert ours["auroc"] > paper["auroc"] - 0.05  # backgrounds do not make it worse
        assert with_scenes["auroc"] > paper["auroc"]


def test_the_photograph_shows_a_cat_and_no_dog():
    found, figure = demo._photograph("cpu")
    first, *_, last = found["classes"]
    assert (first["class_name"], first["presence"]) == ("Egyptian cat", "present")
    assert (last["class_name"], last["presence"]) == (demo.ABSENT, "not present") and last["evidence"] < 0.1
    assert "CC0" in found["credit"] and figure.width > 900


def test_without_scikit_image_the_demo_says_what_brings_the_photograph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(photographs, "find_spec", lambda name: None)
    found, figure = demo._photograph("cpu")
    assert "pip install 'sigcam[examples]'" in found["left_out"] and figure is None
    assert _photograph_section(found, {}).empty == f"Left out: {found['left_out']}"


def test_a_presence_row_counts_scores_above_one_half_and_ordered_pairs():
    row = _presence("score", torch.tensor([0.9, 0.6, 0.5, 0.2]), torch.tensor([0.7, 0.1]))
    assert (row["above_half_with_bird"], row["above_half_without"]) == (0.5, 0.5)
    assert row["auroc"] == 5 / 8  # 0.9 beats both, the other three beat 0.1 alone


@pytest.mark.slow
def test_both_fits_of_the_demo_share_one_pass_and_the_first_is_the_papers():
    """The paper's branch from features that have backgrounds is the one that a plain fit finds."""
    train = shapes(64)
    classifier = load_classifier("embedded", num_classes=8)
    train_probe(classifier, train, epochs=2)
    first, second = (attach(classifier.model, transform=classifier.transform) for _ in range(2))
    config = FitConfig(background=0, l2=0.1)
    features = extract(first, train, config, backgrounds=True)
    fit(first, replace(features, backgrounds=()), config)
    fit(second, train, config)
    assert not is_calibrated(first)
    for branch, plain in zip(first.sigmoid.parameters(), second.sigmoid.parameters(), strict=True):
        torch.testing.assert_close(branch, plain)
