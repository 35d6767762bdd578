"""fit: trains the sigmoid branch, and nothing else, with class-balanced binary cross-entropy (Eq. 12)."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, broadcast_first
from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.data.images import images_from_paths
from sigcam.data.labels import match_classes
from sigcam.data.sample import Samples
from sigcam.metrics.classification import Quality
from sigcam.models.preprocess import Transform
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch
from sigcam.training.features import (
    Features,
    TrainingData,
    as_samples,
    batches_of,
    check_batch,
    extract,
    linear_layer,
    seeded,
)
from sigcam.training.logistic import Rows
from sigcam.training.loss import check_labels, pos_weights, positives_of
from sigcam.training.recipes import TrainingTable, TrainOutcome, solve_head, train_cached, train_fresh
from sigcam.training.settings import check_fit_config

log = logging.getLogger("sigcam")
MOST_HELD = 10_000  # images that quality is measured on, at most
_VIEW = 2**40  # more than there are images
Skips = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FitResult:
    """What a fit did, what it saw, what it took, and how good it is.

    Args:
        losses: the mean loss of each epoch; or of each step of the solver, with its penalty, first without
            the held-out images, then with all.
        label_counts: images of each class; for one logit, without and with it.
        pos_weight: weight of a positive label; one per class where they differ.
        l2: strength of the penalty.
        search: (l2, held-out mean average precision) of every strength tried.
        positive_share: of each class's weights in the last layer, the share above zero.
        skipped: (id, reason) of pictures that could not be read.
        seconds: per stage.
        gradient: the norm of the gradient that the solver left; None without a solver.
    """

    losses: tuple[float, ...]
    images: int
    label_counts: tuple[int, ...]
    pos_weight: float | tuple[float, ...]
    l2: float
    search: tuple[tuple[float, float], ...]
    quality: Quality | None
    positive_share: tuple[float, ...]
    skipped: tuple[tuple[str, str], ...]
    seconds: dict[str, float]
    gradient: float | None = None


def fit(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig = FitConfig(),
    *,
    negatives: TrainingData | Features | str | Path | None = None,
    transform: Transform | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Trains the sigmoid branch on features computed once per image and view; predictions stay what they
    were.

    Args:
        data: `Samples`, a list of `Sample`, any torch Dataset or DataLoader that yields (images, labels), or
            `Features`.
        negatives: images that show none of the classes: a folder, samples, a Dataset, or their `Features`.
        transform: from a picture to a (3, H, W) tensor, for `Samples`; by default `net.transform`.
        cache: folder to keep features in, so that a fit can be resumed and repeated; None keeps none.
        progress: called with (stage, done, total), for a bar.
    """
    if not isinstance(net, DualBranch):
        raise DataError(
            f"fit takes what attach returns, not {type(net).__name__}: net = sigcam.attach(model)."
        )
    with torch.inference_mode(False), seeded(config.seed, net.device):
        linear = linear_layer(net) is not None
        check_fit_config(config, linear=linear, negatives=negatives is not None)
        if config.calibrate and (
            len(net.sigmoid.copies) > 1 or getattr(net.last_layer("sigmoid"), "bias", None) is None
        ):
            raise DataError(
                "calibrate=True moves the bias of one last layer, and this head has not just one."
            )
        if config.recipe != "fast":
            return _fit_fresh(net, data, config, transform, cache, progress)
        root = None if cache is None else Path(cache)
        how: Any = {"transform": transform, "cache": root, "progress": progress}
        found = extract(net, data, config, **how)
        none = None if negatives is None else extract(net, _none(negatives), config, labelled=False, **how)
        if none is not None and not sum(all_gather(len(none))):
            raise DataError(
                f"none of the images without a class could be read, the first: {none.skipped[0][1]}"
            )
        labels = _all_labels(found)
        _check(labels, net.classes, found.skipped)
        weights = pos_weights(config.pos_weight, positives_of(labels, net.classes), len(labels))
        table = _table(net, found, none, labels, config)
        outcome = (solve_head if linear else train_cached)(net, table, weights, config, progress)
        seconds = {**found.seconds, **(none.seconds if none else {}), **outcome.seconds}
        skipped = found.skipped + (none.skipped if none else ())
        return _put_in(net, data, config, outcome, labels, weights, skipped, seconds)


def _fit_fresh(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    transform: Transform | None,
    cache: str | Path | None,
    progress: Progress | None,
) -> FitResult:
    """By one of the paper's recipes."""
    if isinstance(data, Features):
        raise DataError(f"recipe {config.recipe} computes features anew in every epoch: give it images.")
    data = as_samples(data, net)
    if isinstance(data, Samples):
        data = match_classes(data, net.classes, net.class_names)
        if any(sample.label is None for sample in data):
            raise DataError("fitting needs labelled samples.")
        parts = [torch.tensor([sample.label for sample in data], dtype=torch.int64)] if len(data) else []
    else:
        parts = [check_batch(item, net.classes)[1] for item in batches_of(data, config)]
    labels = torch.cat(parts) if parts else torch.empty(0)
    _check(labels, net.classes, ())
    weights = pos_weights(config.pos_weight, positives_of(labels, net.classes), len(labels))
    kept = None
    if cache is not None and isinstance(data, Samples):
        about = (asdict(config), fingerprint(net.original), fingerprint(net.sigmoid), [s.id for s in data])
        key = hashlib.blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()
        kept = Path(cache) / f"recipe-{key}.pt"
    outcome, skipped = train_fresh(net, data, weights, config, transform, progress, kept)
    return _put_in(net, data, config, outcome, labels, weights, skipped, outcome.seconds)


def _none(negatives: TrainingData | Features | str | Path) -> TrainingData | Features:
    """A folder of pictures as samples; anything else as it is."""
    return images_from_paths([negatives]) if isinstance(negatives, str | Path) else negatives


def _all_labels(found: Features) -> Tensor:
    """Labels, (B,) or (B, C), of the images of all processes, in the data's order."""
    parts = all_gather((found.placed(), found.labels))
    index, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return labels[index.argsort()]


def _check(labels: Tensor, classes: int, skipped: Skips) -> None:
    """Refuses what nothing can be learned from, and says which classes are missing."""
    if not len(labels):
        unread = f": none of {len(skipped)} could be read, the first: {skipped[0][1]}" if skipped else "."
        raise DataError(f"there are no images to fit on{unread}")
    check_labels(labels, classes)
    counts = _counts(labels, classes)
    present = sum(count > 0 for count in counts)
    if present < 2:
        raise DataError(f"all {len(labels)} images show one class: a branch learns from at least two.")
    if present < len(counts):
        missing, all_of = len(counts) - present, len(counts)
        log.warning("%d of %d classes have no image: their evidence will only ever say no.", missing, all_of)
    least = min(filter(None, counts))
    if max(counts) > 10 * least:
        sizes = (least, max(counts))
        log.warning("classes have from %d to %d images; pos_weight='counts' weighs each by its own.", *sizes)


def _counts(labels: Tensor, classes: int) -> tuple[int, ...]:
    """Images of each class; of one logit, without and with it."""
    positives = [int(n) for n in positives_of(labels, classes)]
    return tuple(positives) if len(positives) > 1 else (len(labels) - positives[0], positives[0])


def _table(
    net: DualBranch, found: Features, none: Features | None, everyone: Tensor, config: FitConfig
) -> TrainingTable:
    """This process's rows: every view of its images, then every view of what shows none of the classes."""
    place, views = found.placed(), len(found.views)
    labels = found.labels[:, None] if net.classes == 1 and found.labels.ndim == 1 else found.labels
    everywhere = torch.cat(all_gather(place)).sort().values  # unreadable images have no targets
    held = torch.zeros(int(everywhere[-1]) + 1, dtype=torch.bool)
    held[everywhere[_held_out(everyone, config)]] = True
    mine = held[place]
    parts = [
        (
            view,
            labels,
            torch.full((len(labels),), 1 / views),
            mine,
            mine & (number == 0),
            place + number * _VIEW,
        )
        for number, view in enumerate(found.views)
    ]
    for number, view in enumerate(none.views if none else ()):
        count, no = len(view), torch.zeros(len(view), dtype=torch.bool)
        nothing = labels.new_full((count, *labels.shape[1:]), 0 if labels.ndim == 2 else -1)
        share = torch.full((count,), config.negatives_weight / len(none.views))  # type: ignore[union-attr]
        order = none.placed() + (2 + number) * _VIEW  # type: ignore[union-attr]
        parts.append((view, nothing, share, no, no, order))
    device = torch.device("cpu") if net.device.type == "mps" else net.device  # which has no float64
    joined = [
        (torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i]).to(device)
        for i in range(6)
    ]
    features, marks, counts, held_rows, judged, order = joined
    return TrainingTable(Rows(features, marks, counts), held_rows, judged, order)


def _held_out(labels: Tensor, config: FitConfig) -> Tensor:
    """Which of (B,) or (B, C) labelled images quality is measured on, (B,) bool: of every class the same
    share, but at least one stays to learn from. The same in every process."""
    count = len(labels)
    share = min(config.holdout, MOST_HELD / count)
    held = torch.zeros(count, dtype=torch.bool)
    if share == 0:
        return held
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))
    first = labels
    if labels.ndim == 2:  # of several classes, the first
        first = torch.where(labels.any(1), labels.to(torch.uint8).argmax(1), -1)
    for these in order[first[order].argsort(stable=True)].split(first.unique(return_counts=True)[1].tolist()):
        held[these[: min(max(1, round(share * len(these))), len(these) - 1)]] = True
    return held


def _put_in(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    outcome: TrainOutcome,
    labels: Tensor,
    weights: Tensor,
    skipped: Skips,
    seconds: dict[str, float],
) -> FitResult:
    """Puts the trained head into the network, all at once, and says what was done."""
    state = {name: broadcast_first(tensor) for name, tensor in outcome.head.state_dict().items()}
    net.sigmoid.load_state_dict(state)
    if config.calibrate:
        bias = net.last_layer("sigmoid").get_parameter("bias")
        with torch.no_grad():
            bias.sub_(weights.log().to(bias))
    one = len(set(weights.tolist())) == 1
    weight = float(weights[0]) if one else tuple(weights.tolist())
    net.fitted = True
    net.recipe = asdict(config) | {
        "images": len(labels),
        "pos_weight": weight,
        "l2": outcome.l2,
        "final_loss": outcome.losses[-1],
    }
    if isinstance(data, Samples) and net.class_names is None and len(data.classes) == max(net.classes, 2):
        net.class_names = data.classes
    if skipped:
        log.warning(
            "%d file(s) could not be read and were left out, the first: %s", len(skipped), skipped[0][1]
        )
    rows = net.last_layer("sigmoid").get_parameter("weight").detach().flatten(1)
    return FitResult(
        outcome.losses,
        len(labels),
        _counts(labels, net.classes),
        weight,
        outcome.l2,
        outcome.search,
        outcome.quality,
        tuple((rows > 0).float().mean(1).tolist()),
        skipped,
        seconds,
        outcome.gradient,
    )
