"""Training a softmax classifier to attach to: all of it or its last stages, by the recipe of the paper's
baselines."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.config import TrainConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.loader import Batch, load_batches
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.split import find_split
from sigcam.network.trace import chunks, logits_of
from sigcam.training.augmentation import SeededTransform, augmented, seed_of, with_seed
from sigcam.training.settings import check_train_config

CLASSIFIER_EPOCHS = 10


@dataclass(frozen=True)
class Epoch:
    """What one pass gave: mean loss and share of right answers while training, and on held-out images."""

    loss: float
    train_accuracy: float
    val_accuracy: float | None
    lr: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """What training gave: every epoch, how many parameters learned, and files left out with the reason."""

    epochs: tuple[Epoch, ...]
    images: int
    trained: int
    skipped: tuple[tuple[str, str], ...]


def train_classifier(
    classifier: Classifier,
    samples: Samples,
    config: TrainConfig | None = None,
    *,
    val: Samples | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    after_epoch: Callable[[TrainResult], None] | None = None,
) -> TrainResult:
    """Trains the classifier, in place, with softmax cross-entropy (PROTOCOL 3); the last epoch's weights.

    All that is random follows from the seed and the number of the epoch, so that a run that is stopped and
    goes on from its checkpoint ends with the same bits, whatever the number of workers.

    Args:
        val: images to measure accuracy on after each epoch; nothing is chosen by it.
        checkpoint: a file that is written whole after each epoch, and gone on from if it is there.
        after_epoch: called with what is known so far.
    """
    config = check_train_config(config or TrainConfig())
    model, epochs = classifier.model, config.epochs or CLASSIFIER_EPOCHS
    trained = _trained_names(model, config)
    identity = _identity(classifier, samples, config) if checkpoint else {}
    held = _read_checkpoint(checkpoint, identity, epochs) if checkpoint else None
    with _training_only(model, trained):
        optimizer = _optimizer(model, trained, _fast_names(model, config.seed), config)
        history, skipped = list[Epoch](), dict[str, str]()
        if held:
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            history, skipped = [Epoch(**row) for row in held["history"]], dict(held["skipped"])
        first, share = len(history), len(samples) + len(val or ())  # of the progress, per epoch
        for number in range(first, epochs):
            began, rate = time.perf_counter(), config.lr * 0.1 ** ((number + 1) // config.decay_every)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["ratio"]
            tell = partial(_tell, progress, (number - first) * share, (epochs - first) * share)
            loss, right, unread = _one_epoch(classifier, samples, config, number, optimizer, trained, tell)
            skipped |= unread
            tell = partial(_tell, progress, (number - first) * share + len(samples), (epochs - first) * share)
            found = None if val is None else _accuracy(classifier, val, config, tell)
            history.append(Epoch(loss, right, found, rate, time.perf_counter() - began))
            if checkpoint:
                kept: dict[str, Any] = {
                    "identity": identity,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "history": [asdict(epoch) for epoch in history],
                    "skipped": list(skipped.items()),
                }
                _write_checkpoint(checkpoint, kept)
            if after_epoch:
                after_epoch(_result(history, samples, trained, skipped))
    return _result(history, samples, trained, skipped)


def _result(
    history: list[Epoch], samples: Samples, trained: dict[str, int], skipped: dict[str, str]
) -> TrainResult:
    images = len(samples) - len(skipped)
    return TrainResult(tuple(history), images, sum(trained.values()), tuple(skipped.items()))


# ------------------------------------------------------------------------------------- what learns, how fast


def _fast_names(model: nn.Module, seed: int) -> set[str]:
    """Parameters of the last stage, which learn faster: by the paper's parts of names (PROTOCOL 3) in
    networks that have them, else those of the head."""
    names = [name for name, _ in model.named_parameters()]

    def holding(*parts: str) -> set[str]:
        return {name for name in names if any(part in name for part in parts)}

    stems = tuple(f"Conv2d_{i}" for i in range(1, 5))
    fast = set[str]()
    if holding("Mixed"):
        fast = set(names) - holding("Mixed", *stems)
    elif holding("layer4.") and holding("fc."):
        fast = holding("layer4.", "fc.")
    elif holding("features."):
        fast = set(names) - holding("features.")
    return fast if fast and len(fast) < len(names) else _head_names(model, seed)


def _head_names(model: nn.Module, seed: int) -> set[str]:
    heads = find_split(model, seed=seed)[0].heads
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{h}." for h in heads))}


def _trained_names(model: nn.Module, config: TrainConfig) -> dict[str, int]:
    """Names and sizes of the parameters that learn; the head always does."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    start, names = config.freeze_until, list(sizes)
    if start is None:
        return sizes
    inside = [i for i, name in enumerate(names) if name.startswith(f"{start}.")]
    if not inside:
        modules = [name for name, module in model.named_modules() if name and list(module.parameters())]
        close = get_close_matches(start, modules, n=3, cutoff=0.4) or modules[-3:]
        raise ModelError(
            f"freeze_until={start!r} names no module with parameters: did you mean {', '.join(close)}?"
        )
    kept = {*names[inside[0] :], *_head_names(model, config.seed)}
    return {name: sizes[name] for name in names if name in kept}


@contextmanager
def _training_only(model: nn.Module, trained: dict[str, int]) -> Iterator[None]:
    """Gradients for these parameters alone; flags come back, and the model is in eval mode."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        model.eval()


def _train_mode(model: nn.Module, trained: dict[str, int], config: TrainConfig) -> None:
    """Train mode, but for what is frozen: its BatchNorm statistics stay, its dropout is off."""
    model.train()
    if config.freeze_until is None:
        return
    for name, module in model.named_modules():
        if name == config.freeze_until:
            break
        if name and not any(each.startswith(f"{name}.") for each in trained):
            module.eval()


def _optimizer(
    model: nn.Module, trained: dict[str, int], fast: set[str], config: TrainConfig
) -> torch.optim.SGD:
    named = [(name, parameter) for name, parameter in model.named_parameters() if name in trained]
    residual = any("layer4." in name for name, _ in model.named_parameters())
    decay = config.weight_decay if config.weight_decay is not None else 1e-4 if residual else 5e-4
    groups = [
        {"params": [p for name, p in named if (name in fast) == quick], "ratio": ratio}
        for quick, ratio in ((False, 1.0), (True, config.head_lr_ratio))
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True, weight_decay=decay)


# ------------------------------------------------------------------------------------------------ one epoch


def _one_epoch(
    classifier: Classifier,
    samples: Samples,
    config: TrainConfig,
    number: int,
    optimizer: torch.optim.Optimizer,
    trained: dict[str, int],
    tell: Callable[[int], None],
) -> tuple[float, float, dict[str, str]]:
    """One pass over augmented images; mean loss, share of right answers, and what could not be read."""
    model, device = classifier.model, next(classifier.model.parameters()).device
    step = partial(_step, model, optimizer, classes=len(samples.classes), autocast=config.autocast)
    done, seen, right, loss, skipped = 0, 0, 0, 0.0, dict[str, str]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(config.seed, number, "dropout"))
        _train_mode(model, trained, config)
        for batch in _views(classifier, samples, config, number, device):
            skipped.update(batch.skipped)
            done += len(batch.indices) + len(batch.skipped)
            if len(batch.indices):
                if batch.labels is None:
                    raise DataError("training a classifier needs labelled samples.")
                one, hits = step(batch.images.to(device), batch.labels.to(device))
                seen, right, loss = seen + len(batch.indices), right + hits, loss + one
            tell(done)
    model.eval()
    if not seen:
        reason = next(iter(skipped.values()), "there is none")
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {reason}")
    if not math.isfinite(loss) or not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise DataError(f"training diverged at lr={config.lr:g}: try a smaller one.")
    return loss / seen, right / seen, skipped


def _tell(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress:
        progress("training", before + done, total)


def _views(
    classifier: Classifier, samples: Samples, config: TrainConfig, number: int, device: torch.device
) -> Iterator[Batch]:
    """Augmented batches of one epoch, in random order."""
    generator = torch.Generator().manual_seed(seed_of(config.seed, number, "order"))
    order = torch.randperm(len(samples), generator=generator).tolist()
    mixed = tuple(with_seed(samples[i], seed_of(config.seed, number, i)) for i in order)
    spawn = device.type == "cuda"
    return load_batches(
        Samples(mixed, samples.classes),
        SeededTransform(augmented(classifier.transform)),
        batch_size=config.batch_size,
        workers=config.workers,
        spawn=spawn,
    )


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    autocast: bool,
) -> tuple[float, int]:
    """One gradient step; the sum of losses and the number of right answers before it."""
    with torch.enable_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        try:
            logits = logits_of(model(images), len(images)).float()
        except ValueError as error:  # BatchNorm of one value per channel
            raise ModelError(
                f"the network cannot be trained on a batch of {len(images)}: {error}. Use another batch size."
            ) from error
    if logits.shape[1] != classes:
        raise ModelError(f"the network has {logits.shape[1]} outputs, the data {classes} classes.")
    with torch.enable_grad():
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    return float(loss.detach()) * len(images), int((logits.argmax(1) == labels).sum())


@torch.no_grad()
def _accuracy(
    classifier: Classifier, samples: Samples, config: TrainConfig, tell: Callable[[int], None]
) -> float | None:
    """The share of right answers on pictures as they are; None if none could be read."""
    device, right, seen, done = next(classifier.model.parameters()).device, 0, 0, 0
    spawn = device.type == "cuda"
    for batch in load_batches(
        samples, classifier.transform, batch_size=config.batch_size, workers=config.workers, spawn=spawn
    ):
        if len(batch.images) and batch.labels is not None:
            for images, labels in zip(chunks(batch.images), chunks(batch.labels), strict=True):
                with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
                    logits = logits_of(classifier.model(images.to(device)), len(images))
                right += int((logits.argmax(1).cpu() == labels).sum())
            seen += len(batch.images)
        done += len(batch.indices) + len(batch.skipped)
        tell(done)
    return right / seen if seen else None


# ------------------------------------------------------------------------------------ checks and checkpoints


def _identity(classifier: Classifier, samples: Samples, config: TrainConfig) -> dict[str, Any]:
    """What a run must share with the one that wrote a checkpoint; more epochs only go further."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(f"{sample.id}\0{sample.label}\n".encode())
    free = ("epochs", "workers", "pretrained")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    about = {"model": classifier.name, "weights": fingerprint(classifier.model), "images": digest.hexdigest()}
    about["preprocessing"] = str(classifier.transform)
    return about | {"classes": list(samples.classes)} | settings


def _read_checkpoint(path: Path, identity: dict[str, Any], epochs: int) -> dict[str, Any] | None:
    """What the file holds, None if there is none; DataError if another run wrote it."""
    if not path.is_file():
        return None
    try:
        held: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        other = [key for key, value in identity.items() if held["identity"].get(key) != value]
        done = len(held["history"])
    except (RuntimeError, pickle.UnpicklingError, KeyError, EOFError, AttributeError, OSError) as error:
        raise DataError(f"cannot read {path}: remove it to begin anew, or use another output.") from error
    if other:
        raise DataError(
            f"{path} is of a training with other {', '.join(other)}: remove it, or use another output."
        )
    if done > epochs:
        raise DataError(
            f"{path} has {done} epochs behind it, {epochs} are asked for: remove it, or ask more."
        )
    return held


def _write_checkpoint(path: Path, held: dict[str, Any]) -> None:
    """Writes the file whole or not at all, without a copy in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        torch.save(held, draft)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()
