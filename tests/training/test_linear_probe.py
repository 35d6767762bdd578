"""A linear probe: it shares features with the fit, and says how it does on images it has not seen."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.data.registry import open_held_out_data, open_training_data
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.training import feature_reader
from sigcam.training.branch import FitResult, fit
from sigcam.training.feature_cache import IMAGES_PER_CHUNK, list_caches
from sigcam.training.linear_probe import ProbeResult, train_probe
from support.commands import place as place
from support.commands import run
from support.folders import CLASSES, tree
from support.tiny import Gap

CONFIG = FitConfig(l2=0.1, background=1.0)


def classifier(model: nn.Module | None = None) -> tuple[Classifier, Counter[bytes]]:
    """A classifier to probe, and how often each image passes its first layer, in copies of it too."""
    torch.manual_seed(0)
    model, seen = model or Gap(), Counter[bytes]()

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.update(image.detach().contiguous().numpy().tobytes() for image in args[0])

    model.register_forward_pre_hook(count)
    return Classifier(model.eval(), Preprocess(16, 16), CLASSES, "net"), seen


def fitted(
    given: Classifier, data: Any, cache: Path | None, config: FitConfig = CONFIG
) -> tuple[FitResult, Any]:
    net = attach(given.model, transform=given.transform, class_names=CLASSES)
    result = fit(net, data, config, cache=cache)
    return result, [parameter.detach().clone() for parameter in net.sigmoid.parameters()]


def mlp_head() -> nn.Module:
    body = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))
    return nn.Sequential(*body, head)


def passes(samples: Samples, seen: Counter[bytes]) -> set[int]:
    """How often the images passed the backbone."""
    transform = Preprocess(16, 16)
    return {seen[transform(sample.open()).numpy().tobytes()] for sample in samples}


@pytest.mark.parametrize("keep", ["disk", "memory"])
def test_a_probe_and_a_fit_with_backgrounds_pass_each_image_once_and_change_no_bit(
    tmp_path: Path, keep: str
) -> None:
    samples = tree(tmp_path / "data")
    apart, seen = classifier()
    alone = train_probe(apart, samples, epochs=3)
    wanted, branch = fitted(apart, samples, None)
    assert passes(samples, seen) == {2}
    together, seen = classifier()
    cache = tmp_path / "cache" if keep == "disk" else None
    probe = train_probe(together, samples, epochs=3, cache=cache, maps=True)
    found, shared = fitted(together, samples if cache else probe.features, cache)
    assert passes(samples, seen) == {1}
    assert probe == alone and torch.equal(together.model.fc.weight, apart.model.fc.weight)  # type: ignore[union-attr,arg-type]
    assert all(torch.equal(*pair) for pair in zip(shared, branch, strict=True))
    assert found.calibration == wanted.calibration and found.without_background == wanted.without_background
    assert found.calibration is not None


def test_maps_beyond_the_budget_are_not_kept_and_cost_a_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_reader, "MAX_MAPS", 150 * 2 * 6 * 8 * 8 - 1)
    samples, (given, seen) = tree(tmp_path / "data"), classifier()
    probe = train_probe(given, samples, epochs=1, cache=tmp_path / "cache", maps=True)
    assert not probe.features.maps and len(list_caches(tmp_path / "cache")) == 1
    fitted(given, samples, tmp_path / "cache")
    assert passes(samples, seen) == {2}


@pytest.mark.parametrize(
    "change", ["backbone", "preprocessing", "picture", "labels", "damage", "no sums", "last layer"]
)
def test_kept_maps_are_used_only_where_nothing_before_the_head_has_changed(
    tmp_path: Path, change: str
) -> None:
    samples, cache, (given, seen) = tree(tmp_path / "data"), tmp_path / "cache", classifier()
    train_probe(given, samples, epochs=1, cache=cache, maps=True)
    again = {0}  # further passes of each image
    model: Any = given.model
    if change == "backbone":
        with torch.no_grad():
            model.body[0].weight[0, 0, 0, 0] += 0.01
        again = {1}
    elif change == "preprocessing":
        given = replace(given, transform=Preprocess(16, 16, mean=(0.4, 0.4, 0.4)))
        again = {-1}  # the same files, other tensors
    elif change == "picture":
        assert samples[100].path is not None
        Image.new("RGB", (16, 16), "white").save(samples[100].path)
        again = {0, 1}
    elif change == "labels":
        turned = tuple(replace(sample, label=((sample.label or 0) + 1) % 4) for sample in samples)
        samples = Samples(turned, CLASSES)
    elif change == "damage":
        (maps,) = (entry.folder for entry in list_caches(cache) if "maps" in entry.about)
        data = bytearray((maps / "features.bin").read_bytes())
        data[-1] ^= 0x10
        (maps / "features.bin").write_bytes(data)
        again = {0, 1}
    elif change == "no sums":
        (maps,) = (entry.folder for entry in list_caches(cache) if "maps" in entry.about)
        (maps / "sums.bin").unlink()
        again = {1}
    else:
        with torch.no_grad():
            model.fc.weight *= -1
    before = Counter(seen)
    found, branch = fitted(given, samples, cache)
    if change == "preprocessing":
        assert sum((seen - before).values()) >= len(samples)
    else:
        extra = Counter({key: seen[key] - before[key] for key in seen})
        assert passes(samples, extra) == again
        if again == {0, 1}:  # the chunk alone
            counts = [extra[given.transform(sample.open()).numpy().tobytes()] for sample in samples]
            assert sum(counts) <= IMAGES_PER_CHUNK
    fresh, wanted = fitted(given, samples, None)
    assert all(torch.equal(*pair) for pair in zip(branch, wanted, strict=True))
    assert found.calibration == fresh.calibration


def test_an_unreadable_picture_has_no_features_no_maps_and_no_background(tmp_path: Path) -> None:
    samples, cache, (given, seen) = tree(tmp_path / "data"), tmp_path / "cache", classifier()
    path = samples[70].path
    assert path is not None
    path.write_bytes(b"no picture")
    probe = train_probe(given, samples, epochs=1, cache=cache, maps=True)
    assert [name for name, _ in probe.skipped] == [samples[70].id] and probe.images == len(samples) - 1
    before = sum(seen.values())
    found, branch = fitted(given, samples, cache)
    assert found.images == len(samples) - 1
    assert sum(seen.values()) - before < 20  # examples and noise
    _, wanted = fitted(given, samples, None)
    assert all(torch.equal(*pair) for pair in zip(branch, wanted, strict=True))


def test_a_head_of_several_layers_is_probed_in_a_pass_of_its_own(tmp_path: Path) -> None:
    samples, (given, seen) = tree(tmp_path / "data", 24), classifier(mlp_head())
    probe = train_probe(given, samples, epochs=1, cache=tmp_path / "cache", maps=True)
    assert not list_caches(tmp_path / "cache") and not probe.features.maps
    assert probe.features.views[0].shape == (24, 12)  # what enters the last layer
    assert passes(samples, seen) == {1}


def accuracy(given: Classifier, samples: Samples) -> float:
    images = torch.stack([given.transform(sample.open()) for sample in samples])
    with torch.no_grad():
        right = given.model(images).argmax(1) == torch.tensor([sample.label for sample in samples])
    return float(right.double().mean())


def test_accuracy_is_measured_on_other_images_with_the_layer_that_is_kept(tmp_path: Path) -> None:
    samples, others = tree(tmp_path / "data", 120), tree(tmp_path / "others", 48)
    others = Samples(
        tuple(replace(s, label=((s.label or 0) + (i % 3 == 0)) % 4) for i, s in enumerate(others)), CLASSES
    )
    given, _ = classifier()
    probe = train_probe(given, samples, epochs=20, lr=0.05, held_out=others, holdout=0.2)
    assert (probe.held_out_images, probe.held_out_part) == (48, False)
    assert probe.held_out_accuracy == pytest.approx(accuracy(given, others))
    assert probe.train_accuracy == pytest.approx(accuracy(given, samples))
    assert probe.held_out_accuracy < probe.train_accuracy


def test_a_held_out_part_is_not_trained_on_and_the_layer_that_is_kept_is_trained_on_all(
    tmp_path: Path,
) -> None:
    samples = tree(tmp_path / "data", 120)
    random = torch.Generator().manual_seed(0)  # labels that can be learned by heart alone
    labels = torch.randint(4, (120,), generator=random).tolist()
    noise = Samples(tuple(replace(s, label=label) for s, label in zip(samples, labels, strict=True)), CLASSES)
    given, plain = classifier(Gap(channels=200))[0], classifier(Gap(channels=200))[0]
    settings: Any = {"epochs": 200, "lr": 0.05}
    probe = train_probe(given, noise, **settings, holdout=0.2)
    alone: ProbeResult = train_probe(plain, noise, **settings)
    assert alone.held_out_accuracy is None and alone.held_out_images == 0
    assert probe.held_out_part and 20 <= probe.held_out_images <= 28
    assert probe.held_out_accuracy is not None and probe.held_out_accuracy < 0.55
    assert probe.train_accuracy > probe.held_out_accuracy + 0.25
    assert torch.equal(given.model.fc.weight, plain.model.fc.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("splits", "wanted"),
    [(("train", "val", "test"), "val"), (("train", "test"), "test"), (("train",), None), ((), None)],
)
def test_the_split_to_measure_on_is_val_or_else_test(tmp_path: Path, splits: Any, wanted: str | None) -> None:
    for name in splits or (".",):
        tree(tmp_path / name, 8)
    train = open_training_data(tmp_path, "folder")
    found = open_held_out_data(str(tmp_path), "folder", train)
    assert (found and found[0]) == wanted
    if found:
        assert all(sample.id.startswith(f"{wanted}/") for sample in found[1])


@pytest.mark.parametrize("splits", [("train", "val"), ("train", "test"), ()])
def test_the_command_says_how_accurate_the_probe_is_and_on_what(
    splits: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = place / "data"
    for name in splits[1:]:
        shutil.copytree(data, place / "set" / name)
    if splits:
        shutil.copytree(data, place / "set" / "train")
        data = place / "set"
    monkeypatch.setenv("SIGCAM_CACHE", str(place / "cache"))
    (place / "gap.py").write_text(
        "from torch import nn\ndef gap(num_classes=2):\n    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), *pool, nn.Linear(8, num_classes))\n"
    )
    words = ("train-classifier", "--probe", "--model", f"file:{place / 'gap.py'}:gap", "--data", data)
    assert run(monkeypatch, *words, "--output", place / "o", "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert json.loads((place / "o" / "manifest.json").read_text())["numbers"] == numbers
    part = "20% of the training images; the head kept is trained on all"
    assert numbers["held out"] == (f"the {splits[1]} split" if splits else part)
    assert numbers["held-out images"] == (8 if splits else 2)
    assert 0 <= numbers["held-out accuracy"] <= 1 and numbers["images"] == 8
    if splits:  # the same images
        assert numbers["held-out accuracy"] == numbers["training accuracy"]
    assert list_caches(place / "cache")
    shutil.rmtree(place / "cache")
    assert run(monkeypatch, *words, "--output", place / "o", "--no-cache") == 0
    assert not (place / "cache").exists()
    assert run(monkeypatch, "train-classifier", *words[2:], "--output", place / "n", "--no-cache") == 2
    assert "add --probe" in capsys.readouterr().err and not (place / "n").exists()
