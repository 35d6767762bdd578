"""The paper's networks: a probe and a trained last stage, weights of packages, agreement with the paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigcam.bench import networks, paper_networks, runner
from sigcam.bench.agreement import agreement, agreement_words
from sigcam.bench.paper import INCEPTION, RESNET, VGG, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import TABLES
from sigcam.bench.render import markdown, write_table
from sigcam.core.errors import ConfigError
from sigcam.models.classifier import load_classifier
from sigcam.training.last_stage import StageConfig
from support.bench import QUIET, SMALL, write_wsol_dataset


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan in which a small network stands for ResNet-50, with weights of a package."""
    for name in ("cub", "ilsvrc"):
        write_wsol_dataset(tmp_path / "data", name)
    write_wsol_dataset(tmp_path / "data", "pets", masks=True)
    (tmp_path / "small.py").write_text(SMALL)
    spec, file = f"file:{tmp_path / 'small.py'}:make", tmp_path / "weights.safetensors"
    torch.manual_seed(5)
    published = {
        name: t.contiguous() for name, t in load_classifier(spec, num_classes=3).model.state_dict().items()
    }
    published["stem.0.weight"] = torch.randn_like(published["stem.0.weight"])
    save_file(published, file, {"package": "some", "archive_sha256": "0f"})
    monkeypatch.setattr(networks, "imagenet_weights", lambda spec: (spec, file))
    monkeypatch.setattr(networks, "LAST_STAGES", {spec: StageConfig("stage", epochs=2)})
    for module, name in ((paper_networks, "RESNET"), (paper_networks, "VGG"), (networks, "VGG")):
        monkeypatch.setattr(module, name, spec if name == "RESNET" else "none")
    settings: Any = {"lr": 1e-3, "epochs": 2, "decay_every": 15}
    monkeypatch.setattr(
        paper_networks, "PAPER_SETTINGS", {(spec, "cub"): settings, (spec, "ilsvrc"): settings}
    )
    monkeypatch.setitem(TABLES, "resnet50", replace(TABLES["resnet50"], network=spec))
    return Plan(tmp_path / "data", tmp_path / "out", 12, 24, 1.0, batch_size=8)


@pytest.mark.slow
def test_each_data_set_has_its_classifiers_and_the_same_again_gives_the_same_bytes(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run_bench("resnet50", plan, None, announce=lambda text: None)
    content = json.loads((plan.output / "resnet50.json").read_text())
    rows = content["rows"]
    kinds = {(row["dataset"], row["classifier"], row["images"], "pos_weight" in row) for row in rows}
    assert kinds == {
        ("cub", "a linear probe", 12, False),
        ("cub", "a linear probe", 24, False),
        ("cub", "last stage trained", 12, False),
        ("cub", "last stage trained", 24, False),
        ("cub", "last stage trained", 24, True),
        ("ilsvrc", "as published", 24, False),
        ("ilsvrc", "as published", 24, True),
        ("pets", "a linear probe", 24, False),
    }
    assert all(row["weights"] == {"package": "some", "archive_sha256": "0f"} for row in rows)
    assert {row["branch"] for row in rows} == {
        *("softmax", "centred", "sigmoid", "sigmoid + background", "softmax + background")
    }
    weights = [row for row in rows if "pos_weight" in row and row["clamp"] and row["method"] == "cam"]
    assert {(row["pos_weight"], row.get("fit")) for row in weights} == {
        *((1, None), (2, None), (1, "the paper's recipe"), (2, "the paper's recipe"))
    }
    learned = {
        path.parent.name.rpartition("-")[0]: load_file(path)
        for path in (plan.output / "models").glob("*/classifier.safetensors")
    }
    stem = load_file(plan.data.parent / "weights.safetensors")["stem.0.weight"]
    assert set(learned) == {"cub-probe", "cub-last-stage", "pets-probe"}
    assert all(torch.equal(state["stem.0.weight"], stem) for state in learned.values())
    stage = [learned[name]["stage.0.weight"] for name in ("cub-probe", "cub-last-stage")]
    assert not torch.equal(*stage)
    assert not list(plan.output.rglob("checkpoint.pt"))
    times = json.loads((plan.output / "overhead-resnet50.json").read_text())
    assert times["repeats"] == 5 and times["training"]["images"] == 36
    text = markdown(content)
    assert "## cub, cam, last stage trained, positive weight, 24 images" in text
    assert "sigmoid, clamped (the paper's method), positive weight 2, the paper's recipe" in text
    assert "## cub, cam, a linear probe, 12 images for confidence" in text
    monkeypatch.setattr(runner, "overhead", lambda *args, **kwargs: None)
    runner.run_bench(
        "resnet50", replace(plan, output=plan.output / "again"), None, announce=lambda text: None
    )
    again = json.loads((plan.output / "resnet50.json").read_text())
    assert again["rows"] == rows


def test_each_target_has_its_network_and_data_sets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[tuple[str, tuple[str, ...]]]()
    monkeypatch.undo()

    def measure(plan: Plan, datasets: Any, progress: Any) -> list[BenchRow]:
        measured.append((plan.backbone, tuple(datasets)))
        return []

    monkeypatch.setattr(paper_networks, "_rows", measure)
    for name in ("vgg16", "resnet50", "inception_v3"):
        TABLES[name].rows(plan, QUIET)
        assert measured[-1][0] == TABLES[name].network
    everything = ("cub", "cars", "ilsvrc", "openimages", "pets")
    assert measured == [
        (VGG, ("cub", "cars", "openimages", "pets")),  # which has no published head
        (RESNET, everything),
        (INCEPTION, everything),
    ]
    assert set(networks.LAST_STAGES) == {VGG, RESNET, INCEPTION}


def test_a_first_look_takes_fewer_images(plan: Plan) -> None:
    quick = replace(plan, fidelity_images=100, localization_images=100, train_images=1000, backbone=RESNET)
    fewer = paper_networks._fewer(quick)
    assert (fewer.fidelity_images, fewer.localization_images, fewer.zoom) == (12, 100, 1.0)
    assert [each.train_images for each in paper_networks._classifiers(quick, "cub")] == [300, 300]
    assert [each.train_images for each in paper_networks._classifiers(quick, "ilsvrc")] == [1000]
    usual = paper_networks._fewer(Plan(plan.data, plan.output, backbone=RESNET))
    assert (usual.fidelity_images, usual.localization_images, usual.train_images) == (100, 500, None)
    full = paper_networks._fewer(Plan(plan.data, plan.output, None, None, backbone=RESNET))
    assert (full.fidelity_images, full.localization_images) == (None, None)


def test_several_processes_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_networks, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="trained in one process: start it without torchrun"):
        paper_networks.resnet50(plan, QUIET)


def row(branch: str, clamp: bool, drop: float, own: float, **more: Any) -> BenchRow:
    """A row of Table 1, CAM of ResNet-50 on CUB, as `evaluate_rows` gives it."""
    held: BenchRow = {"dataset": "cub", "method": "cam", "branch": branch, "clamp": clamp, "scale": "unit"}
    held |= {"zoom": 1.0, "images": 100, "backbone": RESNET, "classifier": "a linear probe"}
    held |= {"average_drop": drop, "average_drop:branch": own, "intervals": {}, "versus": {}, "beside": {}}
    return held | {"delta": {}} | more


def test_agreement_compares_signs_with_the_papers_scorer_and_counts_them() -> None:
    delta = {"average_drop": [4.0, 1.0, 6.0], "average_drop:branch": [-5.0, -7.0, -2.0]}
    base = row("softmax", False, 40.0, 40.0)
    ours = row("sigmoid", True, 44.0, 35.0, delta=delta)
    controls = [row("softmax", True, 1.0, 1.0, delta=delta), row("sigmoid", False, 1.0, 1.0, delta=delta)]
    ablation = row("sigmoid", True, 1.0, 1.0, delta=delta, pos_weight=99)
    (cell,) = agreement("resnet50", [base, ours, *controls, ablation])
    assert cell["metric"] == "average_drop:branch" and cell["same_scorer"] == [4.0, 1.0, 6.0]
    assert cell["here"] == [40.0, 35.0] and cell["difference"] == [-5.0, -7.0, -2.0]
    fell = cell["paper"][1] < cell["paper"][0]  # what the paper says of this cell
    assert cell["agrees"] is fell and cell["certain"] is True
    rises = ours | {"delta": {"average_drop:branch": [5.0, -1.0, 7.0]}}
    (other,) = agreement("resnet50", [base, rises])
    assert other["agrees"] is not fell and other["certain"] is False
    words = agreement_words([cell | {"agrees": True}, other | {"agrees": False}])
    assert words == "1 of 2 cells have the paper's direction; 1 of the 1 whose interval excludes zero."
    assert agreement("resnet50", [ours]) == [] == agreement("resnet50", [base | {"dataset": "pets"}, ours])
    trained = ours | {"classifier": "last stage trained"}
    assert agreement("resnet50", [base, trained]) == []  # never beside another classifier's baseline


def test_cells_that_disagree_are_printed(plan: Plan) -> None:
    base = row("softmax", False, 40.0, 40.0)
    differences = {"average_drop:branch": [500.0, 400.0, 600.0]}
    plan.output.mkdir()
    content = write_table(plan, "resnet50", [base, row("sigmoid", True, 44.0, 540.0, delta=differences)])
    text = markdown(content)
    assert "beside the paper: 0 of 1 cells have the paper's direction" in text
    (line,) = (
        line for line in text.splitlines() if line.startswith("| cub, cam, a linear probe, average drop")
    )
    assert line.endswith("| 40.00 to 540.00 (+500.00, +400.0 to +600.0) | NO |")
