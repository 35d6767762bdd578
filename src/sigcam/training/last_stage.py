"""Train the last stage of a classifier on outputs of the frozen part before it, computed once per image."""

from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.errors import ConfigError, DataError, ModelError
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.trace import agree
from sigcam.training.augmentation import seed_of
from sigcam.training.background import KeptMaps, background_inputs, classes_of
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.features import Features, extract
from sigcam.training.wsol import Trainer, trainer_named

CHUNK = 32  # images in one pass of the last stage


@dataclass(frozen=True)
class StageConfig:
    """How a last stage is trained: SGD with Nesterov momentum (PROTOCOL 3); its rate falls linearly to zero.

    Args:
        first: the child module that training begins with, or one inside a Sequential: "blocks.6".
        crop: share of the grid's height and width that a random crop keeps; the protocol's is 224 of 256.
    """

    first: str
    epochs: int = 4
    lr: float = 0.03
    weight_decay: float = 1e-4
    batch_size: int = 32
    crop: float = 224 / 256


class LastStage:
    """A classifier in two parts: the frozen one, and the stage from the child `first` on, with the head; and
    what trains the stage."""

    def __init__(self, classifier: Classifier, first: str, wsol: str | None = None) -> None:
        self.classifier, self.first = classifier, first
        self.trainer = trainer_named(wsol)(classifier)  # which may put a layer into it
        known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
        pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
        self.example = classifier.transform(Image.fromarray(pixels))[None].to(
            next(classifier.model.parameters())
        )
        self.net: DualBranch = attach(classifier.model, example=self.example, **known)
        self.frozen, self.stage = split_children(classifier.model, first)
        with torch.no_grad():
            self.example_output = self.frozen(self.example)
            if not agree(self.stage(self.example_output), classifier.model(self.example)):
                raise ModelError(f"{classifier.name} does more than run its children in turn.")

    def outputs(self, samples: Samples, cache: Path | None, progress: Progress | None) -> Features:
        """Return the frozen part's outputs (n, N, P, Q) in 16 bits, from the cache if possible."""
        channels = self.example_output.shape[1]
        head = nn.Sequential(  # any head that reads maps, always the same: the cache's key includes it
            nn.Conv2d(channels, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2, len(samples.classes)),
        ).to(self.example_output.device)
        for parameter in head.parameters():
            nn.init.constant_(parameter, 0.01)
        parts = nn.Sequential(OrderedDict(frozen=self.frozen, head=head)).eval()
        known: Any = {"transform": self.classifier.transform, "class_names": samples.classes}
        net = attach(parts, head="head", layer="frozen", example=self.example, **known)
        return extract(net, samples, FitConfig(), cache=cache, progress=progress)

    @cached_property
    def fast_stage(self) -> nn.Sequential:
        """The stage of an optimised copy of the classifier, as it is now."""
        return split_children(HeadInputs(self.net).fast_net.model, self.first)[1]

    @torch.no_grad()
    def head_inputs(
        self, outputs: Features, progress: Progress | None = None, *, backgrounds: bool = False
    ) -> Features:
        """Return what enters the head, (n, N) for each image and, if wanted, for its background."""
        net, stage, rows, alone = self.net, self.fast_stage, list[Tensor](), list[Tensor]()
        position = [name for name, _ in stage.named_children()].index(net.split.layer.partition(".")[0]) + 1
        for chunk, labels in zip(outputs.views[0].split(CHUNK), outputs.labels.split(CHUNK), strict=True):
            maps = KeptMaps(stage[:position](chunk.to(net.device).float()))
            rows.append(stage[position:-1](maps.features).cpu())
            if backgrounds:
                shown = classes_of(labels, net.classes).to(net.device)
                alone.append(background_inputs(net, maps, shown, FitConfig()).cpu())
            if progress:
                progress("last stage", CHUNK * (len(rows) - 1) + len(chunk), len(outputs))
        about = outputs.labels, outputs.index, outputs.skipped, outputs.seconds
        return Features((torch.cat(rows),), *about, backgrounds=(torch.cat(alone),) if alone else ())

    def train(
        self,
        outputs: Features,
        config: StageConfig,
        *,
        samples: Samples | None = None,
        seed: int = 0,
        checkpoint: Path | None = None,
        progress: Progress | None = None,
    ) -> tuple[float, ...]:
        """Train the stage in place on random crops and mirror images of the outputs, in bfloat16; return the
        mean loss of each epoch. A checkpoint is written after each, resumed from, and removed at the end.

        Args:
            samples: the images of the outputs, for a trainer that alters images: the outputs of altered ones
                are computed anew.
        """
        trainer, stage, device, losses = self.trainer, self.stage, self.net.device, list[float]()
        if trainer.alters_images and samples is None:
            raise ConfigError(f"{type(trainer).__name__} alters the images: give samples too.")
        facts = [asdict(config), seed, fingerprint(stage), hash_of(outputs.labels.tolist())]
        facts += [fingerprint(self.frozen), type(trainer).__name__]
        saved = Checkpoint(checkpoint, facts)
        flags = {name: parameter.requires_grad for name, parameter in stage.named_parameters()}
        settings: Any = {"momentum": 0.9, "nesterov": True, "weight_decay": config.weight_decay}
        trained = [*stage.requires_grad_(True).parameters(), *trainer.parameters]
        optimizer = torch.optim.SGD(trained, config.lr, **settings)
        if state := saved.load(map_location=device):
            stage.load_state_dict(state["stage"])
            optimizer.load_state_dict(state["optimizer"])
            trainer.load_state(state["trainer"])
            losses = list(state["losses"])
        shown, epochs = samples, config.epochs
        for epoch in range(len(losses), epochs):
            if samples is not None:
                altered = trainer.samples(samples, epoch, epochs, seed=seed, progress=progress)
                if altered is not shown:
                    shown, outputs = altered, self.outputs(altered, None, progress)
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed_of(seed, epoch, "last stage"))
                losses.append(
                    _train_epoch(trainer, stage.train(), outputs, optimizer, config, epoch, progress)
                )
            if not all(bool(torch.isfinite(p).all()) for p in stage.parameters()):
                raise DataError(f"training diverged at lr={config.lr:g}: try a smaller one.")
            state = {"stage": stage.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            saved.save({**state, "trainer": trainer.state()})
        for name, parameter in stage.eval().named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        saved.remove()
        self.__dict__.pop("fast_stage", None)
        return tuple(losses)


def split_children(model: nn.Module, first: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the model's children before the one called `first`, and those from it on, with the same
    parameters; what enters the last one is flattened. A Sequential is cut in two: "blocks.6"."""
    children = list(model.named_children())
    names = [name for name, _ in children]
    outer, _, inner = first.partition(".")
    if outer in names and inner:
        at = names.index(outer)
        parts = split_sequential(children[at][1], inner)
        children[at : at + 1] = [(f"before {first}".replace(".", " "), parts[0]), (outer, parts[1])]
        first, names = outer, [name for name, _ in children]
    if first not in names[1:]:
        raise ModelError(f"{first!r} is none of the modules after the first: {', '.join(names[1:])}.")
    at = names.index(first)
    last = [*children[at:-1], ("flatten", nn.Flatten()), children[-1]]
    return nn.Sequential(OrderedDict(children[:at])), nn.Sequential(OrderedDict(last))


def split_sequential(module: nn.Module, first: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a Sequential's children before the one called `first`, and those from it on."""
    names = [name for name, _ in module.named_children()]
    if not isinstance(module, nn.Sequential) or first not in names[1:]:
        raise ModelError(f"{first!r} is none of the modules after the first: {', '.join(names[1:])}.")
    at = names.index(first)
    return module[:at], module[at:]


def _train_epoch(
    trainer: Trainer,
    stage: nn.Sequential,
    outputs: Features,
    optimizer: torch.optim.Optimizer,
    config: StageConfig,
    epoch: int,
    progress: Progress | None,
) -> float:
    """Train for one epoch; return the mean loss before each step."""
    device, summed, count = next(stage.parameters()).device, 0.0, len(outputs)
    maps, steps = outputs.views[0], -(-count // config.batch_size)
    for number, chosen in enumerate(torch.randperm(count).split(config.batch_size)):
        if len(chosen) == 1 < count:  # BatchNorm has no statistics of one image
            continue
        done = epoch * steps + number
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - done / (config.epochs * steps))
        batch = _random_view(maps[chosen].to(device), config.crop)
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16):
            labels = outputs.labels[chosen].to(device)
            judged = trainer.logits(stage, batch.float(), labels)
            loss = torch.stack([F.cross_entropy(each.float(), labels) for each in judged]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        summed += float(loss.detach()) * len(chosen)
        if progress:
            progress("training", done + 1, config.epochs * steps)
    return summed / count


def _random_view(maps: Tensor, crop: float) -> Tensor:
    """Return a random crop of maps (B, N, P, Q), the same for all, half of them mirrored."""
    sizes = [max(1, round(crop * cells)) for cells in maps.shape[2:]]
    for dim, kept in zip((2, 3), sizes, strict=True):
        start = int(torch.randint(maps.shape[dim] - kept + 1, ()))
        maps = maps.narrow(dim, start, kept)
    mirrored = torch.rand(len(maps), device=maps.device) < 0.5
    return torch.where(mirrored[:, None, None, None], maps.flip(-1), maps)
