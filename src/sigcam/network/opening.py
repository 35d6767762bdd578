"""Open a classifier, with or without its branch, from the options of the commands and the page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.core.errors import CheckpointError, ConfigError
from sigcam.models.classifier import Classifier, check_model_name, load_classifier
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch
from sigcam.network.hub import download_branch, is_hub_address

SHIPPED = Path(__file__).parent / "shipped" / "embedded.safetensors"  # its card is beside it


def check_device(name: str) -> str:
    """Return the device's name; ConfigError if it cannot be used."""
    try:
        torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
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
    """Load the classifier in the memory layout in which convolutions are fastest."""
    options: Any = {"crop": crop, "num_classes": classes, "pretrained": pretrained}
    classifier = load_classifier(model, weights=weights, device=check_device(device), **options)
    classifier.model.to(memory_format=torch.channels_last)  # up to twice as fast
    return classifier


@dataclass(frozen=True)
class OpenedNetwork:
    """A classifier with its branch, and the name of the branch to draw maps from."""

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
        branch: a branch file, the folder that `sigcam fit` wrote, or hf://USER/REPO; "sigmoid" for the one
            shipped with the embedded model; "softmax" or "centred", which need no file; None for a new branch
            to fit.
    """
    file = None if branch in (None, "softmax", "centred") else find_branch_file(branch, model, weights)
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


def find_branch_file(branch: str | None, model: str, weights: Path | None) -> Path | str:
    """Return the file, or the address on the hub, that --branch names; CheckpointError if there is none."""
    if branch == "sigmoid" and has_shipped_branch(model, weights):
        return SHIPPED
    check_model_name(model)  # else its name is what is wrong
    if branch == "sigmoid":
        raise CheckpointError(
            "the sigmoid branch must be fitted first: give its file (--branch branch.safetensors, made by "
            "`sigcam fit`), or draw maps with --branch centred, which needs none."
        )
    if branch and is_hub_address(branch):
        download_branch(branch)  # before the classifier, which takes longer
        return branch
    path = Path(branch or "")
    file = path / "branch.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--branch {branch}: no such file {file}, and no branch of that name.")
    return file


def has_shipped_branch(model: str, weights: Path | None) -> bool:
    """Whether a fitted branch is shipped for the classifier."""
    return model == "embedded" and weights is None
