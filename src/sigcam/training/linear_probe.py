"""Training a softmax classifier to attach to: a linear probe on a frozen backbone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.network.split import find_split
from sigcam.network.trace import chunks, eval_mode

log = logging.getLogger("sigcam")


@dataclass(frozen=True)
class ProbeResult:
    """What training the probe gave: the mean loss of each epoch, accuracy on its own images, files left
    out."""

    losses: tuple[float, ...]
    train_accuracy: float
    images: int
    skipped: tuple[tuple[str, str], ...]


def train_probe(
    classifier: Classifier,
    samples: Samples,
    *,
    epochs: int = 30,
    lr: float = 1e-3,
    batch_size: int = 32,
    workers: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProbeResult:
    """Trains the last layer of the classifier, in place, with softmax cross-entropy on features computed
    once.

    The layer starts as PyTorch starts any linear layer and is trained with Adam, as most heads are.
    """
    model = classifier.model
    split, _ = find_split(model, seed=seed)
    if len(split.last) > 1:
        raise ModelError(f"{classifier.name} has {len(split.last)} heads, and a linear probe trains one.")
    layer = model.get_submodule(split.last[0])
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    if weight[0, 0].numel() != 1 or weight.shape[0] != len(samples.classes):
        raise ModelError(
            f"the last layer of {classifier.name} is no linear layer with {len(samples.classes)} outputs."
        )
    features, labels, skipped = _features(classifier, layer, samples, batch_size, workers, progress)
    with torch.random.fork_rng([]), torch.enable_grad():
        torch.manual_seed(seed)
        probe = nn.Linear(features.shape[1], len(weight), bias=bias is not None)
        optimizer = torch.optim.Adam(probe.parameters(), lr=lr)
        losses = []
        for epoch in range(epochs):
            total = 0.0
            for chosen in torch.randperm(len(features)).split(batch_size):
                loss = F.cross_entropy(probe(features[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(chosen)
            losses.append(total / len(features))
            if progress:
                progress("training", epoch + 1, epochs)
    with torch.no_grad():
        accuracy = float((probe(features).argmax(1) == labels).float().mean())
        weight.copy_(probe.weight.reshape(weight.shape))
        if isinstance(bias, Tensor):
            bias.copy_(probe.bias)
    return ProbeResult(tuple(losses), accuracy, len(labels), tuple(skipped))


@torch.no_grad()
def _features(
    classifier: Classifier,
    layer: nn.Module,
    samples: Samples,
    batch_size: int,
    workers: int,
    progress: Progress | None,
) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """What enters the last layer, (images, N), with labels (images,)."""
    device = next(classifier.model.parameters()).device
    rows, labels, skipped = list[Tensor](), list[Tensor](), list[tuple[str, str]]()

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        entered = args[0].float().cpu()
        rows.append(entered.mean((2, 3)) if entered.ndim == 4 else entered)

    done = 0
    for batch in load_batches(samples, classifier.transform, batch_size=batch_size, workers=workers):
        skipped += batch.skipped
        if batch.labels is None:
            raise DataError("training a classifier needs labelled samples.")
        if len(batch.images):
            with eval_mode(classifier.model) as handles:
                handles.append(layer.register_forward_pre_hook(keep))
                for images in chunks(batch.images.to(device)):
                    classifier.model(images)
            labels.append(batch.labels)
        done += len(batch.indices) + len(batch.skipped)
        if progress:
            progress("features", done, len(samples))
    if not labels:
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    joined = torch.cat(labels)
    if len(joined.unique()) < 2:
        raise DataError(f"all {len(joined)} images show one class: a classifier learns from at least two.")
    return torch.cat(rows), joined, skipped
