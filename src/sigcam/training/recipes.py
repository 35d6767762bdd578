"""Three ways to train a branch: solve for it, step over cached features, step over fresh ones."""

from __future__ import annotations

import copy
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, world_size
from sigcam.core.errors import DataError
from sigcam.core.files import write_atomic
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples
from sigcam.metrics.classification import Quality, average_precision, both_ways, quality_of
from sigcam.models.preprocess import Transform
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.sigmoid_head import SigmoidHead
from sigcam.network.trace import chunks
from sigcam.training.augmentation import augmented
from sigcam.training.features import TrainingData, batches_of, check_batch, length_of, linear_layer
from sigcam.training.logistic import Rows, Solution, chosen_penalty, find_axes, solve
from sigcam.training.loss import as_targets, balanced_bce

STRENGTHS = (1.0, 0.1, 0.01, 0.001)  # of the penalty, the strongest first
ROUGH = 1e-3  # gradient left in weights that only serve to choose a strength
UNSEARCHED = 0.1  # where no image can be held out to choose by
EPOCHS, CACHED_EPOCHS, PATIENCE_EPOCHS, LR = 10, 30, 5, 1e-3


@dataclass(frozen=True)
class TrainingTable:
    """Features of this process, all views one after another, then images without any of the classes.

    Args:
        held: (n,) rows of images that quality is measured on.
        judged: (n,) of these, one per image.
        order: (n,) numbers that sort the rows of all processes as one process has them.
        whole: these are the rows of all processes already.
    """

    rows: Rows
    held: Tensor
    judged: Tensor
    order: Tensor
    whole: bool = False

    def scored(self, logits: Callable[[Tensor], Tensor], classes: int) -> tuple[Tensor, Tensor]:
        """Logits and targets (B, C) of the held-out images of all processes, on the CPU."""
        some = self.rows.some(self.judged)
        pair = logits(some.features).double().cpu(), some.targets(torch.arange(classes)).cpu()
        parts = [pair] if self.whole else all_gather(pair)
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@dataclass(frozen=True)
class TrainOutcome:
    """A trained copy of the branch's head, and how it came about."""

    head: SigmoidHead
    losses: tuple[float, ...]
    l2: float
    search: tuple[tuple[float, float], ...] = ()
    quality: Quality | None = None
    gradient: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ solving


def solve_head(
    net: DualBranch, table: TrainingTable, weights: Tensor, config: FitConfig, progress: Progress | None
) -> TrainOutcome:
    """The one minimum of a linear head's loss and penalty."""
    layer = linear_layer(net)
    assert layer is not None
    own = getattr(layer, "bias", None) is not None
    device = table.rows.features.device
    how: Any = {
        "pos_weight": weights.to(device),
        "prior": _softmax_prior(net).to(device) if config.prior == "softmax" else None,
        "intercept": own,
    }
    began = time.perf_counter()
    axes = find_axes(table.rows, intercept=own)
    train, tested = table.rows.some(~table.held), bool(sum(all_gather(int(table.judged.sum()))))
    scores, tried, found = list[tuple[float, Tensor]](), dict[float, Solution](), None
    strengths = STRENGTHS if config.l2 == "auto" else (float(config.l2),)
    l2 = UNSEARCHED if config.l2 == "auto" else float(config.l2)
    quality = None
    for number, strength in enumerate(strengths if tested else ()):
        found = tried[strength] = solve(
            train, axes, net.classes, l2=strength, start=found, tolerance=ROUGH / (2 * strength), **how
        )
        logits, targets = table.scored(partial(_logits, found), net.classes)
        scores.append((strength, average_precision(*both_ways(logits, targets))))
        if progress:
            progress("penalty", number + 1, len(strengths))
        if _falling(scores):
            break
    if scores:
        l2, _ = chosen_penalty(scores)
        quality = quality_of(*table.scored(partial(_logits, tried[l2]), net.classes), weights)
    if progress and scores:
        progress("penalty", len(strengths), len(strengths))
    searched = time.perf_counter()
    step = partial(progress, "training") if progress else None
    final = solve(table.rows, axes, net.classes, l2=l2, start=tried.get(l2), progress=step, **how)
    head = copy.deepcopy(net.sigmoid)
    names = {module: name for name, module in net.sigmoid.named_modules()}
    place = head.get_submodule(names[layer])
    with torch.no_grad():
        place.get_parameter("weight").copy_(final.weight.reshape(place.get_parameter("weight").shape))
        if own:
            place.get_parameter("bias").copy_(final.bias)
    ended = time.perf_counter()
    kept = tuple((strength, float(each.nanmean())) for strength, each in scores)
    return TrainOutcome(
        head,
        (*(tried[l2].losses if l2 in tried else ()), *final.losses),
        l2,
        kept if config.l2 == "auto" else (),
        quality,
        final.gradient,
        {"penalty": searched - began, "training": ended - searched},
    )


def _logits(found: Solution, features: Tensor) -> Tensor:
    return features.double() @ found.weight.T + found.bias


def _falling(scores: list[tuple[float, Tensor]]) -> bool:
    """Whether the last two strengths are both worse than the best by more than its standard error."""
    means = [float(each.nanmean()) for _, each in scores]
    _, error = chosen_penalty(scores)
    return len(means) > 2 and max(means[-2:]) < max(means) - error


@torch.no_grad()
def _softmax_prior(net: DualBranch) -> Tensor:
    """(C, N) the softmax head's weights, their mean over classes taken off: what its probabilities fix."""
    found = linear_weight(net.last_layer("softmax"))
    if found is None or net.classes == 1:
        raise DataError("prior='softmax' needs a softmax head that is one linear layer: use prior='zero'.")
    weight = found[0].double()
    return weight - weight.mean(0)


# ------------------------------------------------------------------------------- steps over cached features


def train_cached(
    net: DualBranch, table: TrainingTable, weights: Tensor, config: FitConfig, progress: Progress | None
) -> TrainOutcome:
    """Adam over the features, until the held-out loss no longer falls; the best epoch's head."""
    began = time.perf_counter()
    table = _joined(table)
    rows, epochs, lr = table.rows, config.epochs or CACHED_EPOCHS, config.lr or LR
    penalty = 0.0 if config.l2 == "auto" else float(config.l2)
    training, tested = (~table.held).nonzero()[:, 0], bool(table.judged.any())
    head, losses, best = _Training(net, weights, config, lr, penalty), list[float](), math.inf
    state, since = copy.deepcopy(head.head.state_dict()), 0
    every = torch.arange(net.classes)
    for epoch in range(epochs):
        total = 0.0
        for chosen in training[torch.randperm(len(training))].split(config.batch_size):
            some = rows.some(chosen)
            total += head.step(some.features, some.targets(every), some.weights) * len(chosen)
        losses.append(total / len(training))
        head.check()
        if tested:
            logits, labels = table.scored(head.logits, net.classes)
            loss = float(balanced_bce(logits, labels, weights.cpu()))
            since = 0 if loss < best else since + 1
            if loss < best:
                best, state = loss, copy.deepcopy(head.head.state_dict())
        if progress:
            progress("training", epochs if since >= PATIENCE_EPOCHS else epoch + 1, epochs)
        if since >= PATIENCE_EPOCHS:
            break
    quality = None
    if tested:
        head.head.load_state_dict(state)
        quality = quality_of(*table.scored(head.logits, net.classes), weights)
    seconds = {"training": time.perf_counter() - began}
    return TrainOutcome(head.head, tuple(losses), penalty, quality=quality, seconds=seconds)


def _joined(table: TrainingTable) -> TrainingTable:
    """The rows of all processes, on each of them, in one order whatever their number is."""
    if world_size() == 1:
        return table
    here, device = table.rows, table.held.device
    rows = Rows(here.features.cpu(), here.labels.cpu(), here.weights.cpu())
    parts = all_gather(TrainingTable(rows, table.held.cpu(), table.judged.cpu(), table.order.cpu()))
    sorting = torch.cat([part.order for part in parts]).argsort()

    def join(name: str, of: str = "") -> Tensor:
        joined = torch.cat([getattr(getattr(part, of) if of else part, name) for part in parts])[sorting]
        return joined.to(device)

    rows = Rows(*(join(name, "rows") for name in ("features", "labels", "weights")))
    return TrainingTable(rows, join("held"), join("judged"), join("order"), whole=True)


class _Training:
    """A copy of the branch's head while it is trained; ours changes when all is done, or not at all."""

    def __init__(
        self, net: DualBranch, weights: Tensor, config: FitConfig, lr: float, penalty: float = 0.0
    ) -> None:
        self.net, self.lr, self.penalty = net, lr, penalty
        with torch.inference_mode(False):
            self.head = copy.deepcopy(net.sigmoid).train()
            if next(self.head.parameters()).dtype in (torch.float16, torch.bfloat16):
                self.head.float()  # steps are lost in half precision
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.weights = weights.to(net.device, self.parameters[0].dtype)
        if config.recipe == "paper-code":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters, lr, momentum=0.9, nesterov=True, weight_decay=config.weight_decay
            )
        else:
            self.optimizer = torch.optim.Adam(self.parameters, lr)

    def step(self, pooled: Tensor, targets: Tensor, counts: Tensor | None = None) -> float:
        """One gradient step on what enters the head; the loss before it."""
        device, dtype = self.net.device, self.parameters[0].dtype
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            logits = self.head.from_pooled(pooled.to(device, dtype))
            targets = as_targets(targets, self.net.classes).to(device, dtype)
            weight = torch.ones(len(targets), 1) if counts is None else counts[:, None]
            weight = (weight / weight.sum()).to(device, dtype)
            loss = F.binary_cross_entropy_with_logits(
                logits, targets, weight, reduction="sum", pos_weight=self.weights
            )
            loss = loss / self.net.classes  # Eq. 12, each image with its weight
            squares = sum((p**2).sum() for p in self.parameters if p.ndim > 1 and self.penalty)
            self.optimizer.zero_grad()
            (loss + self.penalty * squares / self.net.classes).backward()
            self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def logits(self, pooled: Tensor) -> Tensor:
        """Of what enters the head, in eval mode."""
        self.head.eval()
        dtype = self.parameters[0].dtype
        parts = [self.head.from_pooled(part.to(self.net.device, dtype)) for part in pooled.split(256)]
        self.head.train()
        return torch.cat(parts) if parts else torch.empty(0, self.net.classes)

    def keep(self, path: Path, losses: list[float], skipped: dict[str, str]) -> None:
        """Writes where training stands."""
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        held = io.BytesIO()
        torch.save({**state, "losses": losses, "skipped": skipped}, held)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, held.getvalue())

    def resume(self, path: Path) -> tuple[list[float], dict[str, str]]:
        """Goes on from where training stood; its losses and skips so far."""
        held = torch.load(path, map_location=self.net.device, weights_only=True)
        self.head.load_state_dict(held["head"])
        self.optimizer.load_state_dict(held["optimizer"])
        return held["losses"], held["skipped"]

    def check(self) -> None:
        """DataError if training ran away."""
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise DataError(f"training diverged at lr={self.lr:g}: try a smaller one.")


# -------------------------------------------------------------------------------- steps over fresh features


def train_fresh(
    net: DualBranch,
    data: TrainingData,
    weights: Tensor,
    config: FitConfig,
    transform: Transform | None,
    progress: Progress | None,
    kept: Path | None = None,
) -> tuple[TrainOutcome, tuple[tuple[str, str], ...]]:
    """The paper's own training, in which every epoch runs the backbone on augmented images; and (id, reason)
    of pictures that could not be read. A Dataset or DataLoader is expected to augment by itself.

    Args:
        kept: file that holds where training stands after each epoch, to go on from; gone in the end.
    """
    if world_size() > 1:
        raise DataError(f"recipe {config.recipe} runs in one process: use recipe fast with torchrun.")
    began, epochs, lr = time.perf_counter(), config.epochs or EPOCHS, config.lr or LR
    looking = net.with_model(_on_batch_statistics(net.model)) if config.batch_norm == "batch" else net
    training, losses, skipped = _Training(net, weights, config, lr), list[float](), dict[str, str]()
    if kept is not None and kept.is_file():
        losses, skipped = training.resume(kept)
    for epoch in range(len(losses), epochs):
        torch.manual_seed(config.seed * 1000 + epoch)  # so that it does not matter where training was begun
        if config.recipe == "paper-code" and (epoch + 1) % config.decay_every == 0:
            for group in training.optimizer.param_groups:
                group["lr"] *= 0.1
        total, count = 0.0, 0
        for images, labels in _fresh(net, data, config, transform, skipped):
            total += training.step(_pooled(looking, images, config), labels) * len(images)
            count += len(images)
            if progress:
                progress(f"epoch {epoch + 1}", count, max(length_of(data), count))
        if not count:
            first = next(iter(skipped.values()), "there are none")
            raise DataError(f"there are no images to fit on: {first}")
        training.check()
        losses.append(total / count)
        if kept is not None:
            training.keep(kept, losses, skipped)
    if kept is not None:
        kept.unlink(missing_ok=True)
    seconds = {"training": time.perf_counter() - began}
    return TrainOutcome(training.head, tuple(losses), 0.0, seconds=seconds), tuple(skipped.items())


def _fresh(
    net: DualBranch,
    data: TrainingData,
    config: FitConfig,
    transform: Transform | None,
    skipped: dict[str, str],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one epoch, in random order; pictures that cannot be read are added to `skipped`."""
    if not isinstance(data, Samples):
        for item in batches_of(data, config, shuffle=True):
            yield check_batch(item, net.classes)
        return
    transform = transform or net.transform
    if transform is None:
        raise DataError("samples need preprocessing: set net.transform, or fit(..., transform=...).")
    view = augmented(transform)
    mixed = Samples(tuple(data[i] for i in torch.randperm(len(data)).tolist()), data.classes)
    how: Any = {"spawn": net.device.type == "cuda", "seed": int(torch.randint(2**31, ()))}
    for batch in load_batches(mixed, view, batch_size=config.batch_size, workers=config.workers, **how):
        skipped.update(batch.skipped)
        if len(batch.images) and batch.labels is not None:
            yield batch.images, batch.labels


@torch.no_grad()
def _pooled(net: DualBranch, images: Tensor, config: FitConfig) -> Tensor:
    """What enters the head, in full precision; statistics of a batch are those of all of it."""
    dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
    images = images.to(net.device, dtype)
    parts = (images,) if config.batch_norm == "batch" else chunks(images)
    with torch.autocast(net.device.type, enabled=config.autocast):
        return torch.cat([net(part).pooled.float() for part in parts])


def _on_batch_statistics(model: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers know no trained statistics and take each batch's own."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    return other
