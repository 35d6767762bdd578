"""LastStage: two parts that are the classifier, trained on outputs that were computed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Preprocess
from sigcam.models.wsol import WSOL_BACKBONES
from sigcam.network.attachment import attach
from sigcam.training import last_stage
from sigcam.training.features import Features, extract
from sigcam.training.last_stage import LastStage, StageConfig, split_children
from support.bench import QUIET, write_wsol_dataset

CONFIG = StageConfig("stage", epochs=3, lr=0.05, batch_size=8)


class Small(nn.Module):
    """Children in turn, flattened before the last, as in the paper's networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.stage = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(self.stage(self.stem(images))).flatten(1))
        return logits


def small_classifier(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(Small().eval(), Preprocess(64, 64), ("a", "b", "c"), "small")


@pytest.fixture
def train(tmp_path: Path) -> Samples:
    write_wsol_dataset(tmp_path / "data")
    samples = open_dataset(tmp_path / "data/cub", split="train")
    return Samples(tuple(samples), ("a", "b", "c"))


@pytest.mark.parametrize(("name", "first"), [("resnet50-v1", "layer4"), ("inception_v3", "Mixed_7a")])
def test_both_parts_in_turn_are_the_papers_networks(name: str, first: str) -> None:
    torch.manual_seed(0)
    model = WSOL_BACKBONES[name].build(3).eval()
    frozen, stage = split_children(model, first)
    images = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        torch.testing.assert_close(stage(frozen(images)), model(images))
    before = {id(p) for p in frozen.parameters()}
    assert before.isdisjoint(map(id, stage.parameters()))
    assert len(before) + len(list(stage.parameters())) == len(list(model.parameters()))


def test_a_sequential_is_cut_in_two() -> None:
    model = small_classifier().model
    frozen, stage = split_children(model, "stage.1")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(stage(frozen(images)), model(images))
        assert torch.equal(frozen(images), model.stage[0](model.stem(images)))  # type: ignore[operator,index,union-attr]
    assert [name for name, _ in stage.named_children()] == ["stage", "avgpool", "flatten", "fc"]
    for first in ("stage.7", "fc.1"):
        with pytest.raises(ModelError, match="is none of the modules after the first"):
            split_children(model, first)


def test_the_head_gets_what_it_gets_from_the_images(train: Samples, tmp_path: Path) -> None:
    classifier = small_classifier()
    last = LastStage(classifier, "stage")
    outputs = last.outputs(train, tmp_path / "cache", QUIET)
    assert outputs.views[0].shape == (36, 8, 16, 16)
    rows = last.head_inputs(outputs, backgrounds=True)
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    wanted = extract(attach(classifier.model, **known), train, FitConfig(), backgrounds=True)
    torch.testing.assert_close(rows.views[0], wanted.views[0].float(), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(rows.backgrounds[0], wanted.backgrounds[0].float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(rows.labels, wanted.labels)


def test_training_moves_the_last_stage_alone_and_reads_no_image_again(train: Samples, tmp_path: Path) -> None:
    classifier = small_classifier()
    last, cache = LastStage(classifier, "stage"), tmp_path / "cache"
    outputs = last.outputs(train, cache, QUIET)
    before = {name: tensor.clone() for name, tensor in classifier.model.state_dict().items()}
    inputs = last.head_inputs(outputs).views[0]
    losses = last.train(outputs, replace(CONFIG, epochs=30, crop=1.0))
    assert losses[-1] < losses[0] / 2
    after = classifier.model.state_dict()
    moved = {name for name, old in before.items() if not torch.equal(old, after[name])}
    assert {name.partition(".")[0] for name in moved} == {"stage", "fc"}
    assert {name for name in before if name.startswith("stage")} <= moved
    assert not classifier.model.training
    assert not torch.equal(last.head_inputs(outputs).views[0], inputs)  # by the stage as it is now
    seen = list[int]()
    again = LastStage(classifier, "stage").outputs(train, cache, lambda _, done, total: seen.append(done))
    assert seen == [36] and torch.equal(again.views[0], outputs.views[0])  # all from the cache


def test_a_stopped_training_goes_on_and_ends_with_the_same_weights(
    train: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = LastStage(small_classifier(), "stage").outputs(train, None, QUIET)
    whole, stopped = small_classifier(), small_classifier()
    LastStage(whole, "stage").train(outputs, CONFIG, seed=3)
    file, one_epoch, calls = tmp_path / "checkpoint.pt", last_stage._train_epoch, list[int]()

    def stop_after_two(*args: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return one_epoch(*args)

    monkeypatch.setattr(last_stage, "_train_epoch", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        LastStage(stopped, "stage").train(outputs, CONFIG, seed=3, checkpoint=file)
    assert file.is_file()
    resumed = small_classifier()
    losses = LastStage(resumed, "stage").train(outputs, CONFIG, seed=3, checkpoint=file)
    assert len(losses) == 3 and len(calls) == 4 and not file.exists()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_views_are_crops_of_the_grid_and_half_of_them_mirrored() -> None:
    torch.manual_seed(0)
    maps = torch.arange(64.0).view(1, 1, 8, 8).repeat(400, 1, 1, 1)
    view = last_stage._random_view(maps, 7 / 8)
    assert view.shape == (400, 1, 7, 7)
    rising = view[:, 0, 0, 1] > view[:, 0, 0, 0]
    assert 140 < int(rising.sum()) < 260
    assert all(bool(torch.isin(each, maps[0]).all()) for each in view)
    corners = {int(last_stage._random_view(maps[:1], 7 / 8).min()) for _ in range(60)}
    assert corners == {0, 1, 8, 9}


def test_what_cannot_be_split_or_learned_is_refused(train: Samples) -> None:
    with pytest.raises(ModelError, match="'stem' is none of the modules after the first: stage, avgpool, fc"):
        LastStage(small_classifier(), "stem")

    class Residual(Small):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + images.mean()

    odd = replace(small_classifier(), model=Residual().eval())
    with pytest.raises(ModelError, match="small does more than run its children in turn"):
        LastStage(odd, "stage")
    outputs = Features((torch.full((4, 8, 4, 4), 6e4),), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(DataError, match="training diverged at lr=1e"):
        LastStage(small_classifier(), "stage").train(outputs, replace(CONFIG, lr=1e30))
