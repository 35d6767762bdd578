"""Trainers of weakly supervised localisation: each mechanism against the obvious loop, and what comes out."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sigcam
from sigcam.cli.main import main
from sigcam.core.config import TrainConfig
from sigcam.core.errors import ConfigError, ModelError
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.pooling import ThresholdedPool
from sigcam.models.preprocess import Preprocess
from sigcam.training import wsol
from sigcam.training.classifier import TrainResult, train_classifier
from sigcam.training.last_stage import LastStage, StageConfig
from sigcam.training.wsol import WSOL, Acol, Adl, AdversarialErasing, HideAndSeek, Tap, trainer_named
from support.bench import QUIET, write_wsol_dataset

NET = """
import torch
from torch import nn
from sigcam.models import Preprocess

class Small(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.ReLU())
        self.stage = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, classes)

    def forward(self, images):
        return self.fc(self.avgpool(self.stage(self.stem(images))).flatten(1))

def make(num_classes=3):
    torch.manual_seed(0)
    return Small(num_classes), Preprocess(64, 64)

def vit(num_classes=3, **options):
    import timm
    torch.manual_seed(0)
    small = {"img_size": 64, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **small, **options)
    return model, Preprocess(64, 64)

def averaging():
    return vit(global_pool="avg")
"""
SHORT = TrainConfig(epochs=3, batch_size=6, lr=0.02, head_lr_ratio=1.0)
ON_MAPS = [name for name, trainer in WSOL.items() if not trainer.of_tokens]
LEFT_IN_IT = {"tap": {"avgpool.tap_threshold"}, "ts-cam": {"norm.0.token_grid"}}


def network_of(name: str | None, spec: str) -> str:
    """The spec of a network that the trainer takes."""
    return spec if name is None or name in ON_MAPS else spec.replace(":make", ":vit")


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"file:{tmp_path / 'net.py'}:make"


@pytest.fixture
def small(spec: str) -> Classifier:
    return load_classifier(spec)


@pytest.fixture
def train(tmp_path: Path) -> Samples:
    write_wsol_dataset(tmp_path / "data", per_class=4)
    return open_dataset(tmp_path / "data/cub", split="train")


def pixels(samples: Samples, i: int) -> np.ndarray:
    return np.asarray(samples[i].open().convert("RGB"))


def features_of(classifier: Classifier, images: Tensor) -> Tensor:
    model = classifier.model
    with torch.no_grad():
        return model.stage(model.stem(images))  # type: ignore[operator,union-attr]


# Hide-and-Seek


def test_half_of_the_patches_are_hidden_with_the_mean_colour_and_others_in_each_epoch(
    small: Classifier, train: Samples
) -> None:
    trainer = HideAndSeek(replace(small, transform=Preprocess(128, 128)))  # 4 x 4 patches of 32 pixels
    grey = [round(255 * level) for level in (0.485, 0.456, 0.406)]
    epochs = list[np.ndarray]()
    for epoch in range(6):
        shown = trainer.samples(train, epoch, 6, seed=0)
        assert [sample.id for sample in shown] == [sample.id for sample in train]
        hidden = np.zeros((len(train), 4, 4), bool)
        for i in range(len(train)):
            before, after = pixels(train, i), pixels(shown, i)  # 64 x 64: a patch is 16 pixels of the file
            for y in range(4):
                for x in range(4):
                    patch = np.s_[16 * y : 16 * y + 16, 16 * x : 16 * x + 16]
                    hidden[i, y, x] = bool((after[patch] == grey).all())
                    assert hidden[i, y, x] or (after[patch] == before[patch]).all()
        epochs.append(hidden)
    assert 0.45 < np.mean(epochs) < 0.55
    assert all((a != b).any() for a, b in pairwise(epochs))
    again = trainer.samples(train, 2, 6, seed=0)
    assert (pixels(again, 3) == pixels(trainer.samples(train, 2, 6, seed=0), 3)).all()
    assert any((pixels(again, i) != pixels(trainer.samples(train, 2, 6, seed=1), i)).any() for i in range(5))
    assert train[0].path is not None and again[0].path is None  # no cache takes one for the other


# Adversarial erasing


def test_decisive_cells_are_those_above_the_threshold_of_the_labels_map(
    small: Classifier, train: Samples
) -> None:
    cells = wsol.decisive_cells(small, train)
    weight = small.model.fc.weight.detach()  # type: ignore[union-attr]
    for i, sample in enumerate(train):
        features = features_of(small, small.transform(sample.open())[None])[0]
        assert sample.label is not None
        total = torch.zeros(features.shape[1:])
        for n in range(len(features)):
            total += max(float(weight[sample.label, n]), 0.0) * features[n]
        expected = total > 0.8 * total.max()
        assert torch.equal(cells[i], expected), i
    assert cells.flatten(1).any(1).all() and cells.shape == (12, 8, 8)


def test_each_step_erases_more_and_elsewhere(small: Classifier, train: Samples) -> None:
    trainer = AdversarialErasing(small)
    shown, regions = list[Samples](), list[Tensor]()
    for epoch in range(6):  # two epochs a step
        shown.append(trainer.samples(train, epoch, 6, seed=0))
        regions.append(trainer.regions)
    assert shown[0] is train and shown[1] is train
    assert shown[2] is shown[3] and shown[4] is shown[5] and shown[2] is not shown[4]
    first, second = regions[2], regions[4]
    assert not bool((first & ~second).any())
    assert float((second & ~first).flatten(1).any(1).float().mean()) > 0.5
    image, cell = pixels(shown[4], 0), second[0].repeat_interleave(8, 0).repeat_interleave(8, 1).numpy()
    assert (image[cell] == [124, 116, 104]).all()
    assert (image[~cell] == pixels(train, 0)[~cell]).all()
    other = AdversarialErasing(small)
    other.load_state(trainer.state())
    assert (pixels(other.samples(train, 5, 6, seed=0), 7) == pixels(shown[5], 7)).all()


def test_erasing_needs_three_epochs_and_to_know_where_maps_lie(small: Classifier, train: Samples) -> None:
    with pytest.raises(ConfigError, match="has 3 steps: give it as many epochs or more"):
        train_classifier(small, train, replace(SHORT, epochs=2, wsol="adversarial-erasing"))
    with pytest.raises(ConfigError, match="must know where maps lie"):
        AdversarialErasing(replace(small, transform=lambda image: torch.zeros(3, 8, 8)))


# ACoL


def test_the_second_head_sees_features_without_what_the_first_ones_map_shows(small: Classifier) -> None:
    trainer, model = Acol(small), small.model
    torch.manual_seed(1)
    images, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 2, 1, 2])
    with torch.no_grad():
        start = trainer.logits(model, images, labels)
        assert torch.equal(start[0], model(images))  # both heads begin as the network's own
        for parameter in trainer.parameters:
            parameter.normal_()
        first, second = trainer.logits(model, images, labels)
        weight, bias = model.fc.weight, model.fc.bias  # type: ignore[union-attr]
        half_weight, half_bias = trainer.parameters
        heads = [(weight + sign * half_weight, bias + sign * half_bias) for sign in (1, -1)]
        for i, features in enumerate(features_of(small, images)):
            scores = torch.tensordot(heads[0][0][labels[i]], features, 1)  # (P, Q)
            low, high = float(scores.min()), float(scores.max())
            kept = features.clone()
            for y in range(8):
                for x in range(8):
                    if (float(scores[y, x]) - low) / (high - low) > 0.6:
                        kept[:, y, x] = 0
            assert 0 < int((kept.sum(0) == 0).sum()) < 64
            torch.testing.assert_close(first[i], F.linear(features.mean((1, 2)), *heads[0]))
            torch.testing.assert_close(second[i], F.linear(kept.mean((1, 2)), *heads[1]))
        pooled = features_of(small, images).mean((2, 3))
        mean = (F.linear(pooled, *heads[0]) + F.linear(pooled, *heads[1])) / 2
        torch.testing.assert_close(model(images), mean)  # the ordinary classifier is the mean of both heads


# ADL


def test_drop_mask_and_importance_map_are_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    features = torch.rand(3, 5, 4, 4)
    mean = features.mean(1)
    for drawn, dropped in ((0.74, True), (0.76, False)):
        monkeypatch.setattr(torch, "rand", lambda *size, drawn=drawn: torch.tensor(drawn))
        out = wsol.attention_dropped(features)
        for b in range(3):
            for y in range(4):
                for x in range(4):
                    value = float(mean[b, y, x])
                    keep = float(value < 0.9 * float(mean[b].max()))
                    factor = keep if dropped else 1 / (1 + np.exp(-value))
                    torch.testing.assert_close(out[b, :, y, x], features[b, :, y, x] * factor)


def test_the_drop_mask_is_chosen_three_times_in_four() -> None:
    torch.manual_seed(0)
    features = torch.rand(1, 2, 3, 3) + 0.1
    dropped = [bool((wsol.attention_dropped(features) == 0).any()) for _ in range(800)]
    assert 0.71 < np.mean(dropped) < 0.79


def test_adl_changes_training_alone(small: Classifier) -> None:
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    with torch.no_grad():
        before = small.model(images)
        trainer = Adl(small)
        assert not torch.equal(trainer.logits(small.model, images, labels)[0], before)
        assert torch.equal(small.model(images), before)
    assert not any(module._forward_pre_hooks for module in small.model.modules())


# TAP


def test_tap_replaces_pooling_and_grad_cam_has_the_heads_weights(small: Classifier) -> None:
    Tap(small)
    assert isinstance(small.model.avgpool, ThresholdedPool)
    net = sigcam.attach(small.model)
    Tap(small)  # again: nothing is put around it
    assert not isinstance(small.model.avgpool.pool, ThresholdedPool)
    images = torch.randn(2, 3, 64, 64)
    raw = sigcam.explain(
        net, images, "grad-cam", branch="softmax", classes=[1, 2], scale="raw", size="features"
    ).maps
    weight = small.model.fc.weight.detach()[[1, 2]]  # type: ignore[union-attr,index]
    expected = torch.einsum("bn,bnpq->bpq", weight, features_of(small, images))
    torch.testing.assert_close(raw, expected, rtol=1e-4, atol=1e-5)


# TS-CAM


def test_ts_cam_trains_a_convolution_of_the_patch_tokens_and_no_more_than_it_is_told(
    spec: str, train: Samples, tmp_path: Path
) -> None:
    vit = load_classifier(network_of("ts-cam", spec))
    before = {key: tensor.clone() for key, tensor in vit.model.state_dict().items()}
    config = replace(SHORT, epochs=6, lr=0.05, wsol="ts-cam", freeze_until="norm")
    result = train_classifier(vit, train, config)
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert result.trained == 2 * 16 + 3 * (9 * 16 + 1)  # the norm, and a 3x3 convolution to 3 classes
    after = vit.model.state_dict()
    same = {key for key, tensor in before.items() if key in after and after[key].shape == tensor.shape}
    assert all(torch.equal(after[key], before[key]) for key in same - {"head.bias"})
    assert not torch.equal(after["norm.0.norm.weight"], before["norm.weight"])
    tokens, images = list[Tensor](), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        vit.model.norm[0].norm.register_forward_hook(lambda _, __, out: tokens.append(out))  # type: ignore[index,union-attr]
        logits = vit.model(images)
    kernel = after["head.weight"].unflatten(1, (16, 3, 3))
    semantic = F.conv2d(tokens[0][:, 1:].mT.unflatten(2, (4, 4)), kernel, after["head.bias"], padding=1)
    torch.testing.assert_close(logits, semantic.mean((2, 3)))
    state = copy.deepcopy(after)
    wsol.TsCam(vit)  # again: nothing is put around it
    assert set(vit.model.state_dict()) == set(state)


def test_training_in_this_form_goes_on_with_other_classes(spec: str, tmp_path: Path) -> None:
    vit, file = load_classifier(network_of("ts-cam", spec)), tmp_path / "classifier.safetensors"
    wsol.TsCam(vit)
    save_classifier(file, vit.model, spec="mine", classes=("a", "b", "c"))
    other = load_classifier(network_of("ts-cam", spec), weights=file, num_classes=7)
    assert other.model.head.weight.shape == (7, 144) and other.classes is None  # type: ignore[union-attr]
    for key, tensor in vit.model.state_dict().items():
        assert key.startswith("head.") or torch.equal(tensor, other.model.state_dict()[key])
    save_classifier(file, other.model, spec="mine", classes=tuple("abcdefg"))
    assert load_classifier(network_of("ts-cam", spec), weights=file).classes == tuple("abcdefg")


def test_the_weights_of_a_transformers_vit_come_back_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**tiny, image_size=32, patch_size=8, num_labels=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    spec, file = f"hf:{tmp_path / 'vit'}", tmp_path / "classifier.safetensors"
    vit, images = load_classifier(spec), torch.randn(2, 3, 32, 32)
    wsol.TsCam(vit)
    save_classifier(file, vit.model, spec=spec, classes=tuple("abcd"))
    with torch.no_grad():
        assert torch.equal(load_classifier(spec, weights=file).model(images), vit.model(images))


@pytest.mark.parametrize("function", ["make", "averaging"])
def test_a_network_without_a_class_token_that_is_read_is_refused(function: str, spec: str) -> None:
    odd = load_classifier(spec.replace(":make", f":{function}"))
    before = set(odd.model.state_dict())
    with pytest.raises(
        ModelError, match="is not a plain ViT in which one linear layer reads the class token"
    ):
        wsol.TsCam(odd)
    assert set(odd.model.state_dict()) == before


# All


@pytest.mark.parametrize("name", [None, *WSOL])
def test_a_trained_classifier_is_loaded_attached_fitted_and_explained(
    name: str | None, train: Samples, spec: str, tmp_path: Path
) -> None:
    spec = network_of(name, spec)
    small = load_classifier(spec)
    before = set(small.model.state_dict())
    result = train_classifier(small, train, replace(SHORT, wsol=name))
    assert len(result.epochs) == 3 and not small.model.training
    assert all(parameter.grad is None for parameter in small.model.parameters())
    file = tmp_path / "classifier.safetensors"
    save_classifier(file, small.model, spec=spec, classes=train.classes)
    loaded = load_classifier(spec, weights=file)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), small.model(images))
    added = set(loaded.model.state_dict()) - before
    assert {key for key in added if "norm.0.norm" not in key} == LEFT_IN_IT.get(name or "", set())
    net = sigcam.attach(loaded.model, transform=loaded.transform)
    sigcam.fit(net, train, sigcam.FitConfig(l2=0.1))
    assert sigcam.explain(net, images, "grad-cam").maps.shape == (2, 64, 64)


@pytest.mark.parametrize("name", list(WSOL))
def test_a_stopped_training_goes_on_to_the_same_bits(
    name: str, spec: str, train: Samples, tmp_path: Path
) -> None:
    config = replace(SHORT, wsol=name)
    whole, parts, resumed = (load_classifier(network_of(name, spec)) for _ in range(3))
    train_classifier(whole, train, config)

    def stop(result: TrainResult) -> None:
        if len(result.epochs) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_classifier(parts, train, config, checkpoint=tmp_path / "c.pt", after_epoch=stop)
    train_classifier(resumed, train, config, checkpoint=tmp_path / "c.pt")
    for key, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[key]), key


@pytest.mark.parametrize("name", ON_MAPS)
def test_the_last_stage_learns_on_cached_outputs(
    name: str, small: Classifier, train: Samples, tmp_path: Path
) -> None:
    last = LastStage(small, "stage", name)
    stem = copy.deepcopy(small.model.stem.state_dict())  # type: ignore[union-attr]
    outputs = last.outputs(train, tmp_path / "cache", QUIET)
    losses = last.train(outputs, StageConfig("stage", epochs=4, lr=0.05, batch_size=6), samples=train)
    assert losses[-1] < losses[0]
    assert all(torch.equal(stem[key], tensor) for key, tensor in small.model.stem.state_dict().items())  # type: ignore[union-attr]
    rows = last.head_inputs(outputs).views[0]
    with torch.no_grad():
        images = torch.stack([small.transform(sample.open()) for sample in train])
        pooled = small.model.avgpool(features_of(small, images)).flatten(1)  # type: ignore[operator]
    torch.testing.assert_close(rows, pooled, rtol=2e-2, atol=2e-2)  # from 16 bits


def test_altered_images_need_the_samples(small: Classifier, train: Samples) -> None:
    last = LastStage(small, "stage", "has")
    with pytest.raises(ConfigError, match="HideAndSeek alters the images: give samples too"):
        last.train(last.outputs(train, None, QUIET), StageConfig("stage", epochs=1))


def test_names_stand_in_the_help_and_a_wrong_one_has_a_suggestion() -> None:
    assert all(name in (inspect.getdoc(TrainConfig) or "") for name in WSOL)
    with pytest.raises(ConfigError, match="there is no trainer 'acl': did you mean acol\\? There are has,"):
        trainer_named("acl")


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sigcam", "train-classifier", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_trains_by_name_and_refuses_an_unknown_one_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    train: Samples,
    spec: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--data", tmp_path / "data/cub", "--model", spec, "--epochs", 1, "--output", tmp_path / "o")
    assert run(monkeypatch, *words, "--wsol", "tapp") == 2
    error = capsys.readouterr().err
    assert "did you mean tap?" in error and len(error.strip().splitlines()) == 1
    assert run(monkeypatch, *words, "--wsol", "tap", "--probe") == 2
    assert run(monkeypatch, *words, "--wsol", "adversarial-erasing") == 2
    assert not (tmp_path / "o").exists()
    assert run(monkeypatch, *words, "--wsol", "tap") == 0
    assert json.loads((tmp_path / "o/manifest.json").read_text())["config"]["wsol"] == "tap"
    loaded = load_classifier(spec, weights=tmp_path / "o/classifier.safetensors")
    assert isinstance(loaded.model.avgpool, ThresholdedPool)


class FunctionalPool(nn.Module):
    """Averages without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4), nn.ReLU())
        self.fc = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images).mean((2, 3)))


@pytest.mark.parametrize("name", ["acol", "adl", "tap"])
def test_a_network_without_a_pooling_module_is_refused(name: str) -> None:
    odd = Classifier(FunctionalPool().eval(), Preprocess(64, 64), None, "odd")
    with pytest.raises(ModelError, match="odd has no pooling module that averages maps for one linear layer"):
        WSOL[name](odd)
