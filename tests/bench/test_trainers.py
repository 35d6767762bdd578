"""`sigcam bench trainers`: a classifier and a branch for each trainer, each compared with plain training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sigcam.bench import runner, trainers
from sigcam.bench.plan import Plan
from sigcam.bench.render import markdown
from sigcam.core.errors import ConfigError
from sigcam.training.last_stage import StageConfig
from sigcam.training.wsol import WSOL
from support.bench import QUIET, SMALL, write_wsol_dataset

ON_MAPS = [name for name, trainer in WSOL.items() if not trainer.of_tokens]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    write_wsol_dataset(tmp_path / "data", per_class=4)
    (tmp_path / "small.py").write_text(SMALL)
    spec = f"file:{tmp_path / 'small.py'}:make"
    monkeypatch.setattr(trainers, "STAGES_TRAINED", {spec: StageConfig("stage", epochs=3, batch_size=6)})
    return Plan(tmp_path / "data", tmp_path / "out", 12, 12, 1.0, backbone=spec, batch_size=8)


@pytest.mark.slow
def test_each_trainer_stands_beside_plain_training_and_again_gives_the_same_rows(plan: Plan) -> None:
    runner.run_bench("trainers", plan, None, announce=lambda text: None)
    content = json.loads((plan.output / "trainers.json").read_text())
    rows = content["rows"]
    kinds = {(row["classifier"], row["method"]) for row in rows}
    others = {(name, "grad-cam" if name == "tap" else "cam") for name in ON_MAPS}
    assert kinds == {("plain training", "cam"), ("plain training", "grad-cam"), *others}
    for row in rows:
        compared = (
            set() if row["classifier"] == "plain training" else {"max_box_acc_v2", "gt_known_loc", "top1_cls"}
        )
        assert compared <= set(row["versus"]) and bool(compared) == bool(row["versus"])
        plain = next(
            each
            for each in rows
            if each["classifier"] == "plain training"
            and all(each[key] == row[key] for key in ("method", "branch", "clamp"))
        )
        for column in compared:
            value, low, high = row["versus"][column]["difference"]
            assert value == pytest.approx(row[column] - plain[column]) and low <= high
    text = markdown(content)
    assert "## cub, cam, adversarial-erasing, 12 images" in text and "beside plain training" in text
    assert "strongest" not in content["foot"]
    files = {path.parent.name: load_file(path) for path in plan.output.rglob("classifier.safetensors")}
    assert len(files) == len(ON_MAPS) + 2  # the probe, and plain training
    assert sum("avgpool.tap_threshold" in state for state in files.values()) == 1
    assert not list(plan.output.rglob("checkpoint.pt"))
    assert trainers.trainers(plan, QUIET) == [
        {key: value for key, value in row.items() if key not in ("row", "published")} for row in rows
    ]


def test_other_networks_and_several_processes_are_refused(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="trainers are compared on"):
        trainers.trainers(replace(plan, backbone="timm:resnet18"), QUIET)
    monkeypatch.setattr(trainers, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="start it without torchrun"):
        trainers.trainers(plan, QUIET)
