"""train_classifier: train a softmax classifier to attach to, whole or in part, as the paper's baselines."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import TrainConfig
from sigcam.core.errors import ConfigError, DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint
from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Transform
from sigcam.network.identity import classifier_facts
from sigcam.network.modules import run_model
from sigcam.network.split import find_split
from sigcam.network.trace import chunks, logits_of
from sigcam.training.augmentation import SeededTransform, augmented, seed_of, with_seed
from sigcam.training.settings import check_train_config
from sigcam.training.wsol import Trainer, trainer_named

CLASSIFIER_EPOCHS = 10


@dataclass(frozen=True)
class Epoch:
    """Mean loss and accuracy of one epoch, while training and on the validation images."""

    loss: float
    train_accuracy: float
    val_accuracy: float | None
    lr: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """The epochs of a training, its images and trained parameters, and (id, reason) of unreadable images."""

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
    """Train the classifier in place with softmax cross-entropy (PROTOCOL 3), keeping the last weights.

    Random numbers depend on the seed and the epoch only, so a run that is interrupted and resumed ends with
    the same bits as one that is not, for any number of workers. `config.wsol` changes one part of this.

    Args:
        val: images to measure accuracy on after each epoch; nothing is selected by it.
        checkpoint: file to write after each epoch, and to resume from if it exists.
        after_epoch: called with the result so far.
    """
    config = check_train_config(config or TrainConfig())
    model, epochs = classifier.model, config.epochs or CLASSIFIER_EPOCHS
    saved = Checkpoint(checkpoint, _facts(classifier, samples, config, val) if checkpoint else {})
    trainer = trainer_named(config.wsol)(classifier)
    trained = _trained_names(model, config)
    history, skipped = list[Epoch](), dict[str, str]()

    def result() -> TrainResult:
        images = len(samples) - len(skipped)
        return TrainResult(tuple(history), images, sum(trained.values()), tuple(skipped.items()))

    with _training_only(model, trained):
        optimizer = _optimizer(model, trained, _fast_names(model, config.seed), config, trainer.parameters)
        if state := _load_state(saved, epochs):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            trainer.load_state(state["trainer"])
            history, skipped = [Epoch(**row) for row in state["history"]], dict(state["skipped"])
        first, per_epoch = len(history), len(samples) + len(val or ())  # images, for the progress
        for number in range(first, epochs):
            began, lr = time.perf_counter(), config.lr * 0.1 ** ((number + 1) // config.decay_every)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["ratio"]
            done, total = (number - first) * per_epoch, (epochs - first) * per_epoch
            report = partial(_report, progress, total, done)
            shown = trainer.samples(samples, number, epochs, seed=config.seed, progress=progress)
            _train_mode(model, trained, config)
            loss, accuracy = _train_epoch(trainer, shown, config, number, optimizer, skipped, report)
            report = partial(_report, progress, total, done + len(samples))
            val_accuracy = None if val is None else _val_accuracy(classifier, val, config, report)
            history.append(Epoch(loss, accuracy, val_accuracy, lr, time.perf_counter() - began))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["trainer"] = trainer.state()
            saved.save({**state, "history": [asdict(epoch) for epoch in history], "skipped": skipped})
            if after_epoch:
                after_epoch(result())
    return result()


def _report(progress: Progress | None, total: int, before: int, done: int) -> None:
    if progress:
        progress("training", before + done, total)


def _facts(
    classifier: Classifier, samples: Samples, config: TrainConfig, val: Samples | None
) -> dict[str, Any]:
    """Return what a run must share with the one it resumes; more epochs only continue it."""
    irrelevant = {"workers", "pretrained"}
    if not trainer_named(config.wsol).in_steps:
        irrelevant.add("epochs")
    return {
        **classifier_facts(classifier),
        "labels": data_fingerprint(samples),
        "files": files_fingerprint(samples),
        "validation": None if val is None else [data_fingerprint(val), files_fingerprint(val)],
        **{name: value for name, value in asdict(config).items() if name not in irrelevant},
    }


def _load_state(saved: Checkpoint, epochs: int) -> dict[str, Any] | None:
    """Return the state to resume from, None if there is no file; raise ConfigError if it is another run's."""
    state = saved.load(map_location="cpu")
    if state is None and (different := saved.differences()):
        difference = f"belongs to another training run (different {', '.join(different)})"
        raise ConfigError(f"{saved.path} {difference}: remove it, or choose another output folder.")
    if state is not None and len(state["history"]) > epochs:
        raise ConfigError(f"{saved.path} holds more than {epochs} epochs: remove it, or train for more.")
    return state


def _fast_names(model: nn.Module, seed: int) -> set[str]:
    """Return the parameters of the last stage, which learn faster: by the paper's name patterns (PROTOCOL 3)
    in networks that have such names, else those of the head."""
    names = [name for name, _ in model.named_parameters()]

    def containing(*parts: str) -> set[str]:
        return {name for name in names if any(part in name for part in parts)}

    fast = set[str]()
    if containing("Mixed"):
        fast = set(names) - containing("Mixed", "Conv2d_1", "Conv2d_2", "Conv2d_3", "Conv2d_4")
    elif containing("layer4.") and containing("fc."):
        fast = containing("layer4.", "fc.")
    elif containing("features."):
        fast = set(names) - containing("features.")
    return fast if fast and len(fast) < len(names) else _head_names(model, seed)


def _head_names(model: nn.Module, seed: int) -> set[str]:
    heads = find_split(model, seed=seed)[0].heads
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{h}." for h in heads))}


def _trained_names(model: nn.Module, config: TrainConfig) -> dict[str, int]:
    """Return names and sizes of the parameters to train; the head's are always among them."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    start, names = config.freeze_until, list(sizes)
    if start is None:
        return sizes
    inside = [i for i, name in enumerate(names) if name.startswith(f"{start}.")]
    if not inside:
        modules = [name for name, module in model.named_modules() if name and list(module.parameters())]
        close = get_close_matches(start, modules, n=3, cutoff=0.4) or modules[-3:]
        raise ModelError(f"freeze_until={start!r} names no module to train: did you mean {', '.join(close)}?")
    trained = {*names[inside[0] :], *_head_names(model, config.seed)}
    return {name: size for name, size in sizes.items() if name in trained}


@contextmanager
def _training_only(model: nn.Module, trained: dict[str, int]) -> Iterator[None]:
    """Compute gradients of these parameters only; restore the flags and leave the model in eval mode."""
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
    """Set train mode, except for frozen modules: their BatchNorm statistics stay and dropout is off."""
    model.train()
    if config.freeze_until is None:
        return
    for name, module in model.named_modules():
        if name == config.freeze_until:
            break
        if name and not any(each.startswith(f"{name}.") for each in trained):
            module.eval()


def _optimizer(
    model: nn.Module,
    trained: dict[str, int],
    fast: set[str],
    config: TrainConfig,
    more: Sequence[nn.Parameter] = (),
) -> SGD:
    """Return the optimiser of the trained parameters and of `more`, which learn as fast as the last stage."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if name in trained]
    residual = any("layer4." in name for name, _ in model.named_parameters())
    decay = config.weight_decay if config.weight_decay is not None else 1e-4 if residual else 5e-4
    groups = [
        {"params": [*(p for name, p in named if (name in fast) == quick), *others], "ratio": ratio}
        for quick, ratio, others in ((False, 1.0, ()), (True, config.head_lr_ratio, more))
    ]
    groups = [group for group in groups if group["params"]]
    return SGD(groups, lr=config.lr, momentum=0.9, nesterov=True, weight_decay=decay)


def read_batches(
    samples: Samples,
    transform: Transform,
    config: TrainConfig,
    device: torch.device,
    skipped: dict[str, str],
    report: Callable[[int], None],
    *,
    required: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (B, 3, H, W) and labels (B,), on the CPU.

    Args:
        skipped: unreadable images are added to it.
        report: called with the number of images done after each batch.
        required: raise DataError if images have no labels or none can be read; else they are left out.
    """
    done, empty = 0, True
    size, workers, spawn = config.batch_size, config.workers, device.type == "cuda"
    for batch in load_batches(samples, transform, batch_size=size, workers=workers, spawn=spawn):
        skipped.update(batch.skipped)
        if required and batch.labels is None:
            raise DataError("training a classifier needs labelled samples.")
        if len(batch.images) and batch.labels is not None:
            empty = False
            yield batch.images, batch.labels
        done += len(batch.indices) + len(batch.skipped)
        report(done)
    if required and empty:
        reason = next(iter(skipped.values()), "there is none")
        raise DataError(f"none of the {len(samples)} images could be read; the first: {reason}")


def _train_epoch(
    trainer: Trainer,
    samples: Samples,
    config: TrainConfig,
    number: int,
    optimizer: Optimizer,
    skipped: dict[str, str],
    report: Callable[[int], None],
) -> tuple[float, float]:
    """Train for one epoch on augmented images; return the mean loss and the accuracy before each step."""
    classifier = trainer.classifier
    model, device = classifier.model, next(classifier.model.parameters()).device
    step = partial(_step, trainer, optimizer, classes=len(samples.classes), autocast=config.autocast)
    count, correct, loss = 0, 0, 0.0
    shuffled, view = _training_views(classifier, samples, config, number)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(config.seed, number, "dropout"))
        for images, labels in read_batches(shuffled, view, config, device, skipped, report):
            losses, hits = step(images.to(device), labels.to(device))
            count, correct, loss = count + len(images), correct + hits, loss + losses
    model.eval()
    if not math.isfinite(loss) or not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise DataError(f"training diverged at lr={config.lr:g}: try a smaller one.")
    return loss / count, correct / count


def _training_views(
    classifier: Classifier, samples: Samples, config: TrainConfig, number: int
) -> tuple[Samples, Transform]:
    """Return the samples of one epoch in random order, and the transform that draws their random views."""
    generator = torch.Generator().manual_seed(seed_of(config.seed, number, "order"))
    order = torch.randperm(len(samples), generator=generator).tolist()
    shuffled = tuple(with_seed(samples[i], seed_of(config.seed, number, i)) for i in order)
    return Samples(shuffled, samples.classes), SeededTransform(augmented(classifier.transform))


@torch.enable_grad()
def _step(
    trainer: Trainer, optimizer: Optimizer, images: Tensor, labels: Tensor, *, classes: int, autocast: bool
) -> tuple[float, int]:
    """Take one gradient step; return the sum of losses and the number of correct predictions before it."""

    def run(images: Tensor) -> Tensor:
        logits = logits_of(run_model(trainer.classifier.model, images), len(images)).float()
        if logits.shape[1] != classes:
            raise ModelError(f"the network has {logits.shape[1]} outputs, the data {classes} classes.")
        return logits

    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        try:
            logits = trainer.logits(run, images, labels)
        except Exception as error:  # such as BatchNorm with one value per channel
            if not hasattr(error, "network_fault"):
                raise
            sentence = f"the network cannot be trained on a batch of {len(images)}: {error}"
            raise ModelError(f"{sentence}. Use another batch size.") from error
    loss = torch.stack([F.cross_entropy(each.float(), labels) for each in logits]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach()) * len(images), int((logits[0].argmax(1) == labels).sum())


@torch.no_grad()
def _val_accuracy(
    classifier: Classifier, samples: Samples, config: TrainConfig, report: Callable[[int], None]
) -> float | None:
    """Return the accuracy on images without augmentation; None if none could be read."""
    device, correct, count = next(classifier.model.parameters()).device, 0, 0
    batches = read_batches(samples, classifier.transform, config, device, {}, report, required=False)
    for images, labels in batches:
        for part, expected in zip(chunks(images), chunks(labels), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
                logits = logits_of(run_model(classifier.model, part.to(device)), len(part))
            correct += int((logits.argmax(1).cpu() == expected).sum())
        count += len(images)
    return correct / count if count else None
