"""fit: train the sigmoid branch, and nothing else, with class-balanced binary cross-entropy (Eq. 12)."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, broadcast_first
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import Progress, Skipped
from sigcam.data.images import images_from_paths
from sigcam.data.sample import Samples
from sigcam.metrics.classification import EvidenceQuality, Quality
from sigcam.models.preprocess import Transform
from sigcam.network.calibration import BranchCalibration
from sigcam.network.dual import DualBranch
from sigcam.training.background import suffices_f, why_no_background
from sigcam.training.calibration import calibrate, check_zooms
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.features import Features, TrainingData, all_labels, extract, length_of, match_labels
from sigcam.training.linear_head import solve_head
from sigcam.training.loss import check_labels, pos_weights, positives_of
from sigcam.training.recipes import TrainedHead, train_by_steps, train_cached
from sigcam.training.selection import MIN_HELD_OUT
from sigcam.training.settings import check_fit_config
from sigcam.training.training_set import choose_held_out, make_training_set

log = logging.getLogger("sigcam")


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a fit: losses, data, timing, and the quality on held-out images.

    Args:
        losses: mean loss of each epoch. Of the solver: mean loss and penalty of each step, first without
            the held-out images, then with all.
        label_counts: images of each class; for one logit, images without and with the class.
        pos_weight: weight of a positive label; one per class where they differ.
        l2: strength of the penalty.
        search: (l2, held-out score) of each strength tried.
        search_by: what that score is: "average precision" or, with backgrounds, "evidence loss".
        background: weight of the images' backgrounds; 0 if none were used.
        background_search: (weight, held-out mean average precision) of each weight tried.
        without_background: images that have too little background to learn from.
        calibration: scales and shifts that make probabilities of logits; None without backgrounds.
        evidence_quality: reliability of calibrated evidence; None if it was not calibrated.
        positive_share: share of positive weights of each class in the last layer.
        skipped: (id, reason) of images that could not be read.
        seconds: duration of each stage.
        gradient: norm of the gradient at the solver's solution; None without the solver.
    """

    losses: tuple[float, ...]
    images: int
    label_counts: tuple[int, ...]
    pos_weight: float | tuple[float, ...]
    l2: float
    search: tuple[tuple[float, float], ...]
    search_by: str
    background: float
    background_search: tuple[tuple[float, float], ...]
    without_background: int
    calibration: BranchCalibration | None
    evidence_quality: EvidenceQuality | None
    quality: Quality | None
    positive_share: tuple[float, ...]
    skipped: tuple[tuple[str, str], ...]
    seconds: dict[str, float]
    gradient: float | None = None

    def __repr__(self) -> str:
        quality = (
            "not held out" if self.quality is None else f"mean AP {self.quality.mean_average_precision:.3f}"
        )
        shown = f"{self.images} images, {len(self.positive_share)} classes, {quality}"
        return f"FitResult({shown}, l2={self.l2:g}, background={self.background:g})"


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
    """Train the sigmoid branch on features computed once per image and view; predictions do not change.

    Args:
        data: `Samples`, a list of `Sample`, a torch Dataset or DataLoader that yields (images, labels), or
            `Features`.
        negatives: images that show none of the classes: a folder, samples, a Dataset, or their `Features`.
        transform: from an image to a (3, H, W) tensor, for `Samples`; by default `net.transform`.
        cache: folder that keeps features, so that a fit can be resumed and repeated; None keeps none.
        progress: called with (stage, done, total).
    """
    if not isinstance(net, DualBranch):
        raise ConfigError(f"fit takes what attach returns, not {type(net).__name__}: sigcam.attach(model).")
    folder = None if cache is None else Path(cache)
    generators = [net.device] if net.device.type == "cuda" else []
    with torch.inference_mode(False), torch.random.fork_rng(generators):
        torch.manual_seed(config.seed)
        inputs = HeadInputs(net)
        check_fit_config(config, linear=inputs.linear, negatives=negatives is not None)
        single = len(net.sigmoid.copies) == 1 and getattr(net.last_layer("sigmoid"), "bias", None) is not None
        if config.calibrate and not single:
            raise ConfigError("calibrate=True needs a head with exactly one output layer that has a bias.")
        if config.recipe == "fast":
            read = partial(extract, net, inputs=inputs, transform=transform, cache=folder, progress=progress)
            trained, labels, pos_weight = _fit_cached(net, inputs, data, config, negatives, read, progress)
        else:
            if isinstance(data, Features):  # without new crops
                if config.batch_norm == "batch":
                    raise ConfigError("batch_norm='batch' computes features in every step: give it images.")
                data = extract(net, data, config, inputs=inputs)
                labels = data.labels
            else:
                data = match_labels(net, data)
                labels = all_labels(net, data, config)
            pos_weight = _positive_weights(labels, net.classes, config, ())
            trained = train_by_steps(net, data, pos_weight, config, transform, folder, progress)
        return _install(net, data, config, trained, labels, pos_weight)


def _fit_cached(
    net: DualBranch,
    inputs: HeadInputs,
    data: TrainingData | Features,
    config: FitConfig,
    negatives: TrainingData | Features | str | Path | None,
    read: Callable[..., Features],
    progress: Progress | None,
) -> tuple[TrainedHead, Tensor, Tensor]:
    """Train on features that are computed once; return the head, all labels and the weights of positives."""
    backgrounds = _wants_backgrounds(net, data, config)
    if backgrounds:
        check_zooms(net, config)
    features, others = read(data, config, backgrounds=backgrounds), None
    if negatives is not None:
        images = images_from_paths([negatives]) if isinstance(negatives, str | Path) else negatives
        others = read(images, config, labelled=False)
        if not sum(all_gather(len(others))):
            reason = others.skipped[0][1]
            raise DataError(f"no image without a class could be read, the first: {reason}")
    positions, labels = features.gather_labels()
    pos_weight = _positive_weights(labels, net.classes, config, features.skipped)
    held_out = positions[choose_held_out(labels, config)]
    rows = make_training_set(net, features, others, held_out, config)
    if inputs.layer is not None:
        trained = solve_head(net, inputs.layer, rows, pos_weight, config, progress)
    else:
        trained = train_cached(net, rows, pos_weight, config, progress)
    seconds = {**features.seconds, **(others.seconds if others else {}), **trained.seconds}
    if features.backgrounds:
        began = time.perf_counter()
        calibration, evidence = calibrate(net, data, features, held_out, trained, config, read)
        seconds["calibration"] = time.perf_counter() - began
        few = sum(all_gather(int((~features.backgrounds[0].flatten(1).isfinite().all(1)).sum())))
        trained = replace(trained, calibration=calibration, evidence_quality=evidence, without_background=few)
    skipped = features.skipped + (others.skipped if others else ())
    return replace(trained, skipped=skipped, seconds=seconds), labels, pos_weight


def _wants_backgrounds(net: DualBranch, data: TrainingData | Features, config: FitConfig) -> bool:
    """Return whether backgrounds are to be computed; ConfigError if they are asked for and cannot be."""
    reason = why_no_background(net)
    if isinstance(data, Features) and not data.backgrounds and not (data.maps and suffices_f(net)):
        reason = "features that were computed before have no backgrounds"
        if any(zoom != 1 for zoom in config.zooms):
            raise ConfigError("zooms are calibrated on images: give images instead of features.")
    if config.background == "auto":
        if config.calibrate or 0 < length_of(data) * config.holdout < MIN_HELD_OUT or not config.holdout:
            return False
        if reason:
            log.warning("the branch is fitted without background evidence: %s.", reason)
    elif config.background and reason:
        raise ConfigError(f"{reason}: use background=0.")
    return config.background != 0 and reason is None


def _positive_weights(
    labels: Tensor, classes: int, config: FitConfig, skipped: tuple[Skipped, ...]
) -> Tensor:
    """Return the (C,) weight of a positive label; raise DataError for labels that cannot be learned from."""
    if not len(labels):
        reason = f": none of {len(skipped)} could be read, the first: {skipped[0][1]}" if skipped else "."
        raise DataError(f"there are no images to fit on{reason}")
    check_labels(labels, classes)
    counts = _label_counts(labels, classes)
    absent = counts.count(0)
    if len(counts) - absent < 2:
        raise DataError(f"all {len(labels)} images show one class: a branch learns from at least two.")
    if absent:
        log.warning("%d of %d classes have no images: their scores stay near 0.", absent, len(counts))
    fewest, most = min(filter(None, counts)), max(counts)
    if most > 10 * fewest:
        log.warning("classes have from %d to %d images; pos_weight='counts' evens them out.", fewest, most)
    return pos_weights(config.pos_weight, positives_of(labels, classes), len(labels))


def _label_counts(labels: Tensor, classes: int) -> tuple[int, ...]:
    """Return the number of images of each class; for one logit, without and with the class."""
    positives = [int(n) for n in positives_of(labels, classes)]
    return tuple(positives) if len(positives) > 1 else (len(labels) - positives[0], positives[0])


def _held_out_scores(trained: TrainedHead) -> dict[str, float]:
    """Return how good the branch is on held-out images: those scores that are numbers."""
    quality, scores = trained.quality, dict[str, float]()
    if quality:
        names = ("images", "mean_average_precision", "mean_auroc")
        scores |= {name: getattr(quality, name) for name in names}
    if trained.evidence_quality:
        scores["evidence_error"] = trained.evidence_quality.reliability.error
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _install(
    net: DualBranch,
    data: TrainingData | Features,
    config: FitConfig,
    trained: TrainedHead,
    labels: Tensor,
    pos_weight: Tensor,
) -> FitResult:
    """Put the trained head into the network and return the result."""
    state = {name: broadcast_first(tensor) for name, tensor in trained.state.items()}
    net.sigmoid.load_state_dict(state)
    if config.calibrate:
        bias = net.last_layer("sigmoid").get_parameter("bias")
        with torch.no_grad():
            bias.sub_(pos_weight.log().to(bias))
    weights = tuple(pos_weight.tolist())
    weight = weights[0] if len(set(weights)) == 1 else weights
    net.fitted, net.calibration = True, trained.calibration or BranchCalibration()
    about = {"images": len(labels), "pos_weight": weight, "l2": trained.l2, "final_loss": trained.losses[-1]}
    about["background"] = trained.background
    if trained.quality:
        about["held_out"] = _held_out_scores(trained)
    net.recipe = asdict(config) | about | {"zooms": list(config.zooms)}  # as the branch file keeps it
    if isinstance(data, Samples) and net.class_names is None and len(data.classes) == max(net.classes, 2):
        net.class_names = data.classes
    if skipped := trained.skipped:
        sentence = "%d file(s) could not be read and were left out, the first: %s"
        log.warning(sentence, len(skipped), skipped[0][1])
    last_layer = net.last_layer("sigmoid").get_parameter("weight").detach().flatten(1)
    return FitResult(
        losses=trained.losses,
        images=len(labels),
        label_counts=_label_counts(labels, net.classes),
        pos_weight=weight,
        l2=trained.l2,
        search=trained.search,
        search_by=trained.search_by,
        background=trained.background,
        background_search=trained.background_search,
        without_background=trained.without_background,
        calibration=trained.calibration,
        evidence_quality=trained.evidence_quality,
        quality=trained.quality,
        positive_share=tuple((last_layer > 0).float().mean(1).tolist()),
        skipped=skipped,
        seconds=trained.seconds,
        gradient=trained.gradient,
    )
