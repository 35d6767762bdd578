"""The paper's VGG-16 for CAM: published convolutions, frozen, and new layers trained on their features."""

import copy
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.bench.plan import VGG, Plan
from sigcam.bench.weights import published_state
from sigcam.core.config import FitConfig
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.models.wsol import CamVgg
from sigcam.network.attachment import attach
from sigcam.training.background import background_inputs, classes_of
from sigcam.training.features import Features, extract
from sigcam.training.linear_probe import train_on_features

TAIL_EPOCHS, TAIL_LR, TAIL_BATCH = 3, 3e-4, 32  # chosen by the loss on training images


def open_vgg(plan: Plan, train: Samples, progress: Progress) -> Classifier:
    """Return the network with published convolutions and new layers trained on the images."""
    classifier = load_classifier(VGG, num_classes=len(train.classes), device=plan.device, pretrained=False)
    published = {key.removeprefix("features."): tensor for key, tensor in published_state("vgg16").items()}
    classifier.model.get_submodule("features").load_state_dict(published)
    cells = conv_features(classifier, train, plan.output / "features", progress)
    _train_tail(_tail(classifier.model), cells, plan.seed, progress)
    return classifier


def _tail(model: nn.Module) -> nn.Sequential:
    """Return the layers after the convolutions, sharing the model's parameters."""
    assert isinstance(model, CamVgg)
    return nn.Sequential(model.conv6, model.relu, model.avgpool, nn.Flatten(), model.fc)


def conv_features(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """Return the output of the convolutions, (512, 14, 14) for each image, from the cache if possible."""
    head = copy.deepcopy(_tail(classifier.model))
    for parameter in head.parameters():  # fixed weights: the key of the cache includes the head's
        nn.init.constant_(parameter, 0.01)
    parts = OrderedDict(features=classifier.model.get_submodule("features"), head=head)
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    net = attach(nn.Sequential(parts), head="head", layer="features", **known)
    return extract(net, samples, FitConfig(), cache=cache, progress=progress)


@torch.no_grad()
def pooled_features(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """Return the input of the last layer, (1024,) for each image and for its background, computed from
    `conv_features`."""
    cells, tail = conv_features(classifier, samples, cache, progress), _tail(classifier.model)
    net = attach(classifier.model, transform=classifier.transform, class_names=classifier.classes)
    device, rows, alone = net.device, list[Tensor](), list[Tensor]()
    for chunk, labels in zip(cells.views[0].split(64), cells.labels.split(64), strict=True):
        maps: Any = SimpleNamespace(features=tail[:2](chunk.to(device).float()))  # F (n, 1024, 14, 14)
        rows.append(tail[2:4](maps.features).cpu())
        shown = classes_of(labels, net.classes).to(device)
        alone.append(background_inputs(net, maps, shown, FitConfig()).cpu())
    about = cells.labels, cells.index, cells.skipped, cells.seconds
    return Features((torch.cat(rows),), *about, backgrounds=(torch.cat(alone),))


def _train_tail(tail: nn.Sequential, cells: Features, seed: int, progress: Progress) -> list[float]:
    """Train the layers after the convolutions on their features; return the mean loss of each epoch."""
    optimizer = torch.optim.Adam(tail.parameters(), lr=TAIL_LR, weight_decay=5e-4)
    steps = TAIL_EPOCHS * -(-len(cells) // TAIL_BATCH)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        data = cells.views[0], cells.labels
        settings: Any = {"epochs": TAIL_EPOCHS, "batch_size": TAIL_BATCH, "scheduler": decay}
        return train_on_features(tail, *data, optimizer, **settings, progress=progress)
