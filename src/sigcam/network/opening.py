"""Open a classifier, or a classifier with its branch, by the names that commands and the page are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.core.errors import CheckpointError, ConfigError, DataError
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
