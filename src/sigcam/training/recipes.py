"""Train a head by gradient steps over cached or over fresh features."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.distributed import single_process, world_size
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import hash_of
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint
from sigcam.metrics.classification import EvidenceQuality, Quality, average_precision, both_ways, quality_of
from sigcam.models.preprocess import Transform
from sigcam.network.calibration import BranchCalibration
from sigcam.network.dual import DualBranch
from sigcam.network.identity import network_facts
from sigcam.network.trace import chunks
from sigcam.training.augmentation import augmented
from sigcam.training.features import (
    Features,
    TrainingData,
    batches_of,
    check_batch,
    length_of,
    preprocessing,
)
from sigcam.training.loss import as_targets, balanced_bce
from sigcam.training.selection import choose_background
from sigcam.training.training_set import TrainingSet

PAPER_EPOCHS, CACHED_EPOCHS, PATIENCE_EPOCHS = 10, 30, 5
DEFAULT_LR = 1e-3
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TrainedHead:
    """The state of the branch's head after training. The other fields are those of `FitResult`.

    Args:
        logits: logits (n, C) of what enters the head (n, ...).
        unseen_logits: the same by a head trained without the held-out images; None if there are none.
    """

    state: dict[str, Tensor]
    losses: tuple[float, ...]
    l2: float
    background: float = 0.0
    logits: Logits | None = None
    unseen_logits: Logits | None = None
    calibration: BranchCalibration | None = None
    evidence_quality: EvidenceQuality | None = None
    without_background: int = 0
    search: tuple[tuple[float, float], ...] = ()
    search_by: str = "average precision"
    background_search: tuple[tuple[float, float], ...] = ()
    quality: Quality | None = None
    gradient: float | None = None
    skipped: tuple[Skipped, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class HeadTrainer:
    """Trains a copy of the branch's head; the branch itself stays as it is."""

    def __init__(self, net: DualBranch, pos_weight: Tensor, config: FitConfig, l2: float = 0.0) -> None:
        self.net, self.l2, self.lr = net, l2, config.lr or DEFAULT_LR
        self.head = copy.deepcopy(net.sigmoid).train()
        if next(self.head.parameters()).dtype in (torch.float16, torch.bfloat16):
            self.head.float()  # small steps vanish in half precision
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.dtype = self.parameters[0].dtype
        self.pos_weight = pos_weight.to(net.device, self.dtype)
        if config.recipe == "paper-code":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters, self.lr, momentum=0.9, nesterov=True, weight_decay=config.weight_decay
            )
        else:
            self.optimizer = torch.optim.Adam(self.parameters, self.lr)

    def step(self, pooled: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
        """Take one gradient step on the head's inputs, with (B,) weights; return the loss before it."""
        device, classes = self.net.device, self.net.classes
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            logits = self.head.from_pooled(pooled.to(device, self.dtype))
            targets = as_targets(targets, classes).to(device, self.dtype)
            weight = torch.ones(len(targets), 1) if weights is None else weights[:, None]
            weight = (weight / weight.sum()).to(device, self.dtype)
            loss = F.binary_cross_entropy_with_logits(
                logits, targets, weight, reduction="sum", pos_weight=self.pos_weight
            )
            loss = loss / classes  # Eq. 12 with a weight per image
            squares = sum((p**2).sum() for p in self.parameters if p.ndim > 1 and self.l2)
            self.optimizer.zero_grad()
            (loss + self.l2 * squares / classes).backward()
            self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def logits(self, pooled: Tensor) -> Tensor:
        """Return the logits of the head's inputs, in eval mode."""
        self.head.eval()
        parts = [self.head.from_pooled(part.to(self.net.device, self.dtype)) for part in pooled.split(256)]
        self.head.train()
        return torch.cat(parts) if parts else torch.empty(0, self.net.classes)

    def check_finite(self) -> None:
        """Raise DataError if training diverged."""
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise DataError(f"training diverged at lr={self.lr:g}: try a smaller one.")


def train_cached(
    net: DualBranch, data: TrainingSet, pos_weight: Tensor, config: FitConfig, progress: Progress | None
) -> TrainedHead:
    """Train with Adam until the held-out loss stops falling; return the head of the best epoch."""
    began = time.perf_counter()
    everything, chosen = data.gather(), config.background
    background = 0.0 if chosen == "auto" else float(chosen)
    with single_process():  # each process has the rows of all
        trained = _train_rows(net, everything.with_background(background), pos_weight, config, progress)
        tried = list[tuple[float, float]]()

        def score(head: HeadTrainer) -> Tensor:
            return average_precision(*both_ways(*everything.held_out_logits(head.logits, net.classes)))

        def train_with(weight: float) -> tuple[tuple[HeadTrainer, list[float]], Tensor]:
            rows = everything.with_background(weight)
            found = _train_rows(net, rows, pos_weight, config, progress)
            return found, score(found[0])

        has_held_out = bool(everything.scored.any())
        if chosen == "auto" and everything.can_choose_background():
            background, found, tried = choose_background(score(trained[0]), train_with, progress)
            trained = found or trained
        trainer, losses = trained
        quality = None
        if has_held_out:
            quality = quality_of(*everything.held_out_logits(trainer.logits, net.classes), pos_weight)
    return TrainedHead(
        trainer.head.state_dict(),
        tuple(losses),
        trainer.l2,
        background,
        trainer.logits,
        trainer.logits if has_held_out else None,
        quality=quality,
        background_search=tuple(tried),
        seconds={"training": time.perf_counter() - began},
    )


def _train_rows(
    net: DualBranch, data: TrainingSet, pos_weight: Tensor, config: FitConfig, progress: Progress | None
) -> tuple[HeadTrainer, list[float]]:
    """Train a head on rows that are not held out; return it as after its best epoch, and the losses."""
    epochs = config.epochs or CACHED_EPOCHS
    l2 = 0.0 if config.l2 == "auto" else data.image_share() * float(config.l2)
    training, has_held_out = (~data.held_out).nonzero()[:, 0], bool(data.scored.any())
    trainer, losses = HeadTrainer(net, pos_weight, config, l2), list[float]()
    best_loss, best_state, since_best = math.inf, copy.deepcopy(trainer.head.state_dict()), 0
    for epoch in range(epochs):
        total = 0.0
        for chosen in training[torch.randperm(len(training))].split(config.batch_size):
            rows = data.select(chosen)
            targets = rows.targets(torch.arange(net.classes))
            total += trainer.step(rows.features, targets, rows.weights) * len(chosen)
        losses.append(total / len(training))
        trainer.check_finite()
        if has_held_out:
            logits, targets = data.held_out_logits(trainer.logits, net.classes)
            loss = float(balanced_bce(logits, targets, pos_weight.cpu()))
            since_best += 1
            if loss < best_loss:
                best_loss, best_state, since_best = loss, copy.deepcopy(trainer.head.state_dict()), 0
        stop = since_best >= PATIENCE_EPOCHS
        if progress:
            progress("training", epochs if stop else epoch + 1, epochs)
        if stop:
            break
    if has_held_out:
        trainer.head.load_state_dict(best_state)
    return trainer, losses


def train_by_steps(
    net: DualBranch,
    data: TrainingData | Features,
    pos_weight: Tensor,
    config: FitConfig,
    transform: Transform | None,
    cache: Path | None,
    progress: Progress | None,
) -> TrainedHead:
    """Train as the paper does: each epoch runs the backbone on newly augmented images.

    A Dataset or DataLoader is expected to augment its images itself; of features, a random view is taken. For
    samples, a checkpoint is written to the folder `cache` after each epoch, and removed at the end.
    """
    if world_size() > 1:
        raise ConfigError(f"recipe {config.recipe} runs in one process: use recipe fast with torchrun.")
    began, epochs = time.perf_counter(), config.epochs or PAPER_EPOCHS
    backbone = net.with_model(_with_batch_statistics(net.model)) if config.batch_norm == "batch" else net
    trainer, losses, skipped = HeadTrainer(net, pos_weight, config), list[float](), dict[str, str]()
    checkpoint = _checkpoint(net, data, config, transform, cache)
    if state := checkpoint.load(map_location=net.device):
        trainer.head.load_state_dict(state["head"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        losses, skipped = state["losses"], state["skipped"]
    for epoch in range(len(losses), epochs):
        torch.manual_seed(config.seed * 1000 + epoch)  # a resumed run draws what an uninterrupted one does
        if config.recipe == "paper-code" and (epoch + 1) % config.decay_every == 0:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.1
        total, count = 0.0, 0
        if isinstance(data, Features):
            batches = _feature_batches(data, config)
        else:
            fresh = _fresh_batches(net, data, config, transform, skipped)
            batches = ((_pooled(backbone, images, config), labels) for images, labels in fresh)
        for pooled, labels in batches:
            total += trainer.step(pooled, labels) * len(labels)
            count += len(labels)
            if progress:
                progress(f"epoch {epoch + 1}", count, max(length_of(data), count))
        if not count:
            reason = next(iter(skipped.values()), "there are none")
            raise DataError(f"there are no images to fit on: {reason}")
        trainer.check_finite()
        losses.append(total / count)
        state = {"head": trainer.head.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        checkpoint.save({**state, "losses": losses, "skipped": skipped})
    checkpoint.remove()
    seconds = {"training": time.perf_counter() - began}
    state, unread = trainer.head.state_dict(), tuple(skipped.items())
    return TrainedHead(state, tuple(losses), 0.0, skipped=unread, seconds=seconds)


def _checkpoint(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    transform: Transform | None,
    cache: Path | None,
) -> Checkpoint:
    """Return the checkpoint of this training; without a file if there is no cache, or data without names."""
    if cache is None or not isinstance(data, Samples):
        return Checkpoint(None, {})
    facts = {
        "config": asdict(config),
        **network_facts(net, transform or net.transform),
        "labels": data_fingerprint(data),
        "files": files_fingerprint(data),
    }
    return Checkpoint(cache / f"recipe-{hash_of(facts)[:24]}.pt", facts)


def _feature_batches(data: Features, config: FitConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of features and labels, in random order, each row of a random view."""
    views = torch.stack(data.views)
    for chosen in torch.randperm(len(data)).split(config.batch_size):
        yield views[torch.randint(len(views), (len(chosen),)), chosen].float(), data.labels[chosen]


def _fresh_batches(
    net: DualBranch,
    data: TrainingData,
    config: FitConfig,
    transform: Transform | None,
    skipped: dict[str, str],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch, in random order; unreadable images are added to `skipped`."""
    if not isinstance(data, Samples):
        for item in batches_of(data, config, shuffle=True):
            yield check_batch(item, net.classes)
        return
    view, size, workers = augmented(preprocessing(net, transform)), config.batch_size, config.workers
    shuffled = Samples(tuple(data[i] for i in torch.randperm(len(data)).tolist()), data.classes)
    seed, spawn = int(torch.randint(2**31, ())), net.device.type == "cuda"
    for batch in load_batches(shuffled, view, batch_size=size, workers=workers, spawn=spawn, seed=seed):
        skipped.update(batch.skipped)
        if len(batch.images) and batch.labels is not None:
            yield batch.images, batch.labels


@torch.no_grad()
def _pooled(net: DualBranch, images: Tensor, config: FitConfig) -> Tensor:
    """Return the head's inputs in full precision; batch statistics are those of the whole batch."""
    dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
    images = images.to(net.device, dtype)
    parts = (images,) if config.batch_norm == "batch" else chunks(images)
    with torch.autocast(net.device.type, enabled=config.autocast):
        return torch.cat([net(part).pooled.float() for part in parts])


def _with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm layers normalise by the statistics of each batch."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    return model
