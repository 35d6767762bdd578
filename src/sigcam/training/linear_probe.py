"""train_probe: train the last layer of a classifier on a frozen backbone."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sigcam.core.config import TrainConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.network.modules import run_model
from sigcam.network.split import find_split
from sigcam.network.trace import chunks, eval_mode
from sigcam.training.classifier import read_batches


@dataclass(frozen=True)
class ProbeResult:
    """Mean loss of each epoch, accuracy on the training images, and (id, reason) of unreadable images."""

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
    """Train the classifier's last layer, in place, with softmax cross-entropy on features computed once.

    The layer starts from PyTorch's default initialisation and is trained with Adam.
    """
    model = classifier.model
    split, _ = find_split(model, seed=seed)
    if len(split.last) > 1:
        raise ModelError(f"{classifier.name} has {len(split.last)} heads, and a linear probe trains one.")
    layer = model.get_submodule(split.last[0])
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    if weight[0, 0].numel() != 1 or weight.shape[0] != len(samples.classes):
        raise ModelError(f"{classifier.name} has no linear last layer with {len(samples.classes)} outputs.")
    config = TrainConfig(batch_size=batch_size, workers=workers)
    features, labels, skipped = _layer_inputs(classifier, layer, samples, config, progress)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        probe = nn.Linear(features.shape[1], len(weight), bias=bias is not None)
        optimizer = torch.optim.Adam(probe.parameters(), lr=lr)
        train = partial(train_on_features, epochs=epochs, batch_size=batch_size, progress=progress)
        losses = train(probe, features, labels, optimizer)
    with torch.no_grad():
        accuracy = float((probe(features).argmax(1) == labels).float().mean())
        weight.copy_(probe.weight.reshape(weight.shape))
        if isinstance(bias, Tensor):
            bias.copy_(probe.bias)
    return ProbeResult(tuple(losses), accuracy, len(labels), tuple(skipped.items()))


def train_on_features(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch_size: int,
    scheduler: LRScheduler | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Train a module on (n, ...) features with softmax cross-entropy; return the mean loss of each epoch.
    The scheduler is stepped after every batch."""
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
                if scheduler:
                    scheduler.step()
                summed += float(loss.detach()) * len(chosen)
                done += 1
                if progress:
                    progress("training", done, total)
            losses.append(summed / len(features))
    return losses


@torch.no_grad()
def _layer_inputs(
    classifier: Classifier, layer: nn.Module, samples: Samples, config: TrainConfig, progress: Progress | None
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Return what enters the layer (images, N), labels (images,), and why which image could not be read."""
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
    joined = torch.cat(parts)
    if len(joined.unique()) < 2:
        raise DataError(f"all {len(joined)} images show one class: a classifier learns from at least two.")
    return torch.cat(rows), joined, skipped
