"""fit: trains the sigmoid branch, and nothing else, with class-balanced binary cross-entropy (Eq. 12)."""

from __future__ import annotations

import copy
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sigcam.config import FitConfig
from sigcam.data import Sample, Samples
from sigcam.data.loading import collect
from sigcam.dual import DualBranch
from sigcam.errors import DataError
from sigcam.trace import chunks

log = logging.getLogger("sigcam")
Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)
Data = Samples | Sequence[Sample] | Dataset[Any] | DataLoader[Any]


@dataclass(frozen=True)
class FitResult:
    """What a fit did: the mean loss of each epoch, what it saw, and what it took."""

    losses: tuple[float, ...]
    images: int
    label_counts: tuple[int, ...]
    pos_weight: float
    skipped: tuple[tuple[str, str], ...]
    seconds: dict[str, float]


def balanced_bce(logits: Tensor, labels: Tensor, pos_weight: float | None = None) -> Tensor:
    """Eq. 12: mean binary cross-entropy over B x C, positives weighted C - 1.

    Args:
        labels: (B,) class indices, or (B, C) with 1 for each class that is present.
        pos_weight: another weight. With one logit the default is negatives / positives among the labels.
    """
    targets = as_targets(labels, logits.shape[1]).to(logits)
    if pos_weight is None:
        pos_weight = default_pos_weight(targets)
    return F.binary_cross_entropy_with_logits(
        logits, targets, pos_weight=torch.as_tensor(pos_weight, dtype=logits.dtype, device=logits.device)
    )


def as_targets(labels: Tensor, classes: int) -> Tensor:
    """Labels as (B, C) zeros and ones; with one logit, labels are 0 and 1."""
    if labels.ndim == 2 and labels.shape[1] == classes:
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError("labels of shape (B, C) must be 0 or 1: which classes are present.")
        return labels
    if labels.ndim != 1 or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        raise DataError(
            f"labels must be (B,) class indices or (B, {classes}) zeros and ones, not {tuple(labels.shape)}."
        )
    labels = labels.long()
    most = max(classes, 2) - 1  # one logit tells two classes apart
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) > most):
        raise DataError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, the classifier's classes from 0 "
            f"to {most}."
        )
    return labels[:, None] if classes == 1 else F.one_hot(labels, classes)


def default_pos_weight(targets: Tensor) -> float:
    """C - 1; with one logit, negatives / positives."""
    if targets.shape[1] > 1:
        return float(targets.shape[1] - 1)
    positives = float(targets.sum())
    return (targets.numel() - positives) / positives if 0 < positives < targets.numel() else 1.0


def fit(
    net: DualBranch,
    data: Data,
    config: FitConfig = FitConfig(),  # noqa: B008 (frozen)
    *,
    transform: Callable[[Any], Tensor] | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Trains the sigmoid branch on features computed once per image and view; predictions stay what they
    were. Training goes on from where the branch stands.

    Args:
        data: `Samples`, a list of `Sample`, or any torch Dataset or DataLoader that yields (images, labels).
        transform: from a picture to a (3, H, W) tensor, for `Samples`; by default `net.transform`.
        progress: called with (stage, done, total), for a bar.
    """
    if not isinstance(net, DualBranch):
        raise DataError(
            f"fit takes what attach returns, not {type(net).__name__}: net = sigcam.attach(model)."
        )
    if config.epochs < 1 or config.batch_size < 1 or config.views not in (1, 2) or config.workers < 0:
        raise DataError(
            f"epochs and batch_size must be 1 or more, views 1 or 2, workers 0 or more: {config}."
        )
    weighed = config.pos_weight == "balanced" or (
        isinstance(config.pos_weight, int | float) and 0 < config.pos_weight < math.inf
    )
    if not (0 < config.lr < math.inf and 0 <= config.l2 < math.inf and weighed):
        raise DataError(f"lr must be above 0, l2 0 or more, pos_weight above 0 or 'balanced': {config}.")
    started = time.perf_counter()
    batches, total, skipped = _batches(net, data, config, transform)
    with _seeded(config.seed, net.device):
        pooled, targets = _extract(net, batches, config, total, progress)
    if not len(targets):
        unread = f": none of {len(skipped)} could be read, the first: {skipped[0][1]}" if skipped else "."
        raise DataError(f"there are no images to fit on{unread}")
    extracted = time.perf_counter()
    counts = (
        tuple(int(c) for c in targets.sum(0))
        if net.classes > 1
        else (int((targets == 0).sum()), int(targets.sum()))
    )
    present = sum(count > 0 for count in counts)
    if present < 2:
        raise DataError(f"all {len(targets)} images show one class: a branch learns from at least two.")
    if present < len(counts):
        log.warning(
            "%d of %d classes have no image: their evidence will only ever say no.",
            len(counts) - present,
            len(counts),
        )
    pos_weight = default_pos_weight(targets) if config.pos_weight == "balanced" else float(config.pos_weight)
    with _seeded(config.seed, net.device):
        losses = _train(net, pooled, targets, pos_weight, config, progress)
    net.fitted = True
    net.recipe = asdict(config) | {"images": len(targets), "pos_weight": pos_weight, "final_loss": losses[-1]}
    if isinstance(data, Samples) and net.class_names is None and len(data.classes) == max(net.classes, 2):
        net.class_names = data.classes
    if skipped:
        log.warning(
            "%d file(s) could not be read and were left out, the first: %s", len(skipped), skipped[0][1]
        )
    seconds = {"features": extracted - started, "training": time.perf_counter() - extracted}
    return FitResult(losses, len(targets), counts, pos_weight, tuple(skipped), seconds)


def match_classes(samples: Samples, classes: int, names: Sequence[str] | None) -> Samples:
    """The samples with labels of the classifier: by name when both have names, by order when the counts
    agree, or when names differ in spelling alone."""
    if names and set(samples.classes) <= set(names):
        place = {name: i for i, name in enumerate(names)}
        moved = tuple(
            sample if sample.label is None else replace(sample, label=place[samples.classes[sample.label]])
            for sample in samples
        )
        return Samples(moved, tuple(names))
    if names and len(names) == len(samples.classes) and all(map(_alike, samples.classes, names)):
        return samples
    strangers = [name for name in samples.classes if names and name not in names]
    if names and 0 < len(strangers) < len(
        samples.classes
    ):  # a slip, which order would turn into wrong labels
        raise DataError(
            f"{len(strangers)} of {len(samples.classes)} class names are not the classifier's: "
            f"{', '.join(strangers[:3])}. Rename or remove their folders."
        )
    if len(samples.classes) == max(classes, 2):
        return samples
    known = f" ({', '.join(list(names)[:3])}, ...)" if names else ""
    raise DataError(
        f"the data has {len(samples.classes)} classes ({', '.join(samples.classes[:3])}, ...), the "
        "classifier "
        f"{classes}{known}: name the folders after its classes, or train a head for yours with "
        "`sigcam train-classifier --probe`."
    )


def _alike(ours: str, theirs: str) -> bool:
    """Whether two class names differ in spelling alone: case, underscores, the WordNet id of a homonym."""
    ours, theirs = (name.replace("_", " ").casefold() for name in (ours, theirs))
    bare = re.sub(r" n\d{8}$", "", ours)
    return ours == theirs or (bare != ours and theirs.startswith(bare))


def _batches(
    net: DualBranch, data: Data, config: FitConfig, transform: Callable[[Any], Tensor] | None
) -> tuple[Iterable[tuple[Tensor, Tensor]], int, list[tuple[str, str]]]:
    """(images, labels) batches, how many images to expect (0: unknown), and the list that skips will be
    added to."""
    skipped: list[tuple[str, str]] = []
    if isinstance(data, DataLoader):
        try:
            return data, len(data.dataset), skipped  # type: ignore[arg-type]
        except TypeError:  # an iterable data set has no length
            return data, 0, skipped
    if isinstance(data, list | tuple) and data and all(isinstance(item, Sample) for item in data):
        most = max((item.label for item in data if item.label is not None), default=0)
        names = net.class_names or tuple(f"class {k}" for k in range(max(net.classes, 2, most + 1)))
        data = Samples(tuple(data), names)
    if isinstance(data, Samples):
        transform = transform or net.transform
        if transform is None:
            raise DataError("samples need preprocessing: set net.transform, or fit(..., transform=...).")
        samples = match_classes(data, net.classes, net.class_names)
        return _read(samples, transform, config, skipped), len(samples), skipped
    if not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise DataError(f"fit takes Samples, a torch Dataset or a DataLoader, not {type(data).__name__}.")
    own = torch.Generator()  # else every loop draws a seed from the caller's
    loader = DataLoader(
        cast(Dataset[Any], data), batch_size=config.batch_size, num_workers=config.workers, generator=own
    )
    return loader, len(data) if hasattr(data, "__len__") else 0, skipped


def _read(
    samples: Samples, transform: Callable[[Any], Tensor], config: FitConfig, skipped: list[tuple[str, str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in collect(samples, transform, batch_size=config.batch_size, workers=config.workers):
        skipped += batch.skipped
        if batch.labels is None:
            raise DataError("fitting needs labelled samples.")
        if len(batch.images):
            yield batch.images, batch.labels


@torch.no_grad()
def _extract(
    net: DualBranch,
    batches: Iterable[tuple[Tensor, Tensor]],
    config: FitConfig,
    total: int,
    progress: Progress | None,
) -> tuple[Tensor, Tensor]:
    """Pooled features (views x images, ...) and targets (images, C); the views follow one another."""
    views: list[list[Tensor]] = [[] for _ in range(config.views)]
    targets: list[Tensor] = []
    done = 0
    for item in batches:
        images, target = _checked(item, net.classes)
        dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
        images = images.to(net.device, dtype)
        for view, kept in enumerate(views):
            seen = images.flip(-1) if view else images
            kept.append(torch.cat([net(part).pooled.float().cpu() for part in chunks(seen)]))
        targets.append(target)
        done += len(target)
        if not bool(torch.isfinite(views[0][-1]).all()):
            raise DataError(
                f"features are not finite among images {done - len(target)} to {done - 1}: check images and "
                "weights."
            )
        if progress:
            progress("features", done, max(total, done))
    if not targets:
        return torch.empty(0), torch.empty(0, net.classes)
    return torch.cat([torch.cat(view) for view in views]), torch.cat(targets)


def _checked(item: Any, classes: int) -> tuple[Tensor, Tensor]:
    """One batch of the data as images (B, 3, H, W) and targets (B, C) on the CPU."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"the data must yield (images, labels), not {type(item).__name__}.")
    images, labels = item[0], item[1]
    if not isinstance(images, Tensor) or images.ndim != 4:
        seen = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"the data must yield images as (B, C, H, W) tensors, not {seen}.")
    try:
        labels = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"labels must be numbers, not {str(labels)[:60]}.") from None
    targets = as_targets(labels, classes)
    if len(targets) != len(images):
        raise DataError(f"the data yields {len(images)} images with {len(targets)} labels.")
    return images, targets


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed inside; the caller's go on after it as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _train(
    net: DualBranch,
    pooled: Tensor,
    targets: Tensor,
    pos_weight: float,
    config: FitConfig,
    progress: Progress | None,
) -> tuple[float, ...]:
    losses, targets = list[float](), targets.float().repeat(config.views, 1)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(net.device.type, enabled=False),
    ):
        head = copy.deepcopy(net.sigmoid).train()  # ours changes when all is done, or not at all
        if next(head.parameters()).dtype in (torch.float16, torch.bfloat16):
            head.float()  # steps of Adam are lost in half precision
        parameters = [p for p in head.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=config.lr)
        for epoch in range(config.epochs):
            total = 0.0
            for chosen in torch.randperm(len(pooled)).split(config.batch_size):
                logits = head.from_pooled(pooled[chosen].to(net.device, parameters[0].dtype)).float()
                loss = balanced_bce(logits, targets[chosen].to(net.device), pos_weight)
                squares = sum((p.float() ** 2).sum() for p in parameters if p.ndim > 1 and config.l2)
                optimizer.zero_grad()
                (loss + config.l2 * squares / net.classes).backward()
                optimizer.step()
                total += float(loss.detach()) * len(chosen)
            losses.append(total / len(pooled))
            if progress:
                progress("training", epoch + 1, config.epochs)
        if not all(bool(torch.isfinite(p).all()) for p in parameters):
            raise DataError(f"training diverged at lr={config.lr}: try a smaller one.")
        net.sigmoid.load_state_dict(head.state_dict())
    return tuple(losses)
