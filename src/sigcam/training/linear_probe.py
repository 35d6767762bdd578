"""train_probe: train the last layer of a classifier on a frozen backbone."""

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.network.attachment import attach
from sigcam.network.modules import run_model
from sigcam.network.split import find_split
from sigcam.network.trace import chunks, eval_mode
from sigcam.training.classifier import read_batches
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.features import Features, extract
from sigcam.training.training_set import choose_held_out

PROBED_ROWS = 4096  # whose logits are computed at a time


@dataclass(frozen=True)
class ProbeResult:
    """The result of a linear probe.

    Args:
        losses: mean loss of each epoch.
        train_accuracy: on the training images, by the final layer.
        held_out_accuracy: on images that the measured layer was not trained on; None if it was not measured.
        held_out_images: their number.
        held_out_part: whether they are a part of the training images; the measured layer was then trained on
            the others, and the final one on all.
        images: number of training images.
        skipped: (id, reason) of images that could not be read.
        features: what entered the layer; `fit` takes them too, unless the head is more than one linear layer.
    """

    losses: tuple[float, ...]
    train_accuracy: float
    held_out_accuracy: float | None
    held_out_images: int
    held_out_part: bool
    images: int
    skipped: tuple[tuple[str, str], ...]
    features: Features = field(repr=False, compare=False)


def train_probe(
    classifier: Classifier,
    samples: Samples,
    *,
    epochs: int = 30,
    lr: float = 1e-3,
    batch_size: int = 32,
    workers: int = 0,
    seed: int = 0,
    held_out: Samples | None = None,
    holdout: float = 0.0,
    cache: Path | None = None,
    maps: bool = False,
    progress: Progress | None = None,
) -> ProbeResult:
    """Train the classifier's last layer, in place, with softmax cross-entropy on features computed once.

    The layer starts from PyTorch's default initialisation and is trained with Adam. Where the head is one
    linear layer, the features are those of `fit`, from the same cache; a longer head takes its own pass.

    Args:
        held_out: other images to measure accuracy on.
        holdout: share of each class's training images to measure accuracy on if there are no others.
        cache: folder of cached features.
        maps: also keep F, for `fit` to compute backgrounds from, if it fits into the budget.
    """
    layer = _linear_layer(classifier, samples, seed)
    config = TrainConfig(batch_size=batch_size, workers=workers)
    net = attach(classifier.model, transform=classifier.transform, seed=seed)
    inputs = HeadInputs(net)

    def read(samples: Samples, maps: bool) -> Features:
        if not inputs.linear:
            return _layer_inputs(classifier, layer, samples, config, progress)
        how: Any = {"inputs": inputs, "cache": cache, "maps": maps, "progress": progress}
        return extract(net, samples, FitConfig(workers=workers, seed=seed), **how)

    features = read(samples, maps)
    rows, labels, skipped = features.views[0], features.labels, features.skipped
    if not len(labels):
        raise DataError(f"none of the {len(samples)} images could be read; the first: {skipped[0][1]}")
    if len(labels.unique()) < 2:
        raise DataError(f"all {len(labels)} images show one class: a classifier learns from at least two.")
    settings: Any = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
    losses, accuracy = train_layer(layer, rows, labels, **settings, progress=progress)
    measured, count = None, 0
    if held_out is not None:
        found = read(held_out, maps=False)
        measured, count = _accuracy(layer, found.views[0], found.labels), len(found)
    elif holdout:
        chosen = choose_held_out(labels, FitConfig(holdout=holdout, seed=seed))
        other = copy.deepcopy(layer)
        train_layer(other, rows[~chosen], labels[~chosen], **settings, progress=_named("held out", progress))
        measured, count = _accuracy(other, rows[chosen], labels[chosen]), int(chosen.sum())
    about = measured if count else None, count, held_out is None and count > 0
    return ProbeResult(tuple(losses), accuracy, *about, len(labels), skipped, features)


def _linear_layer(classifier: Classifier, samples: Samples, seed: int) -> nn.Module:
    """Return the last layer; ModelError unless it is linear, with an output for each class of the data."""
    split, _ = find_split(classifier.model, seed=seed)
    if len(split.last) > 1:
        raise ModelError(f"{classifier.name} has {len(split.last)} heads, and a linear probe trains one.")
    layer = classifier.model.get_submodule(split.last[0])
    weight = layer.get_parameter("weight")
    if weight[0, 0].numel() != 1 or weight.shape[0] != len(samples.classes):
        raise ModelError(f"{classifier.name} has no linear last layer with {len(samples.classes)} outputs.")
    return layer


def _named(stage: str, progress: Progress | None) -> Progress | None:
    return progress and (lambda _, done, total: progress(stage, done, total))


def train_layer(
    layer: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    epochs: int = 30,
    lr: float = 1e-3,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[list[float], float]:
    """Train a linear layer, in place, on (n, N) features with labels (n,) and Adam, from PyTorch's default
    initialisation; return the mean loss of each epoch and the accuracy on these features."""
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        probe = nn.Linear(features.shape[1], len(weight), bias=bias is not None)
        optimizer = torch.optim.Adam(probe.parameters(), lr=lr)
        train = partial(_train_on_features, epochs=epochs, batch_size=batch_size, progress=progress)
        losses = train(probe, features, labels, optimizer)
    with torch.no_grad():
        weight.copy_(probe.weight.reshape(weight.shape))
        if isinstance(bias, Tensor):
            bias.copy_(probe.bias)
    return losses, _accuracy(layer, features, labels)


@torch.no_grad()
def _accuracy(layer: nn.Module, features: Tensor, labels: Tensor) -> float:
    """Return the share of (n, N) features whose label is the highest output; nan if there are none."""
    weight, bias = layer.get_parameter("weight").flatten(1), getattr(layer, "bias", None)
    right = 0
    for part, expected in zip(features.split(PROBED_ROWS), labels.split(PROBED_ROWS), strict=True):
        logits = F.linear(part.to(weight), weight, bias)
        right += int((logits.argmax(1).cpu() == expected).sum())
    return right / len(labels) if len(labels) else float("nan")


def _train_on_features(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch_size: int,
    progress: Progress | None = None,
) -> list[float]:
    """Train a module on (n, ...) features with softmax cross-entropy; return the mean loss of each epoch."""
    device = next(module.parameters()).device
    done, total, losses = 0, epochs * -(-len(features) // batch_size), list[float]()
    with torch.enable_grad():
        for _ in range(epochs):
            summed = 0.0
            for chosen in torch.randperm(len(features)).split(batch_size):
                logits = module(features[chosen].to(device).float())
                loss = F.cross_entropy(logits, labels[chosen].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                summed += float(loss.detach()) * len(chosen)
                done += 1
                if progress:
                    progress("training", done, total)
            losses.append(summed / len(features))
    return losses


@torch.no_grad()
def _layer_inputs(
    classifier: Classifier, layer: nn.Module, samples: Samples, config: TrainConfig, progress: Progress | None
) -> Features:
    """Return what enters the layer, from a pass of the whole model."""
    device = next(classifier.model.parameters()).device
    rows, parts, skipped = list[Tensor](), list[Tensor](), dict[str, str]()

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        entered = args[0].float().cpu()
        rows.append(entered.mean((2, 3)) if entered.ndim == 4 else entered)

    def report(done: int) -> None:
        if progress:
            progress("features", done, len(samples))

    for images, labels in read_batches(samples, classifier.transform, config, device, skipped, report):
        with eval_mode(classifier.model) as handles:
            handles.append(layer.register_forward_pre_hook(keep))
            for part in chunks(images.to(device)):
                run_model(classifier.model, part)
        parts.append(labels)
    return Features((torch.cat(rows),), torch.cat(parts), skipped=tuple(skipped.items()))
