"""The demo: the whole job offline, on a photograph and synthetic images, with a report."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.errors import MissingExtra
from sigcam.core.files import check_writable, write_png, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.data.images import open_image
from sigcam.data.loader import load_batches
from sigcam.data.photographs import example_photographs
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.sample import Sample, Samples, data_fingerprint
from sigcam.methods.explainer import explain_pass
from sigcam.methods.explanation import is_calibrated, presence_words
from sigcam.methods.registry import MapConfig, Scale
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import foreground
from sigcam.models.classifier import load_classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.opening import open_network
from sigcam.reports.demo_page import FIT_NAMES, demo_page
from sigcam.reports.figures import (
    Passes,
    absence_figure,
    distortions_figure,
    maps_figure,
    photograph_figure,
)
from sigcam.reports.html import can_report
from sigcam.training.branch import fit
from sigcam.training.features import extract
from sigcam.training.linear_probe import train_probe

SHOWN = 24  # test images in the report
PHOTOGRAPH, ABSENT = "chelsea", "golden retriever"  # a cat, and a class that is not there
LIKELY = 3  # classes of the photograph in the table
EMPTY = 200  # images without a bird, and as many with one
IOU_THRESHOLDS = torch.arange(1, 20) / 20  # 0.05 to 0.95
HALF = 9  # the place of one half among them
FITS = ("paper", "background")  # the branches whose maps are measured: the paper's fit, and the default


@dataclass(frozen=True)
class MapRow:
    """One row of the table of maps: the head, how its branch was fitted, and how the map is drawn."""

    branch: Branch
    clamp: bool
    fit: str | None = None  # of the sigmoid branch, one of FITS
    scale: Scale = "unit"

    @property
    def weights(self) -> str:
        """What the map keeps of the channel weights."""
        if self.scale == "probability":
            return "probability, cut at one half"
        return "positive only" if self.clamp else "signed"


HEAD_ROWS = MapRow("softmax", False), MapRow("softmax", True), MapRow("centred", False)
SIGMOID = tuple(MapRow("sigmoid", clamp, name) for name in FITS for clamp in (False, True))
ABSOLUTE = MapRow("sigmoid", False, "background", "probability")  # where the branch is calibrated


@dataclass(frozen=True)
class Measured:
    """Results over some images: mean IoUs (variants, thresholds), the predictions (images,) of the head
    before the fit and of the classifier, the scores (images,) of the best class by name, and maps per second.
    """

    ious: Tensor
    before: Tensor
    predicted: Tensor
    scores: dict[str, Tensor]
    speed: float


def run_demo(
    output: Path,
    *,
    images: int = 1600,
    test_images: int = 400,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Write figures, report, classifier, branch and manifest.json to the folder; return the numbers."""
    check_writable(output)
    train, test = shapes(images, split="train", seed=seed), shapes(test_images, split="test", seed=seed)
    validation = shapes(max(64, test_images // 4), split="val", seed=seed)
    figures = dict[str, Path]()
    photograph, figure = _photograph(device)
    if figure is not None:
        figures["photograph"] = output / "photograph.png"
        write_png(figures["photograph"], figure)
    classifier = load_classifier("embedded", num_classes=len(train.classes), device=device)
    classifier.model.to(memory_format=torch.channels_last)

    staged = _staged("classifier", progress)
    features = train_probe(classifier, train, seed=seed, maps=True, progress=staged).features
    path = output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec="embedded", classes=train.classes)
    weights = fingerprint(classifier.model)

    nets = {
        name: attach(classifier.model, seed=seed, transform=classifier.transform, class_names=train.classes)
        for name in FIT_NAMES
    }
    net, config, staged = nets["background"], FitConfig(seed=seed), _staged("branch", progress)
    head = copy.deepcopy(net.last_layer("softmax"))
    features = extract(net, features, config, backgrounds=True)  # of the probe's pass: no other is needed
    fit(nets["paper"], replace(features, backgrounds=()), replace(config, background=0), progress=staged)
    fitted = fit(net, features, config, progress=staged)
    others = scenes(min(EMPTY, images), seed=seed + 1)  # other scenes than those of the test
    others_read = extract(net, others, config, labelled=False, progress=staged)
    fit(nets["negatives"], features, config, negatives=others_read)
    net.save(output / "branch.safetensors")
    labels = torch.tensor([sample.label for sample in test])

    variants = [*HEAD_ROWS, *SIGMOID, *([ABSOLUTE] if is_calibrated(net) else [])]
    passes, empty = Passes(net), scenes(min(EMPTY, test_images), seed=seed)
    chosen = _measure(nets, head, validation, variants, _staged("threshold", progress)).ious.argmax(1)
    chosen[[i for i, each in enumerate(variants) if each.scale == "probability"]] = HALF
    found = _measure(nets, head, test, variants, _staged("maps", progress), passes)
    with_bird, without = found.scores, _top_scores(nets, empty, _staged("empty scenes", progress), passes)
    table: dict[str, Any] = {
        "photograph": photograph,
        "maps": [
            {
                "branch": each.branch,
                "fit": each.fit,
                "clamp": each.weights,
                "iou": float(found.ious[i, chosen[i]]),
                "threshold": float(IOU_THRESHOLDS[chosen[i]]),
            }
            for i, each in enumerate(variants)
        ],
        "nothing_there": [_presence(score, with_bird[score][:EMPTY], without[score]) for score in with_bird],
        "accuracy_before": float((found.before == labels).double().mean()),
        "accuracy_after": float((found.predicted == labels).double().mean()),
        "predictions_changed": int((found.before != found.predicted).sum()),
        "weights_unchanged": weights == fingerprint(classifier.model),
        "background": fitted.background,
        "maps_per_second": round(found.speed, 1),
        "fit_seconds": round(sum({**fitted.seconds, **features.seconds}.values()), 1),
    }
    shown = test[:SHOWN]  # whose passes were kept
    figures |= {name: output / f"{name}.png" for name in ("maps", "absent", "distortions")}
    write_png(figures["maps"], maps_figure(passes, shown))
    write_png(figures["absent"], absence_figure(passes, nets["negatives"], shown, empty[:SHOWN]))
    write_png(figures["distortions"], distortions_figure(net, shown, passes))  # again, in double
    if can_report():
        write_text_atomic(output / "report.html", demo_page(table, figures, passes, shown))
    fingerprints = {"model_fingerprint": weights, "data_fingerprint": data_fingerprint(train)}
    write_manifest(output, model="embedded", **fingerprints, seed=seed, losses=fitted.losses, numbers=table)
    return table


def _staged(name: str, progress: Progress) -> Progress:
    return lambda stage, done, total: progress(name if stage == name else f"{name} {stage}", done, total)


def _photograph(device: str) -> tuple[dict[str, Any], Any]:
    """Return the classes of a photograph with their scores, an absent one among them, by the classifier and
    the branch as shipped, and a figure; without the package that brings the photograph, why there is none."""
    try:
        (photograph,) = example_photographs([PHOTOGRAPH])
    except MissingExtra as error:
        return {"left_out": str(error)}, None
    picture = ImageOps.fit(open_image(photograph.path), (448, 448))  # its middle, not squashed
    sample = Sample(photograph.name, lambda: picture)
    net = open_network(device=device).net
    assert net.class_names is not None
    passes, absent = Passes(net), net.class_names.index(ABSENT)
    likely = passes.explain(net, sample, "sigmoid").top_classes[0, :LIKELY].tolist()
    ex = passes.explain(net, sample, "sigmoid", classes=torch.tensor([[*likely, absent]]))
    rows = [
        {
            "class_name": ex.name(index),
            "probability": float(ex.probability[0, k]),
            "evidence": float(ex.evidence[0, k]),
            "presence": presence_words(float(ex.evidence[0, k])),
        }
        for k, index in enumerate((*likely, absent))
    ]
    return {"credit": photograph.credit, "classes": rows}, photograph_figure(
        passes, sample, (likely[0], absent)
    )


def _presence(score: str, with_bird: Tensor, without: Tensor) -> dict[str, Any]:
    """Return how well a score of the best class (images,) tells images with a bird from those without."""
    return {
        "score": score,
        "above_half_with_bird": float((with_bird > 0.5).double().mean()),
        "above_half_without": float((without > 0.5).double().mean()),
        "auroc": float((with_bird[:, None] > without[None]).double().mean()),
    }


def _best_scores(nets: Mapping[str, DualBranch], forward: ForwardPass) -> dict[str, Tensor]:
    """Return the highest softmax probability and the highest evidence of each branch, (B,) each."""
    scores = {"softmax probability": forward.softmax.softmax(1).amax(1).cpu()}
    for name, net in nets.items():
        logits = net.reread(forward).sigmoid.detach()
        scores[f"sigmoid evidence, {FIT_NAMES[name]}"] = net.evidence(logits).amax(1).cpu()
    return scores


@torch.no_grad()
def _top_scores(
    nets: Mapping[str, DualBranch], samples: Samples, progress: Progress, passes: Passes
) -> dict[str, Tensor]:
    """Return the scores of the best class (images,), by name."""
    parts, count = list[dict[str, Tensor]](), 0
    for indices, forward, _ in _forward_passes(nets["background"], samples, passes):
        parts.append(_best_scores(nets, forward))
        count += len(indices)
        progress("measured", count, len(samples))
    return _joined(parts)


def _forward_passes(
    net: DualBranch, samples: Samples, passes: Passes | None = None
) -> Iterator[tuple[list[int], ForwardPass, float | None]]:
    """Yield indices of samples, their pass, and its seconds; with `passes`, those of the first pictures are
    kept there for the figures, and not timed."""
    kept = min(SHOWN, len(samples)) if passes else 0
    for index in range(kept):
        assert passes is not None
        yield [index], passes.of(samples[index])[1], None
    assert net.transform is not None
    for batch in load_batches(samples[kept:], net.transform, batch_size=8):
        begin = time.perf_counter()
        forward = net.run(batch.images.to(net.device), grad=True)  # one pass serves all variants
        yield [kept + i for i in batch.indices], forward, time.perf_counter() - begin


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measure(
    nets: Mapping[str, DualBranch],
    head: nn.Module,
    samples: Samples,
    variants: Sequence[MapRow],
    progress: Progress,
    passes: Passes | None = None,
) -> Measured:
    """Draw every variant's maps of the images, with one pass of the backbone, and compare them with masks.

    `head` is the softmax head's last layer before the fit, read from the same pass.
    """
    net = nets["background"]
    total, seconds, count = torch.zeros(len(variants), len(IOU_THRESHOLDS), dtype=torch.float64), 0.0, 0
    timed, before, predicted, scores = 0, list[Tensor](), list[Tensor](), list[dict[str, Tensor]]()
    for indices, forward, duration in _forward_passes(net, samples, passes):
        masks = torch.stack([_mask(samples, i) for i in indices])
        begin = time.perf_counter()
        explain_pass(net, forward, MapConfig())
        if duration is not None:
            seconds, timed = seconds + duration + time.perf_counter() - begin, timed + len(indices)
        for row, each in enumerate(variants):
            drawn = nets[each.fit or "background"]
            config = MapConfig(branch=each.branch, clamp=each.clamp, scale=each.scale)
            maps = explain_pass(drawn, drawn.reread(forward), config).maps.cpu()
            for i, threshold in enumerate(IOU_THRESHOLDS.tolist()):
                above = maps > threshold if each.scale == "probability" else foreground(maps, threshold)
                inside = (above & masks).flatten(1).sum(1)
                total[row, i] += (inside / (above | masks).flatten(1).sum(1)).sum().double()
        with torch.no_grad():
            before.append(head(forward.pooled).argmax(1).cpu())
        predicted.append(forward.softmax.argmax(1).cpu())
        scores.append(_best_scores(nets, forward))
        count += len(indices)
        progress("measured", count, len(samples))
    predictions = torch.cat(before), torch.cat(predicted)
    return Measured(total / count, *predictions, _joined(scores), timed / seconds)


def _mask(samples: Samples, index: int) -> Tensor:
    open_mask = samples[index].open_mask
    assert open_mask is not None
    return torch.from_numpy(open_mask()) == 1
