"""fit: trains the sigmoid branch, and nothing else, with class-balanced binary cross-entropy (Eq. 12)."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigcam.config import FitConfig
from sigcam.data import Samples
from sigcam.data.folder import pictures
from sigcam.dist import from_first, gathered, rank, world
from sigcam.dual import DualBranch
from sigcam.errors import DataError
from sigcam.features import (
    Data,
    Features,
    Progress,
    Transform,
    as_samples,
    batches_of,
    checked,
    extract,
    linear_layer,
    seeded,
)
from sigcam.labels import as_targets, match_classes, pos_weights
from sigcam.quality import Quality
from sigcam.recipes import Outcome, Table, solve_head, train_cached, train_fresh
from sigcam.solving import Rows

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
    data: Data | Features,
    config: FitConfig = FitConfig(),  # noqa: B008 (frozen)
    *,
    negatives: Data | Features | str | Path | None = None,
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
        check_config(config, linear=linear, negatives=negatives is not None)
        if config.recipe != "fast":
            return _fit_fresh(net, data, config, transform, progress)
        root = None if cache is None else Path(cache)
        how: Any = {"transform": transform, "cache": root, "progress": progress}
        found = extract(net, data, config, **how)
        none = None if negatives is None else extract(net, _none(negatives), config, labelled=False, **how)
        targets = _all_targets(net, found)
        _check_targets(targets, found.skipped)
        weights = pos_weights(config.pos_weight, targets)
        table = _table(net, found, none, targets, config)
        outcome = (solve_head if linear else train_cached)(net, table, weights, config, progress)
        seconds = {**found.seconds, **(none.seconds if none else {}), **outcome.seconds}
        return _put_in(net, data, config, outcome, targets, weights, found.skipped, seconds)


def _fit_fresh(
    net: DualBranch,
    data: Data | Features,
    config: FitConfig,
    transform: Transform | None,
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
        labels = [torch.tensor([sample.label for sample in data], dtype=torch.int64)] if len(data) else []
    else:
        labels = [checked(item, net.classes)[1] for item in batches_of(data, config)]
    targets = as_targets(torch.cat(labels), net.classes) if labels else torch.empty(0, net.classes)
    _check_targets(targets, ())
    weights = pos_weights(config.pos_weight, targets)
    outcome, skipped = train_fresh(net, data, weights, config, transform, progress)
    return _put_in(net, data, config, outcome, targets, weights, skipped, outcome.seconds)


def check_config(config: FitConfig, *, linear: bool | None, negatives: bool) -> None:
    """DataError for settings that cannot work, or that say nothing for this recipe and head (None: any)."""
    c = config
    solved = c.recipe == "fast" and bool(linear)
    faults = {
        "recipe must be fast, paper or paper-code": c.recipe not in ("fast", "paper", "paper-code"),
        "epochs and batch_size must be 1 or more, views 1 or 2, workers 0 or more": (
            c.epochs is not None and c.epochs < 1
        )
        or c.batch_size < 1
        or c.views not in (1, 2)
        or c.workers < 0,
        "lr must be above 0": c.lr is not None and not 0 < c.lr < math.inf,
        "l2 must be 'auto' or a number, 0 or more": c.l2 != "auto"
        and not (isinstance(c.l2, int | float) and 0 <= c.l2 < math.inf),
        "pos_weight must be above 0, 'balanced' or 'counts'": c.pos_weight not in ("balanced", "counts")
        and not (isinstance(c.pos_weight, int | float) and 0 < c.pos_weight < math.inf),
        "prior must be zero or softmax": c.prior not in ("zero", "softmax"),
        "holdout must be from 0 to 0.5": not 0 <= c.holdout <= 0.5,
        "negatives_weight must be above 0": not 0 < c.negatives_weight < math.inf,
        "decay_every must be 1 or more, weight_decay 0 or more": c.decay_every < 1 or not c.weight_decay >= 0,
        "precision must be float16 or bfloat16": c.precision not in ("float16", "bfloat16"),
        "batch_norm must be eval, or batch with recipe paper-code": c.batch_norm not in ("eval", "batch")
        or (c.batch_norm == "batch" and c.recipe != "paper-code"),
        "a linear head is solved for exactly, without epochs or lr: leave them out, or choose recipe paper": (
            solved and (c.epochs is not None or c.lr is not None)
        ),
        "a linear head needs an l2 above 0, or its weights grow without end": solved and c.l2 == 0,
        "prior='softmax' is for linear heads that recipe fast solves for": c.prior != "zero"
        and (c.recipe != "fast" or linear is False),
        "negatives are for recipe fast": negatives and c.recipe != "fast",
    }
    for sentence, wrong in faults.items():
        if wrong:
            raise DataError(f"{sentence}.")


def _none(negatives: Data | Features | str | Path) -> Data | Features:
    """A folder of pictures as samples; anything else as it is."""
    return pictures([negatives]) if isinstance(negatives, str | Path) else negatives


def _all_targets(net: DualBranch, found: Features) -> Tensor:
    """Targets (B, C) of the images of all processes, in the data's order."""
    parts = gathered((found.placed(), found.labels))
    index, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    if not len(labels):
        return torch.empty(0, net.classes)
    return as_targets(labels[index.argsort()], net.classes)


def _check_targets(targets: Tensor, skipped: Skips) -> None:
    """Refuses what nothing can be learned from, and says which classes are missing."""
    if not len(targets):
        unread = f": none of {len(skipped)} could be read, the first: {skipped[0][1]}" if skipped else "."
        raise DataError(f"there are no images to fit on{unread}")
    counts = _counts(targets)
    present = sum(count > 0 for count in counts)
    if present < 2:
        raise DataError(f"all {len(targets)} images show one class: a branch learns from at least two.")
    if present < len(counts):
        missing, all_of = len(counts) - present, len(counts)
        log.warning("%d of %d classes have no image: their evidence will only ever say no.", missing, all_of)
    if max(counts) > 10 * min(filter(None, counts)):
        log.warning(
            "classes have from %d to %d images; pos_weight='counts' weighs each by its own.",
            min(filter(None, counts)),
            max(counts),
        )


def _counts(targets: Tensor) -> tuple[int, ...]:
    """Images of each class; of one logit, without and with it."""
    positives = [int(n) for n in targets.sum(0)]
    return tuple(positives) if len(positives) > 1 else (len(targets) - positives[0], positives[0])


def _table(
    net: DualBranch, found: Features, none: Features | None, targets: Tensor, config: FitConfig
) -> Table:
    """This process's rows: every view of its images, then every view of what shows none of the classes."""
    place, views = found.placed(), len(found.views)
    labels = found.labels[:, None] if net.classes == 1 and found.labels.ndim == 1 else found.labels
    everywhere = torch.cat(gathered(place)).sort().values  # unreadable images have no targets
    held = torch.zeros(int(everywhere[-1]) + 1, dtype=torch.bool)
    held[everywhere[_held_out(targets, config)]] = True
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
        share = torch.full((count,), config.negatives_weight / views)
        parts.append(
            (view, nothing, share, no, no, torch.arange(count) * world() + rank() + (2 + number) * _VIEW)
        )
    device = torch.device("cpu") if net.device.type == "mps" else net.device  # which has no float64
    joined = [torch.cat([part[i] for part in parts]).to(device) for i in range(6)]
    return Table(Rows(*joined[:3]), *joined[3:])


def _held_out(targets: Tensor, config: FitConfig) -> Tensor:
    """Which of (B, C) images quality is measured on, (B,) bool: of every class the same share, but at least
    one stays to learn from. The same in every process."""
    count = len(targets)
    share = min(config.holdout, MOST_HELD / count)
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(count, generator=generator)
    held = torch.zeros(count, dtype=torch.bool)
    if share == 0:
        return held
    first = torch.where(targets.any(1), targets.float().argmax(1), -1)[order]  # of several classes, the first
    for label in first.unique().tolist():
        these = order[first == label]
        held[these[: min(max(1, round(share * len(these))), len(these) - 1)]] = True
    return held


def _put_in(
    net: DualBranch,
    data: Data | Features,
    config: FitConfig,
    outcome: Outcome,
    targets: Tensor,
    weights: Tensor,
    skipped: Skips,
    seconds: dict[str, float],
) -> FitResult:
    """Puts the trained head into the network, all at once, and says what was done."""
    state = {name: from_first(tensor) for name, tensor in outcome.head.state_dict().items()}
    net.sigmoid.load_state_dict(state)
    if config.calibrate:
        bias = getattr(net.last_layer("sigmoid"), "bias", None)
        if not isinstance(bias, Tensor):
            raise DataError("calibrate=True moves the last layer's bias, and this one has none.")
        with torch.no_grad():
            bias -= weights.log().to(bias)
    one = len(set(weights.tolist())) == 1
    weight = float(weights[0]) if one else tuple(weights.tolist())
    net.fitted = True
    net.recipe = asdict(config) | {
        "images": len(targets),
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
        len(targets),
        _counts(targets),
        weight,
        outcome.l2,
        outcome.search,
        outcome.quality,
        tuple((rows > 0).float().mean(1).tolist()),
        skipped,
        seconds,
        outcome.gradient,
    )
