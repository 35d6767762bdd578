"""train-classifier: the paper's recipe, what is frozen, stopping and going on, and what is refused."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import sigcam
from sigcam.cli.main import main
from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import TrainConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.data.readers.folder import folder
from sigcam.data.registry import open_validation_data
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.preprocess import Preprocess
from sigcam.models.state_dict import fingerprint
from sigcam.models.wsol import WSOL_BACKBONES
from sigcam.training import classifier as classifying
from sigcam.training.classifier import TrainResult, train_classifier
from sigcam.training.wsol import Trainer

NET = """
import torch
from torch import nn
from sigcam.models import Preprocess

class Tiny(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(self.drop(self.last(self.stem(x)).mean((2, 3))))

def tiny(num_classes=2):
    return Tiny(num_classes), Preprocess(32, 32)
"""


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sigcam", "train-classifier", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def paint(root: Path, images: int, seed: int = 0) -> Path:
    """Two class folders of coloured noise that a small network can tell apart."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(0, 120, (40, 56, 3), dtype=np.uint8)
            pixels[:, :, k] += 100
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    paint(tmp_path / "data" / "train", 9)
    paint(tmp_path / "data" / "val", 3, seed=1)
    paint(tmp_path / "data" / "test", 2, seed=2)
    return tmp_path


def spec(place: Path) -> str:
    return f"file:{place / 'net.py'}:tiny"


def made(place: Path) -> tuple[Classifier, Samples]:
    torch.manual_seed(0)
    return load_classifier(spec(place), num_classes=2), folder(place / "data")


def weights(model: nn.Module) -> str:
    """A hash of every bit of the state."""
    digest = hashlib.blake2b()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class Stop(Exception):
    """A kill, from inside a run."""


SHORT = TrainConfig(epochs=4, batch_size=5, lr=0.02, decay_every=3)


# Stopping and going on


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_ends_bit_equal(place: Path):
    whole, samples = made(place)
    train_classifier(whole, samples, SHORT, checkpoint=place / "a.pt")

    def stop_at(epochs: int):
        def stop(result: TrainResult) -> None:
            if len(result.epochs) == epochs:
                raise Stop

        return stop

    for epochs in (1, 3):  # killed twice, once after a step of the learning rate
        parts, samples = made(place)
        torch.manual_seed(epochs)  # what else the process drew does not matter
        with pytest.raises(Stop):
            train_classifier(parts, samples, SHORT, checkpoint=place / "b.pt", after_epoch=stop_at(epochs))
    parts, samples = made(place)
    result = train_classifier(parts, samples, SHORT, checkpoint=place / "b.pt")
    assert len(result.epochs) == 4
    assert weights(parts.model) == weights(whole.model)
    assert not list(place.glob("*.part"))


@pytest.mark.slow
def test_the_number_of_workers_and_a_kill_within_an_epoch_change_no_bit(place: Path):
    whole, samples = made(place)
    train_classifier(whole, samples, SHORT)
    parts, samples = made(place)

    def stop(stage: str, done: int, total: int) -> None:
        if done > 30:
            raise Stop

    with pytest.raises(Stop):
        train_classifier(parts, samples, SHORT, checkpoint=place / "c.pt", progress=stop)
    parts, samples = made(place)
    config = TrainConfig(epochs=4, batch_size=5, lr=0.02, decay_every=3, workers=2)
    train_classifier(parts, samples, config, checkpoint=place / "c.pt")
    assert weights(parts.model) == weights(whole.model)


def test_more_epochs_go_on_from_a_finished_run(place: Path):
    whole, samples = made(place)
    train_classifier(whole, samples, SHORT)
    for epochs in (2, 4):
        parts, samples = made(place)
        config = TrainConfig(epochs=epochs, batch_size=5, lr=0.02, decay_every=3)
        train_classifier(parts, samples, config, checkpoint=place / "d.pt")
    assert weights(parts.model) == weights(whole.model)


def test_a_checkpoint_of_another_run_is_refused(place: Path):
    classifier, samples = made(place)
    train_classifier(classifier, samples, SHORT, checkpoint=place / "e.pt")
    again, _ = made(place)
    with pytest.raises(DataError, match="different lr"):
        train_classifier(again, samples, TrainConfig(epochs=4, batch_size=5), checkpoint=place / "e.pt")
    with pytest.raises(DataError, match="different weights"):
        train_classifier(classifier, samples, SHORT, checkpoint=place / "e.pt")
    cut = replace(again, transform=replace(again.transform, resize=40))
    with pytest.raises(DataError, match="different preprocessing"):
        train_classifier(cut, samples, SHORT, checkpoint=place / "e.pt")
    (place / "e.pt").write_bytes(b"nothing")
    with pytest.raises(DataError, match="remove it"):
        train_classifier(again, samples, SHORT, checkpoint=place / "e.pt")


@pytest.mark.slow
def test_changed_labels_or_files_never_resume(place: Path):
    classifier, samples = made(place)
    train_classifier(classifier, samples, SHORT, checkpoint=place / "g.pt")
    again, _ = made(place)
    turned = Samples((replace(samples[0], label=1), *samples[1:]), samples.classes)
    with pytest.raises(DataError, match=r"different labels\).*remove it"):
        train_classifier(again, turned, SHORT, checkpoint=place / "g.pt")
    assert samples[0].path is not None
    os.utime(samples[0].path, (1, 1))
    with pytest.raises(DataError, match=r"different files\).*remove it"):
        train_classifier(again, samples, SHORT, checkpoint=place / "g.pt")
    (place / "g.pt").unlink()
    assert len(train_classifier(again, turned, SHORT, checkpoint=place / "g.pt").epochs) == 4


def test_the_generators_of_the_caller_stay_where_they_were(place: Path):
    classifier, samples = made(place)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    train_classifier(classifier, samples, TrainConfig(epochs=1, batch_size=5))
    assert torch.equal(torch.rand(2), expected)


# The recipe


def test_one_step_is_nesterov_sgd_with_weight_decay_in_two_groups(place: Path):
    classifier, _ = made(place)
    model = classifier.model
    torch.manual_seed(5)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 1, 0])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = TrainConfig(lr=0.1, head_lr_ratio=10, weight_decay=0.01)
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    optimizer = classifying._optimizer(model, names, {"fc.weight", "fc.bias"}, config)
    for group in optimizer.param_groups:
        group["lr"] = config.lr * group["ratio"]
    loss, _ = classifying._step(Trainer(classifier), optimizer, images, labels, classes=2, autocast=False)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        pull = parameter.grad + 0.01 * before[name]  # the first step's momentum is the gradient itself
        rate = 1.0 if name.startswith("fc.") else 0.1
        torch.testing.assert_close(parameter.detach(), before[name] - rate * (pull + 0.9 * pull))
    assert loss > 0


@pytest.mark.parametrize(
    ("name", "fast", "slow"),
    [
        ("vgg16", {"classifier.0.weight", "classifier.6.bias"}, {"features.0.weight", "features.28.bias"}),
        ("vgg16-cam", {"conv6.weight", "fc.bias"}, {"features.0.weight"}),
        ("resnet50", {"layer4.0.conv1.weight", "fc.weight"}, {"conv1.weight", "layer3.5.bn3.bias"}),
        ("inception_v3", {"fc.weight"}, {"Conv2d_1a_3x3.conv.weight", "Mixed_7c.branch1x1.bn.bias"}),
        ("inception_v3-cam", {"SPG_A3_1b.1.weight", "SPG_A4.bias"}, {"Conv2d_4a_3x3.conv.weight"}),
    ],
)
def test_parts_of_names_decide_what_learns_ten_times_faster(name: str, fast: set[str], slow: set[str]):
    with torch.device("meta"):
        found = classifying._fast_names(WSOL_BACKBONES[name].build(3), 0)
    assert fast <= found and not slow & found


def test_networks_with_other_names_have_a_fast_head(place: Path):
    classifier, _ = made(place)
    assert classifying._fast_names(classifier.model, 0) == {"fc.weight", "fc.bias"}


def test_the_learning_rate_falls_at_the_start_of_every_third_epoch(place: Path):
    classifier, samples = made(place)
    config = TrainConfig(epochs=7, lr=1.0e-3, decay_every=3, batch_size=9)
    rates = [epoch.lr for epoch in train_classifier(classifier, samples, config).epochs]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-4, 1e-5, 1e-5])


def test_residual_networks_have_their_own_weight_decay():
    for name, decay in (("resnet50", 1e-4), ("vgg16-cam", 5e-4)):
        with torch.device("meta"):
            model = WSOL_BACKBONES[name].build(3)
        names = {each: 1 for each, _ in model.named_parameters()}
        optimizer = classifying._optimizer(model, names, {"fc.weight"}, TrainConfig())
        assert {group["weight_decay"] for group in optimizer.param_groups} == {decay}


def test_training_sees_another_crop_of_a_picture_in_every_epoch(place: Path):
    classifier, samples = made(place)

    def views(number: int) -> Tensor:
        shuffled, view = classifying._training_views(classifier, samples[:1], SHORT, number)
        return torch.stack([view(sample.open()) for sample in shuffled])

    assert views(0).shape == (1, 3, 32, 32)
    assert torch.equal(views(0), views(0)) and not torch.equal(views(0), views(1))


@pytest.mark.slow
def test_a_tiny_network_learns_and_its_batch_statistics_move(place: Path):
    classifier, samples = made(place)
    before = classifier.model.get_buffer("stem.1.running_mean").clone()
    val = folder(place / "data", split="val")
    result = train_classifier(classifier, samples, TrainConfig(epochs=12, lr=0.01, batch_size=6), val=val)
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert result.epochs[-1].val_accuracy == 1.0
    assert not torch.equal(classifier.model.get_buffer("stem.1.running_mean"), before)
    assert not classifier.model.training and all(p.grad is None for p in classifier.model.parameters())


def test_bfloat16_trains_too(place: Path):
    classifier, samples = made(place)
    config = TrainConfig(epochs=1, batch_size=6, autocast=True)
    assert train_classifier(classifier, samples, config).epochs[0].loss > 0
    assert next(classifier.model.parameters()).dtype == torch.float32


# Freezing


def test_what_comes_before_the_named_module_stays_bit_for_bit(place: Path):
    classifier, samples = made(place)
    before = {name: tensor.clone() for name, tensor in classifier.model.state_dict().items()}
    config = TrainConfig(epochs=2, batch_size=6, freeze_until="last.1")
    result = train_classifier(classifier, samples, config)
    after = classifier.model.state_dict()
    same = {name.rsplit(".", 1)[0] for name in after if torch.equal(after[name], before[name])}
    assert same == {"stem.0", "stem.1", "last.0"}
    assert result.trained == 8 + 8 + 16 + 2
    assert all(parameter.requires_grad for parameter in classifier.model.parameters())


def test_dropout_of_what_is_frozen_is_off(place: Path):
    classifier, _ = made(place)
    config = TrainConfig(freeze_until="last")
    trained = classifying._trained_names(classifier.model, config)
    classifying._train_mode(classifier.model, trained, config)
    modes = {name: module.training for name, module in classifier.model.named_modules()}
    assert not modes["stem"] and not modes["stem.3"] and modes["last.1"] and modes["drop"]


def test_an_unknown_module_to_freeze_until_is_told_the_nearest(place: Path):
    classifier, samples = made(place)
    with pytest.raises(ModelError, match=r"did you mean last"):
        train_classifier(classifier, samples, TrainConfig(freeze_until="lasst"))


# What is refused


@pytest.mark.parametrize(
    "config",
    [TrainConfig(lr=0), TrainConfig(epochs=0), TrainConfig(batch_size=0), TrainConfig(head_lr_ratio=-1.0)],
)
def test_impossible_numbers_are_refused(config: TrainConfig, place: Path):
    classifier, samples = made(place)
    with pytest.raises(DataError, match="give"):
        train_classifier(classifier, samples, config)


def test_divergence_ends_with_a_line_and_no_checkpoint(place: Path):
    classifier, samples = made(place)
    config = TrainConfig(lr=1e30, epochs=2, batch_size=3)
    with pytest.raises(DataError, match="smaller"):
        train_classifier(classifier, samples, config, checkpoint=place / "f.pt")
    assert not (place / "f.pt").exists()


# The command


def test_the_command_writes_a_classifier_that_loads_and_a_manifest_with_every_epoch(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--data", place / "data", "--model", spec(place), "--batch-size", 6, "--lr", 0.01, "--json")
    assert run(monkeypatch, *words, "--epochs", 3, "--output", place / "out") == 0
    facts = json.loads(capsys.readouterr().out)
    manifest = json.loads((place / "out" / "manifest.json").read_text())
    assert manifest["numbers"] == facts and len(manifest["epochs"]) == 3
    assert facts["validation images"] == 6 and 0 <= facts["validation accuracy"] <= 1
    assert all({"loss", "train_accuracy", "val_accuracy"} <= epoch.keys() for epoch in manifest["epochs"])
    loaded = load_classifier(spec(place), weights=place / "out" / "classifier.safetensors")
    assert loaded.classes == ("cat", "dog")
    assert manifest["model_fingerprint"] == fingerprint(loaded.model)


@pytest.mark.slow
def test_the_command_run_again_after_a_kill_ends_with_the_same_file(
    monkeypatch: pytest.MonkeyPatch, place: Path
):
    words = ("--data", place / "data", "--model", spec(place), "--batch-size", 6, "--epochs", 3)
    assert run(monkeypatch, *words, "--output", place / "whole") == 0

    def killed(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    write = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", killed)
    assert run(monkeypatch, *words, "--output", place / "parts") == 130
    assert {path.name for path in (place / "parts").iterdir()} == {"checkpoint.pt"}
    monkeypatch.setattr(Checkpoint, "save", write)
    assert run(monkeypatch, *words, "--output", place / "parts") == 0
    whole, parts = (load_file(place / name / "classifier.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)


def test_options_of_a_whole_training_are_refused_with_a_probe(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--probe", "--data", place / "data", "--model", spec(place), "--output", place / "o")
    assert run(monkeypatch, *words, "--freeze-until", "last") == 2
    assert "--freeze-until" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--epochs", 0) == 2
    assert not (place / "o").exists()


def test_an_unreadable_picture_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
):
    (place / "data" / "train" / "cat" / "bad.png").write_bytes(b"no picture")
    words = ("--data", place / "data", "--model", spec(place), "--epochs", 2, "--output", place / "o")
    assert run(monkeypatch, *words) == 0
    assert "bad.png" in capsys.readouterr().err
    assert json.loads((place / "o" / "manifest.json").read_text())["numbers"]["images"] == 18


def test_accuracy_is_measured_on_a_val_split_and_never_on_test(place: Path):
    data = place / "data"
    train = folder(data)
    found = open_validation_data(str(data), None, train)
    assert found is not None and {sample.id.split("/")[0] for sample in found} == {"val"}
    only_test = place / "two"
    paint(only_test / "train", 2)
    paint(only_test / "test", 2)
    assert open_validation_data(str(only_test), None, folder(only_test)) is None
    one_split = folder(data / "train")  # whatever its name
    assert open_validation_data(str(data / "train"), None, one_split) is None
    assert open_validation_data("shapes:4", None, sigcam.data.open_dataset("shapes:4")) is not None


def test_a_wsol_folder_without_val_lists_has_no_validation(tmp_path: Path):
    paint(tmp_path / "images", 2)
    for split, index in (("train", 0), ("test", 1)):
        at = tmp_path / "metadata" / split
        at.mkdir(parents=True)
        ids = [f"{name}/{index}.png" for name in ("cat", "dog")]
        (at / "image_ids.txt").write_text("\n".join(ids) + "\n")
        (at / "class_labels.txt").write_text("".join(f"{each},{k}\n" for k, each in enumerate(ids)))
    train = sigcam.data.open_dataset(tmp_path)
    assert open_validation_data(str(tmp_path), None, train) is None


@pytest.mark.slow
def test_a_trained_backbone_of_the_paper_loads_and_attaches(tmp_path: Path):
    torch.manual_seed(0)
    name = "wsol:resnet50"
    classifier = load_classifier(name, num_classes=2, pretrained=False)
    small = Classifier(classifier.model, Preprocess(32, 32), None, name)
    samples = folder(paint(tmp_path / "data", 2))
    train_classifier(small, samples, TrainConfig(epochs=1, batch_size=4, freeze_until="layer4.2"))
    save_classifier(tmp_path / "c.safetensors", small.model, spec=name, classes=samples.classes)
    loaded = load_classifier(name, weights=tmp_path / "c.safetensors")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        net = sigcam.attach(loaded.model, example=images[:1])
        assert torch.equal(net(images).softmax, small.model(images))
