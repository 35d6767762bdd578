"""What the commands open: a device, data, a classifier, a network, and names for the files they write."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from pathlib import Path

import torch

from sigcam.core.errors import CheckpointError, DataError
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


def attach_to(classifier: Classifier, head: str | None, layer: str | None) -> DualBranch:
    """A network around the classifier, with its preprocessing and class names."""
    return _prepared(attach(classifier.model, head=head, layer=layer), classifier)


def open_branch(branch: str, classifier: Classifier) -> DualBranch:
    """The network with the fitted branch in the file, or in the folder that `sigcam fit` wrote."""
    file = branch_file(branch, classifier.name)
    net = _prepared(load(file, classifier.model), classifier)
    if not net.fitted:
        raise CheckpointError(f"{file} holds a branch that was never fitted: make one with `sigcam fit`.")
    return net


def branch_file(branch: str, model: str) -> Path:
    """The file that --branch names: "sigmoid" the one that comes with the embedded model; CheckpointError if
    there is none."""
    if branch == "sigmoid" and model == "embedded":
        return SHIPPED
    if branch == "sigmoid":
        raise CheckpointError(
            "the sigmoid branch must be fitted first: give its file (--branch branch.safetensors, made by "
            "`sigcam fit`), or use --branch centred, which needs none."
        )
    file = Path(branch) / "branch.safetensors" if Path(branch).is_dir() else Path(branch)
    if not file.is_file():
        raise CheckpointError(f"--branch {branch}: no such file {file}, and no branch of that name.")
    return file


def _prepared(net: DualBranch, classifier: Classifier) -> DualBranch:
    net.transform = classifier.transform
    net.class_names = net.class_names or classifier.classes
    return net


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
