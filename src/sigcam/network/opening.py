"""What the commands open: a device, data, a classifier, a network, and names for the files they write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.core.errors import CheckpointError, ConfigError, DataError
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch

SHIPPED = Path(__file__).parent / "shipped" / "embedded.safetensors"  # its card is beside it


def check_device(name: str) -> str:
    """The device's name, if something can be put on it."""
    try:
        torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def open_training_data(data: str, format: str | None) -> Samples:
    """The data's training split, if it has two classes with two images each."""
    samples = open_dataset(data, format=format, split="train")
    if len(samples.classes) < 2:
        raise DataError(
            f"the data has one class ({samples.classes[0]}): at least two are needed to tell them apart."
        )
    counts = Counter(sample.label or 0 for sample in samples)
    few = next((name for label, name in enumerate(samples.classes) if counts[label] < 2), None)
    if few is not None:
        raise DataError(f"class {few!r} has one image: give each class at least two, or remove its folder.")
    return samples


def open_classifier(
    model: str,
    weights: Path | None,
    crop: bool,
    device: str = "cpu",
    classes: int | None = None,
    *,
    pretrained: bool = True,
) -> Classifier:
    """The classifier that the options name, in the memory layout that convolutions are fastest in."""
    classifier = load_classifier(
        model,
        weights=weights,
        device=check_device(device),
        crop=crop,
        num_classes=classes,
        pretrained=pretrained,
    )
    classifier.model.to(memory_format=torch.channels_last)  # up to twice as fast; the model is ours alone
    return classifier


@dataclass(frozen=True)
class OpenedNetwork:
    """A classifier with a branch beside it, and the branch to draw maps from."""

    net: DualBranch
    classifier: Classifier
    branch: Literal["sigmoid", "softmax", "centred"]


def open_network(
    model: str = "embedded",
    weights: Path | None = None,
    branch: str | None = "sigmoid",
    *,
    head: str | None = None,
    layer: str | None = None,
    crop: bool = False,
    device: str = "cpu",
    pretrained: bool = True,
) -> OpenedNetwork:
    """Open the classifier that `model` and `weights` name, with the branch that `branch` names.

    Args:
        branch: a branch file, or the folder that `sigcam fit` wrote; "sigmoid" for the one that comes with
            the embedded model; "softmax" or "centred" for a head that needs no file; None to attach a new
            branch, to be fitted.
    """
    file = None if branch in (None, "softmax", "centred") else branch_file(branch, model, weights)
    if file and (head or layer):
        raise ConfigError("--head and --layer are part of a fitted branch: leave them out, or refit.")
    classifier = open_classifier(model, weights, crop, device, pretrained=pretrained)
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    if file is None:
        net = attach(classifier.model, head=head, layer=layer, **known)
        return OpenedNetwork(net, classifier, "centred" if branch == "centred" else "softmax")
    net = load(file, classifier.model, **known)
    if not net.fitted:
        raise CheckpointError(f"{file} holds a branch that was never fitted: make one with `sigcam fit`.")
    return OpenedNetwork(net, classifier, "sigmoid")


def branch_file(branch: str | None, model: str, weights: Path | None) -> Path:
    """The file that --branch names; CheckpointError if there is none."""
    if branch == "sigmoid" and has_shipped_branch(model, weights):
        return SHIPPED
    if branch == "sigmoid":
        raise CheckpointError(
            "the sigmoid branch must be fitted first: give its file (--branch branch.safetensors, made by "
            "`sigcam fit`), or use --branch centred, which needs none."
        )
    path = Path(branch or "")
    file = path / "branch.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--branch {branch}: no such file {file}, and no branch of that name.")
    return file


def has_shipped_branch(model: str, weights: Path | None) -> bool:
    """Whether a fitted branch comes with the classifier."""
    return model == "embedded" and weights is None


def class_index(given: str | None, net: DualBranch) -> int | None:
    """The class that --class names, by name or number."""
    names = net.class_names or ()
    if given is None or given in names:
        return None if given is None else names.index(given)
    if given.isdecimal():
        return int(given)
    close = get_close_matches(given, names, n=3)
    raise DataError(
        f"no class is named {given!r}" + (f": did you mean {', '.join(close)}?" if close else ".")
    )


def file_names(samples: Samples) -> list[str]:
    """A name for each sample's files, `photo.map` for `photo.jpg`: no two alike, none that of a picture."""
    plain = [sample.id.strip("/").replace("/", "__").replace("\\", "__") for sample in samples]
    stems = [name.rsplit(".", 1)[0] for name in plain]
    twice = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{name if stem in twice else stem}.map" for name, stem in zip(plain, stems, strict=True)]
