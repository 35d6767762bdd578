"""The demo: the whole job offline, on synthetic images and the embedded model, with a report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.files import check_writable, write_png, write_text_atomic
from sigcam.core.manifest import provenance, write_manifest
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.sample import Sample, Samples, data_fingerprint
from sigcam.methods.explainer import explain, explain_pass
from sigcam.methods.explanation import data_uri, is_calibrated
from sigcam.methods.postprocess import disagreement
from sigcam.methods.registry import MapConfig, Scale
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import foreground
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.reports.explain_report import JPEG_QUALITY
from sigcam.reports.figures import BOTH_HEADS, absence_figure, distortions_figure, maps_figure
from sigcam.reports.html import (
    Card,
    Figure,
    Gallery,
    Number,
    ReportTable,
    Section,
    Shot,
    can_report,
    render_page,
)
from sigcam.training.branch import fit
from sigcam.training.features import extract
from sigcam.training.linear_probe import train_probe

SHOWN = 24  # test images in the report
EMPTY = 200  # images without a bird, and as many with one
IOU_THRESHOLDS = torch.arange(1, 20) / 20  # 0.05 to 0.95
HALF = 9  # the place of one half among them
FITS = ("paper", "background")  # the branches whose maps are measured: the paper's fit, and the default
FIT_NAMES = {
    "paper": "the paper's fit",
    "background": "with background",
    "negatives": "with background and empty scenes",
}


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
    """Results over some images: mean IoUs (variants, thresholds), the prediction (images,) and the scores
    (images,) of the best class by name, and maps per second."""

    ious: Tensor
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
    classifier = load_classifier("embedded", num_classes=len(train.classes), device=device)
    classifier.model.to(memory_format=torch.channels_last)

    train_probe(classifier, train, seed=seed, progress=_staged("classifier", progress))
    path = output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec="embedded", classes=train.classes)
    before = _predictions(classifier, test)
    weights = fingerprint(classifier.model)

    nets = {
        name: attach(classifier.model, seed=seed, transform=classifier.transform, class_names=train.classes)
        for name in FIT_NAMES
    }
    net, config, staged = nets["background"], FitConfig(seed=seed), _staged("branch", progress)
    features = extract(net, train, config, backgrounds=True, progress=staged)  # one pass serves both fits
    fit(nets["paper"], replace(features, backgrounds=()), replace(config, background=0), progress=staged)
    fitted = fit(net, features, config, progress=staged)
    others = scenes(min(EMPTY, images), seed=seed + 1)  # other scenes than those of the test
    fit(nets["negatives"], features, config, negatives=extract(net, others, config, labelled=False))
    net.save(output / "branch.safetensors")
    labels = torch.tensor([sample.label for sample in test])

    variants = [*HEAD_ROWS, *SIGMOID, *([ABSOLUTE] if is_calibrated(net) else [])]
    chosen = _measure(nets, validation, variants, _staged("threshold", progress)).ious.argmax(1)
    chosen[[i for i, each in enumerate(variants) if each.scale == "probability"]] = HALF
    found = _measure(nets, test, variants, _staged("maps", progress))
    with_bird, without = found.scores, _top_scores(nets, scenes(min(EMPTY, test_images), seed=seed))
    table: dict[str, Any] = {
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
        "accuracy_before": float((before == labels).double().mean()),
        "accuracy_after": float((found.predicted == labels).double().mean()),
        "predictions_changed": int((before != found.predicted).sum()),
        "weights_unchanged": weights == fingerprint(classifier.model),
        "background": fitted.background,
        "maps_per_second": round(found.speed, 1),
        "fit_seconds": round(sum({**fitted.seconds, **features.seconds}.values()), 1),
    }
    figures = {name: output / f"{name}.png" for name in ("absent", "distortions", "maps")}
    empty = scenes(min(64, test_images), seed=seed)
    write_png(figures["absent"], absence_figure(nets["negatives"], test[:64], empty))
    write_png(figures["maps"], maps_figure(net, test[:64]))
    write_png(figures["distortions"], distortions_figure(net, test[:64]))
    if can_report():
        write_text_atomic(output / "report.html", demo_page(table, figures, net, test[:SHOWN]))
    fingerprints = {"model_fingerprint": weights, "data_fingerprint": data_fingerprint(train)}
    write_manifest(output, model="embedded", **fingerprints, seed=seed, losses=fitted.losses, numbers=table)
    return table


def _staged(name: str, progress: Progress) -> Progress:
    return lambda stage, done, total: progress(name if stage == name else f"{name} {stage}", done, total)


def _predictions(classifier: Classifier, samples: Samples) -> Tensor:
    """Return the predictions of the classifier alone, (images,)."""
    model, batches = classifier.model, load_batches(samples, classifier.transform, batch_size=8)
    device = next(model.parameters()).device
    with torch.no_grad():
        return torch.cat([model(batch.images.to(device)).argmax(1).cpu() for batch in batches])


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
def _top_scores(nets: Mapping[str, DualBranch], samples: Samples) -> dict[str, Tensor]:
    """Return the scores of the best class (images,), by name."""
    net = nets["background"]
    assert net.transform is not None
    batches = load_batches(samples, net.transform, batch_size=8)
    return _joined([_best_scores(nets, net.run(batch.images.to(net.device))) for batch in batches])


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measure(
    nets: Mapping[str, DualBranch], samples: Samples, variants: Sequence[MapRow], progress: Progress
) -> Measured:
    """Draw every variant's maps of the images, with one pass of the backbone, and compare them with masks."""
    net = nets["background"]
    assert net.transform is not None
    total, seconds, count = torch.zeros(len(variants), len(IOU_THRESHOLDS), dtype=torch.float64), 0.0, 0
    predicted, scores = list[Tensor](), list[dict[str, Tensor]]()
    for batch in load_batches(samples, net.transform, batch_size=8):
        masks = torch.stack([_mask(samples, i) for i in batch.indices])
        begin = time.perf_counter()
        forward = net.run(batch.images.to(net.device), grad=True)  # one pass serves all variants
        explain_pass(net, forward, MapConfig())
        seconds += time.perf_counter() - begin
        for row, each in enumerate(variants):
            drawn = nets[each.fit or "background"]
            config = MapConfig(branch=each.branch, clamp=each.clamp, scale=each.scale)
            maps = explain_pass(drawn, drawn.reread(forward), config).maps.cpu()
            for i, threshold in enumerate(IOU_THRESHOLDS.tolist()):
                above = maps > threshold if each.scale == "probability" else foreground(maps, threshold)
                inside = (above & masks).flatten(1).sum(1)
                total[row, i] += (inside / (above | masks).flatten(1).sum(1)).sum().double()
        predicted.append(forward.softmax.argmax(1).cpu())
        scores.append(_best_scores(nets, forward))
        count += len(batch.indices)
        progress("measured", count, len(samples))
    return Measured(total / count, torch.cat(predicted), _joined(scores), count / seconds)


def _mask(samples: Samples, index: int) -> Tensor:
    open_mask = samples[index].open_mask
    assert open_mask is not None
    return torch.from_numpy(open_mask()) == 1


def map_source(row: Mapping[str, Any]) -> str:
    """Return what a row of the table of maps is drawn from."""
    return f"{row['branch']}, {FIT_NAMES[row['fit']]}" if row["fit"] else str(row["branch"])


def demo_page(
    table: Mapping[str, Any], figures: Mapping[str, Path], net: DualBranch, samples: Samples
) -> str:
    """The demo's numbers, its figures, and the maps of some test images by both heads."""
    localization = ReportTable(
        ("map from", "weights", "mean IoU", "threshold"),
        [
            (map_source(row), [row["clamp"], Number(row["iou"], digits=3), Number(row["threshold"])])
            for row in table["maps"]
        ],
        foot="Of the thresholded map with the object's mask, at the threshold that was best on other images; "
        "for maps in probabilities no threshold is chosen.",
    )
    scores = list[tuple[str, list[Number]]]()
    for row in table["nothing_there"]:
        shares = [Number(100 * row[f"above_half_{which}"], digits=1) for which in ("with_bird", "without")]
        scores.append((row["score"], [*shares, Number(row["auroc"], digits=3)]))
    presence = ReportTable(
        ("score of the best class", "above 0.5 with a bird, %", "above 0.5 without, %", "AUROC"),
        scores,
        foot="AUROC: the chance that a picture with a bird scores higher than a scene without one. The empty "
        "scenes that the last branch was also fitted on are others than these.",
    )
    captions = {
        "absent": "The first correctly predicted picture of some classes, and the same scene without its "
        "bird. The softmax head's map is stretched to its own range; probabilities have one scale for all. "
        "The branch is the one that also learned from empty scenes.",
        "distortions": "The softmax head shifted in two ways that change no probability; the sigmoid "
        "branch has no such freedom.",
        "maps": "Input, the object's mask, and the same method on both heads.",
    }
    parts = []
    for name, path in figures.items():
        with Image.open(path) as image:
            parts.append(Figure(Shot(data_uri(image, 88), f"figure: {captions[name]}", captions[name])))
    return render_page(
        "sigcam demo",
        [
            Section("Where is it?", [localization]),
            Section("Is it there at all?", [presence]),
            Section("Figures", parts),
            Section(
                "Maps of test pictures",
                [Gallery([_both_heads(net, sample, samples.classes) for sample in samples], "class")],
                intro="Grad-CAM of the predicted class, from the softmax head and from the sigmoid branch.",
            ),
        ],
        lead="Synthetic birds: a linear head is trained on the frozen embedded network, a sigmoid branch is "
        "fitted beside it, once as in the paper and once with the backgrounds of the training images as "
        "examples of no bird; all are asked where the bird is, and whether there is one.",
        facts=[
            ("accuracy before and after", f"{table['accuracy_before']:.1%}, {table['accuracy_after']:.1%}"),
            ("predictions changed", str(table["predictions_changed"])),
            ("weights unchanged", "yes" if table["weights_unchanged"] else "no"),
            ("weight of backgrounds", f"{table['background']:g}"),
            ("seconds to fit the branch", str(table["fit_seconds"])),
            ("maps per second", str(table["maps_per_second"])),
        ],
        **provenance(),
    )


def _both_heads(net: DualBranch, sample: Sample, classes: Sequence[str]) -> Card:
    """One image with the maps of both heads."""
    image = sample.open()
    softmax, sigmoid = (explain(net, [image], branch=branch) for branch in BOTH_HEADS)
    top = sigmoid.rows()[0]["top"]
    name, label = softmax.name(int(softmax.classes[0])), classes[sample.label or 0]
    return Card(
        label,
        [
            Shot(data_uri(ex.overlay(boxes=0.2)[0], JPEG_QUALITY), f"{ex.branch} map of {name}", ex.branch)
            for ex in (softmax, sigmoid)
        ],
        group=label,
        keys={
            "probability": float(softmax.probability[0]),
            "evidence": float(sigmoid.evidence[0]),
            "disagreement of the heads' maps": float(disagreement(softmax.maps[0], sigmoid.maps[0])),
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        notes=[] if name == label else [f"taken for {name}"],
    )
